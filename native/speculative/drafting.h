// What the server knows about its drafting: pauses and widths of every sequence, drafts that are not numbers, the profile of steps.
// Written by the inference thread, read by HTTP threads.
#pragma once

#include "draft_pause.h"
#include "step_profile.h"
#include "verify_width.h"

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

struct llama_context;

namespace spark {

class drafting {
public:
    struct report {
        step_profile::totals steps;
        uint64_t n_pauses = 0;
        int32_t  n_paused = 0;      // sequences that rest now
        bool     is_broken = false; // the draft computes no numbers, and is not asked any more
        uint64_t n_graphs = 0, n_reused = 0; // computed by the target, and of them those whose graph was that of the last
        bool     has_auto_width = false;
        std::vector<uint64_t> n_by_width;           // see verify_width::chosen
        std::vector<step_cost::point> verify_curve; // what was measured at start
    };

    // How many tokens the sequence drafts in this step, 0 for none, at most n_allowed (> 0).
    int32_t n_draft(int id_slot, int32_t n_allowed);

    // n_tokens of a draft were made by `context` (null: not by a model). Its logits are looked at after a draft of which nothing was accepted.
    void drafted(int id_slot, llama_context * context, size_t n_tokens);

    void verified(int id_slot, size_t n_accepted);
    void phase_end(server_phase phase);

    // The target has computed a batch; n_reused: llama.cpp's count of graphs that were not built anew, so far.
    void computed(int32_t n_reused);
    void request_finished();

    // A model is loaded (again); nothing is drafted until the width is known.
    void reset();

    // See verify_width::configure.
    void set_width(int32_t n_fixed, int32_t n_most, std::vector<step_cost::point> curve);

    report get() const;

private:
    struct sequence {
        draft_pause pause;
        int32_t     n_drafted = 0;        // of the draft being verified
        bool        was_useless = true;   // nothing of the last draft was accepted; true before the first
    };

    sequence & at(int id_slot);
    void step_ended(const std::optional<step_profile::step> & step);

    mutable std::mutex mutex;
    std::vector<sequence> sequences;
    step_profile profile;
    verify_width width;
    uint64_t n_pauses  = 0;
    uint64_t n_graphs  = 0;
    int32_t  n_reused  = 0;
    bool     is_broken = false;
};

// One line about a run, empty when nothing was drafted.
std::string describe(const drafting::report & report);

} // namespace spark
