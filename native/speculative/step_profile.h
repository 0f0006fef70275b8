// Where the time of steps with a draft goes, and how deep drafts are accepted.
#pragma once

#include "server_hooks.h"

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace spark {

// Pure: times come from the caller. Steps without a draft are reported, and not counted.
class step_profile {
public:
    static constexpr int N_PHASE = 5; // of server_phase

    struct totals {
        uint64_t n_steps    = 0;                // in which at least one sequence had a draft verified
        uint64_t n_drafts   = 0;                // verified, over all sequences
        uint64_t n_drafted  = 0;                // tokens
        uint64_t n_accepted = 0;                // tokens
        std::array<uint64_t, N_PHASE> us {};    // microseconds by server_phase, over n_steps
        std::vector<uint64_t> accepted_at;      // [depth]: drafts of which more than `depth` tokens were accepted
        std::vector<uint64_t> drafted_at;       // [depth]: drafts that were longer than `depth`
    };

    // One step: drafts verified in it, their tokens, sequences that had none, and microseconds by server_phase.
    struct step {
        int32_t n_drafts = 0, n_drafted = 0, n_accepted = 0, n_singles = 0;
        std::array<uint64_t, N_PHASE> us {};
    };

    // The time since the last call belongs to `phase`. A step lasts until the next one drafts, or decodes; returns the step that
    // this ends, if drafts were verified in it or sequences had none.
    std::optional<step> phase_end(server_phase phase, uint64_t now_us);

    // The step that comes next has a sequence without a draft.
    void single() { n_singles_next++; }

    // A draft of the step was verified.
    void verified(int32_t n_drafted, int32_t n_accepted);

    // Nothing follows for a while: ends the step, and what passes until the next call is nobody's.
    std::optional<step> rest();

    const totals & get() const { return sum; }

private:
    std::optional<step> close_step();

    totals   sum;
    uint64_t last_us     = 0;
    int32_t  n_singles_next = 0;
    bool     has_draft   = false; // the open step began with a draft
    step     open;
};

} // namespace spark
