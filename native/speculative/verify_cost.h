// What it costs on this machine to round verified tokens as single ones (patches/0110): measured once, when the contexts are
// there, so that the choice between equal text and faster steps is made with the numbers.
#pragma once

#include "verify_width.h"

#include <cstdint>
#include <string>
#include <vector>

struct llama_context;

namespace spark {

struct verify_cost {
    bool    is_exact = false; // every backend of the context can
    int32_t n_tokens = 0; // verified together; 0: nothing was measured
    double  exact_ms = 0; // a step with each token rounded as if alone
    double  fast_ms  = 0; // a step with the kernels for this many rows

    double share() const { return exact_ms/fast_ms - 1; }
};

// The quickest of a few steps of each kind, taken in turn, on an empty context that is left empty, without statistics and
// with exact rounding on. Not measured when a backend cannot round so (GPUs), when one step takes longer than a second (experts that come from a disk), or fails.
verify_cost measure_verify_cost(llama_context * context, int32_t n_tokens);

// Milliseconds of a step by its rows, n_of_sequence of each sequence, from 1 to what all sequences have (64 at most): the quickest of
// a few steps of each kind, as verified tokens are rounded now. On an empty context that is left empty, without statistics. Takes a few seconds at most; no points when a step fails.
std::vector<step_cost::point> measure_verify_curve(llama_context * context, int32_t n_of_sequence);

// One line for the person who chooses.
std::string describe(const verify_cost & cost);

// "; a step of 1, 4 and 8 takes ... ms here", or nothing.
std::string describe(const std::vector<step_cost::point> & curve);

} // namespace spark
