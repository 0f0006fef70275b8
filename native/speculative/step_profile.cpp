#include "step_profile.h"

namespace spark {

void step_profile::phase_end(server_phase phase, uint64_t now_us) {
    const uint64_t us = last_us ? now_us - last_us : 0;
    last_us = now_us;
    if (phase == server_phase::draft || (phase == server_phase::verify && !(has_draft && !is_verified))) {
        close_step();
        has_draft = phase == server_phase::draft;
    }
    open[(int) phase] += us;
}

void step_profile::verified(int32_t n_drafted, int32_t n_accepted) {
    is_verified = true;
    sum.n_drafts++;
    sum.n_drafted  += n_drafted;
    sum.n_accepted += n_accepted;
    if ((int32_t) sum.drafted_at.size() < n_drafted) {
        sum.drafted_at.resize(n_drafted);
        sum.accepted_at.resize(n_drafted);
    }
    for (int32_t depth = 0; depth < n_drafted; depth++) {
        sum.drafted_at[depth]++;
        sum.accepted_at[depth] += depth < n_accepted;
    }
}

void step_profile::rest() {
    close_step();
    last_us = 0;
}

void step_profile::close_step() {
    if (is_verified) {
        sum.n_steps++;
        for (int i = 0; i < N_PHASE; i++) {
            sum.us[i] += open[i];
        }
    }
    open        = {};
    has_draft   = false;
    is_verified = false;
}

} // namespace spark
