// Which expert leaves a slot: counts with decay, ties by last use, and no overflow in a long life.
#include "check.h"
#include "residency_policy.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

using spark::residency_policy;

static void coldest_leaves_first() {
    residency_policy policy(5);
    policy.advance(1);
    for (int e = 0; e < 5; e++) { policy.record(e, 10 - e); }
    std::vector<int32_t> candidates = { 0, 1, 2, 3, 4 };
    policy.select_victims(candidates, 2);
    CHECK(candidates == std::vector<int32_t>({ 4, 3 }));
}

static void selection_is_limited_to_candidates() {
    residency_policy policy(5);
    policy.advance(1);
    for (int e = 0; e < 5; e++) { policy.record(e, 10 - e); }
    std::vector<int32_t> candidates = { 2, 0 };
    policy.select_victims(candidates, 7);
    CHECK(candidates == std::vector<int32_t>({ 2, 0 }));
    candidates.clear();
    policy.select_victims(candidates, 3);
    CHECK(candidates.empty());
    candidates = { 1, 2 };
    policy.select_victims(candidates, 0);
    CHECK(candidates.empty());
}

static void ties_go_to_the_least_recently_used() {
    residency_policy policy(3, 1e12); // practically no decay
    for (int e : { 1, 2, 0 }) {
        policy.advance(1);
        policy.record(e, 1);
    }
    // scores differ only by rounding of a huge half life; make them equal by never-used experts instead
    residency_policy unused(4);
    std::vector<int32_t> candidates = { 3, 1, 2 };
    unused.select_victims(candidates, 3);
    CHECK(candidates == std::vector<int32_t>({ 1, 2, 3 })); // same score, same time: lowest id, so runs repeat
}

static void uses_halve_with_the_half_life() {
    residency_policy policy(2, 100.0);
    policy.advance(1);
    policy.record(0, 8);
    policy.advance(100);
    policy.record(1, 4);
    CHECK(std::abs(policy.score(0) / policy.score(1) - 1.0) < 1e-9);
    policy.advance(100);
    policy.record(1, 1);
    CHECK(policy.score(1) > policy.score(0));
}

static void uses_of_many_tokens_count_as_if_spread_over_them() {
    residency_policy one_by_one(1, 10.0), at_once(1, 10.0);
    for (int i = 0; i < 500; i++) {
        one_by_one.advance(1);
        one_by_one.record(0, 3);
    }
    at_once.advance(500);
    at_once.record(0, at_once.mean_weight(500) * 500 * 3);
    CHECK(std::abs(at_once.score(0) / at_once.unit() / (one_by_one.score(0) / one_by_one.unit()) - 1.0) < 1e-9);
    CHECK(std::abs(at_once.mean_weight(1) - 1.0) < 1e-12);
    CHECK(residency_policy(1, 1e12).mean_weight(1000) > 0.99);
}

static void recency_beats_an_old_favourite() {
    residency_policy policy(2, 64.0);
    policy.advance(1);
    policy.record(0, 1000);
    for (int i = 0; i < 1000; i++) {
        policy.advance(1);
        policy.record(1, 1);
    }
    CHECK(policy.score(1) > policy.score(0));
}

static void replacement_needs_a_margin() {
    residency_policy policy(3);
    policy.advance(1);
    policy.record(0, 100);
    policy.record(1, 101);
    policy.record(2, 200);
    CHECK(!policy.should_replace(1, 0)); // as hot: they would take turns
    CHECK(policy.should_replace(2, 0));
    CHECK(!policy.should_replace(0, 2));
}

static void a_long_life_stays_finite() {
    residency_policy policy(4, 8.0); // grows fast, so that the weights are scaled down many times
    std::mt19937 random(1);
    for (int i = 0; i < 200000; i++) {
        policy.advance(1 + random() % 4096);
        policy.record(random() % 3, 1);
    }
    for (int e = 0; e < 4; e++) {
        CHECK(std::isfinite(policy.score(e)));
        CHECK(policy.score(e) >= 0);
    }
    CHECK(policy.score(3) == 0);
    policy.advance(INT64_MAX); // a batch of any size
    policy.record(3, 1);
    CHECK(std::isfinite(policy.score(3)) && policy.score(3) > policy.score(0));
}

static void order_survives_rescaling() {
    // two policies with the same history, one of which is rescaled on the way (fast growth), agree with plain counting
    residency_policy policy(8, 16.0);
    std::vector<double> exact(8, 0.0);
    std::mt19937 random(2);
    for (int i = 0; i < 20000; i++) {
        policy.advance(1);
        for (double & s : exact) { s *= std::exp2(-1.0 / 16.0); }
        const int e = random() % 8;
        policy.record(e, 1);
        exact[e] += 1;
    }
    std::vector<int32_t> by_policy(8), by_count(8);
    std::iota(by_policy.begin(), by_policy.end(), 0);
    by_count = by_policy;
    policy.select_victims(by_policy, 8);
    std::sort(by_count.begin(), by_count.end(), [&](int32_t a, int32_t b) { return exact[a] < exact[b]; });
    CHECK(by_policy == by_count);
}

int main() {
    RUN(coldest_leaves_first);
    RUN(selection_is_limited_to_candidates);
    RUN(ties_go_to_the_least_recently_used);
    RUN(uses_halve_with_the_half_life);
    RUN(uses_of_many_tokens_count_as_if_spread_over_them);
    RUN(recency_beats_an_old_favourite);
    RUN(replacement_needs_a_margin);
    RUN(a_long_life_stays_finite);
    RUN(order_survives_rescaling);
    return test::failures();
}
