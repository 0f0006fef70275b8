#include "residency_policy.h"

#include <algorithm>
#include <cmath>

namespace spark {

static constexpr double WEIGHT_MAX     = 1e100; // far from overflow even times a large batch
static constexpr double REPLACE_MARGIN = 1.25;

residency_policy::residency_policy(int32_t n_expert, double half_life)
    : growth(std::exp2(1.0 / half_life)), scores(n_expert, 0.0), last_used(n_expert, 0) {}

void residency_policy::seed(const std::vector<double> & uses) {
    for (size_t e = 0; e < uses.size() && e < scores.size(); e++) {
        scores[e] = weight * uses[e];
    }
}

void residency_policy::advance(int64_t n_tokens) {
    tick++;
    // one huge batch must not overflow the weight: so many tokens make older uses negligible anyway
    weight *= std::pow(growth, (double) std::min<int64_t>(n_tokens, 4096));
    if (weight > WEIGHT_MAX) {
        renormalise();
    }
}

void residency_policy::renormalise() {
    for (double & s : scores) {
        s /= weight;
    }
    weight = 1;
}

void residency_policy::record(int32_t expert, double uses) {
    scores[expert] += weight * uses;
    last_used[expert] = tick;
}

double residency_policy::mean_weight(int64_t n_tokens) const {
    const double n = (double) std::max<int64_t>(1, n_tokens);
    return (1 - std::pow(growth, -n)) / (n * (1 - 1 / growth)); // a geometric series
}

void residency_policy::select_victims(std::vector<int32_t> & candidates, size_t n) const {
    const auto colder = [&](int32_t a, int32_t b) {
        if (scores[a]    != scores[b])    { return scores[a]    < scores[b]; }
        if (last_used[a] != last_used[b]) { return last_used[a] < last_used[b]; }
        return a < b;
    };
    n = std::min(n, candidates.size());
    std::partial_sort(candidates.begin(), candidates.begin() + n, candidates.end(), colder);
    candidates.resize(n);
}

bool residency_policy::should_replace(int32_t expert, int32_t resident) const {
    return scores[expert] > scores[resident] * REPLACE_MARGIN;
}

} // namespace spark
