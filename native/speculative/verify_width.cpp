#include "verify_width.h"

#include <algorithm>
#include <cmath>

namespace spark {

void acceptance::verified(int32_t n_drafted, int32_t n_accepted) {
    static const double keep = std::exp2(-1/HALF_LIFE);
    if ((int32_t) depths.size() < n_drafted) {
        depths.resize(n_drafted);
    }
    for (depth_counts & d : depths) {
        d.asked    *= keep;
        d.accepted *= keep;
    }
    for (int32_t depth = 0; depth < n_drafted && depth <= n_accepted; depth++) { // behind the first wrong token nothing was asked
        depths[depth].asked    += 1;
        depths[depth].accepted += depth < n_accepted;
    }
}

double acceptance::at(int32_t depth, double assumed) const {
    const depth_counts d = depth < (int32_t) depths.size() ? depths[depth] : depth_counts();
    return (d.accepted + PRIOR*assumed)/(d.asked + PRIOR);
}

void step_cost::add(int32_t n_rows, double ms, double draft_ms) {
    static const double keep = std::exp2(-1/HALF_LIFE);
    if (is_known()) {
        ms = std::min(ms, MOST*with_draft(n_rows));
    }
    const double x = n_rows, y = ms - at(n_rows);
    for (double * s : { &sum, &sum_x, &sum_xx, &sum_y, &sum_xy, &draft }) {
        *s *= keep;
    }
    sum    += 1;
    sum_x  += x;
    sum_xx += x*x;
    sum_y  += y;
    sum_xy += x*y;
    draft  += draft_ms;
    n_steps++;
}

double step_cost::at(int32_t n_rows) const {
    if (curve.empty()) {
        return 0;
    }
    const auto above = std::lower_bound(curve.begin(), curve.end(), n_rows, [](const point & p, int32_t n) { return p.n_rows < n; });
    if (above == curve.begin() || curve.size() == 1) {
        return curve.front().ms;
    }
    const auto b = above == curve.end() ? above - 1 : above; // beyond the last point the last piece goes on
    const auto a = b - 1;
    return a->ms + (b->ms - a->ms)*(n_rows - a->n_rows)/(b->n_rows - a->n_rows);
}

double step_cost::with_draft(int32_t n_rows) const {
    if (sum == 0) {
        return at(n_rows);
    }
    const double mean_x = sum_x/sum, mean_y = sum_y/sum;
    const double slope  = (sum_xy/sum - mean_x*mean_y)/(sum_xx/sum - mean_x*mean_x + 0.1); // + 0.1: steps of one width say nothing of others
    return std::max(1e-3, at(n_rows) + mean_y + slope*(n_rows - mean_x));
}

void step_cost::add_single(double ms) {
    static const double keep = std::exp2(-1/HALF_LIFE_SINGLE);
    if (n_singles >= LEAST_STEPS) {
        ms = std::min(ms, MOST*without_draft());
    }
    single_sum = single_sum*keep + 1;
    single_ms  = single_ms*keep + ms;
    n_singles++;
}

double step_cost::without_draft() const {
    return std::max(1e-3, n_singles > 0 ? single_ms/single_sum : with_draft(1) - (sum > 0 ? draft/sum : 0));
}

void verify_width::configure(int32_t fixed, int32_t most, std::vector<step_cost::point> curve) {
    *this   = {};
    n_fixed = fixed;
    n_most  = most;
    cost    = step_cost(std::move(curve));
    n_chosen.assign(1 + std::max(0, fixed > 0 ? std::min(fixed, most) : most), 0);
}

verify_width::sequence & verify_width::at(int id) {
    if ((size_t) id >= sequences.size()) {
        sequences.resize(id + 1);
    }
    return sequences[id];
}

int32_t verify_width::choose(int id, int32_t n_allowed) {
    n_allowed = std::min(n_allowed, (int32_t) n_chosen.size() - 1);
    if (n_allowed <= 0) {
        return 0;
    }
    sequence & s = at(id);
    int32_t n = n_allowed;
    if (is_auto() && s.n_rest > 0) {
        n = 0;
        if (--s.n_rest == 0) {
            s.n_drafts  = 0;
            s.n_singles = LOOK_SINGLES;
        }
    } else if (is_auto() && s.n_drafts % LOOK_EVERY == 0 && s.n_singles < LOOK_SINGLES) {
        n = 0;
        s.n_singles++;
    } else if (is_auto() && (s.n_drafts % LOOK_EVERY < LOOK_DRAFTS || !cost.is_known())) {
        n = s.n_drafts % LOOK_DRAFTS < LOOK_DRAFTS/2 ? n_allowed : (n_allowed + 1)/2;
    } else if (is_auto()) {
        n = fastest(s, n_allowed);
        s.n_chosen = n;
        s.n_rests  = n == 0 ? s.n_rests + 1 : 0;
        s.n_rest   = n == 0 ? (TOKENS_OF_REST << std::min(s.n_rests - 1, MOST_DOUBLINGS)) - 1 : 0;
    }
    n_chosen[n]++;
    s.n_singles = n > 0 ? 0 : s.n_singles;
    return n;
}

int32_t verify_width::fastest(const sequence & s, int32_t n_allowed) const {
    const double n_others  = std::max(0.0, recent.n_drafts - 1);
    const double rows      = n_others*(recent.n_drafts > 0 ? recent.n_rows/recent.n_drafts : 0);
    const double tokens    = n_others*(recent.n_drafts > 0 ? recent.n_tokens/recent.n_drafts : 0);
    const int32_t n_rows   = (int32_t) std::lround(rows);
    const double without   = (tokens + 1)/(n_others > 0.5 ? cost.with_draft(n_rows + 1) : cost.without_draft()); // others draft all the same
    double  best_rate = LEAST_GAIN*without, last_rate = 0;
    int32_t best      = 0;
    double  expected = 1, reached = 1;
    for (int32_t n = 1; n <= n_allowed; n++) {
        reached  *= s.accepted.at(n - 1, pool.at(n - 1, 0.7));
        expected += reached;
        const double rate = (tokens + expected)/cost.with_draft(n_rows + 1 + n);
        if (rate > best_rate) {
            best_rate = rate;
            best      = n;
        }
        if (n == s.n_chosen) {
            last_rate = rate;
        }
    }
    return best > 0 && best_rate < LEAST_GAIN*last_rate ? s.n_chosen : best;
}

void verify_width::verified(int id, int32_t n_drafted, int32_t n_accepted) {
    sequence & s = at(id);
    s.n_drafts++;
    s.accepted.verified(n_drafted, n_accepted);
    pool.verified(n_drafted, n_accepted);
}

// The first step of another width builds and allocates its graph, which those that follow do not.
bool verify_width::is_new_graph(int32_t n_rows) {
    const bool is_new = n_rows != last_rows && n_passed < 2;
    n_passed  = is_new ? n_passed + 1 : 0;
    last_rows = n_rows;
    return is_new;
}

void verify_width::step(int32_t n_drafts, int32_t n_drafted, int32_t n_accepted, int32_t n_singles, double ms, double draft_ms) {
    const int32_t n_rows = n_drafts + n_drafted + n_singles;
    if (!is_new_graph(n_rows)) {
        if (n_drafts > 0) {
            cost.add(n_rows, ms, draft_ms);
        } else if (n_singles == 1) {
            cost.add_single(ms);
        }
    }
    if (n_drafts <= 0) {
        return;
    }
    const double weight = 1/std::min(8.0, recent.n + 1); // who shares steps changes within a few of them
    recent.n        += 1;
    recent.n_drafts += weight*(n_drafts - recent.n_drafts);
    recent.n_rows   += weight*(n_drafts + n_drafted - recent.n_rows);
    recent.n_tokens += weight*(n_drafts + n_accepted - recent.n_tokens);
}

} // namespace spark
