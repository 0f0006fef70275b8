#include "draft_pause.h"

namespace spark {

bool draft_pause::may_draft() {
    if (n_rest == 0) {
        return true;
    }
    n_rest--;
    return false;
}

bool draft_pause::verified(int32_t n_accepted) {
    constexpr uint32_t LAST = (1u << WINDOW) - 1;
    accepted = (accepted << 1 | (n_accepted > 0)) & LAST;
    n_seen += n_seen < WINDOW;
    int n_good = 0;
    for (uint32_t bits = accepted; bits; bits &= bits - 1) {
        n_good++;
    }
    if (n_seen < WINDOW || n_good*100 >= MIN_PERCENT*WINDOW) {
        return false;
    }
    accepted = 0; // after the rest the draft gets a full window again
    n_seen   = 0;
    n_rest   = TOKENS_OF_REST;
    return true;
}

} // namespace spark
