#include "step_profile.h"

#include <utility>

namespace spark {

std::optional<step_profile::step> step_profile::phase_end(server_phase phase, uint64_t now_us) {
    const uint64_t us = last_us ? now_us - last_us : 0;
    std::optional<step> ended;
    last_us = now_us;
    if (phase == server_phase::draft || (phase == server_phase::verify && !(has_draft && open.n_drafts == 0))) {
        ended     = close_step();
        has_draft = phase == server_phase::draft;
        open.n_singles = std::exchange(n_singles_next, 0);
    }
    open.us[(int) phase] += us;
    return ended;
}

void step_profile::verified(int32_t n_drafted, int32_t n_accepted) {
    open.n_drafts++;
    open.n_drafted  += n_drafted;
    open.n_accepted += n_accepted;
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

std::optional<step_profile::step> step_profile::rest() {
    last_us        = 0;
    n_singles_next = 0;
    return close_step();
}

std::optional<step_profile::step> step_profile::close_step() {
    const step closed = open;
    open      = {};
    has_draft = false;
    if (closed.n_drafts == 0) {
        return closed.n_singles > 0 ? std::optional(closed) : std::nullopt;
    }
    sum.n_steps++;
    for (int i = 0; i < N_PHASE; i++) {
        sum.us[i] += closed.us[i];
    }
    return closed;
}

} // namespace spark
