// When a sequence stops drafting for a while: drafts that are never accepted only make its steps slower.
#pragma once

#include <cstdint>

namespace spark {

// One sequence. Pure: no clock, no threads. A draft counts as accepted when at least its first token was.
class draft_pause {
public:
    static constexpr int WINDOW         = 24;  // drafts that are looked at
    static constexpr int MIN_PERCENT    = 10;  // fewer of them accepted: pause
    static constexpr int TOKENS_OF_REST = 256; // tokens written without a draft before drafting begins anew

    // Asked once for each step; a step without a draft writes one token.
    bool may_draft();

    // A draft was verified. True when drafting pauses from now on.
    bool verified(int32_t n_accepted);

    bool is_paused() const { return n_rest > 0; }

private:
    uint32_t accepted = 0; // the last WINDOW drafts, one bit each
    int      n_seen   = 0; // of them
    int      n_rest   = 0; // tokens until drafting begins anew
};

} // namespace spark
