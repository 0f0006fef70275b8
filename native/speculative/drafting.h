// What the server knows about its drafting: pauses of every sequence, drafts that are not numbers, the profile of steps.
// Written by the inference thread, read by HTTP threads.
#pragma once

#include "draft_pause.h"
#include "step_profile.h"

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
    };

    // May the sequence draft in this step?
    bool may_draft(int id_slot);

    // n_tokens of a draft were made by `context` (null: not by a model). Its logits are looked at after a draft of which nothing was accepted.
    void drafted(int id_slot, llama_context * context, size_t n_tokens);

    void verified(int id_slot, size_t n_accepted);
    void phase_end(server_phase phase);
    void request_finished();

    // A model is loaded (again).
    void reset();

    report get() const;

private:
    struct sequence {
        draft_pause pause;
        int32_t     n_drafted = 0;        // of the draft being verified
        bool        was_useless = true;   // nothing of the last draft was accepted; true before the first
    };

    sequence & at(int id_slot);

    mutable std::mutex mutex;
    std::vector<sequence> sequences;
    step_profile profile;
    uint64_t n_pauses  = 0;
    bool     is_broken = false;
};

// One line about a run, empty when nothing was drafted.
std::string describe(const drafting::report & report);

} // namespace spark
