// native/speculative/verify_width: what is expected of a draft, what a step costs, and the width that follows.
#include "check.h"

#include "speculative/verify_width.h"

#include <algorithm>
#include <cmath>
#include <vector>

using spark::acceptance;
using spark::step_cost;
using spark::verify_width;

namespace {

bool is_near(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance; }

void acceptance_is_conditional_and_forgets() {
    acceptance a;
    CHECK_EQ(a.at(0, 0.25), 0.25);
    for (int i = 0; i < 400; i++) {
        a.verified(4, i % 2 == 0 ? 4 : 0); // half of the drafts are right to the end
    }
    CHECK(is_near(a.at(0, 0.9), 0.5, 0.06));
    CHECK(is_near(a.at(3, 0.9), 1.0, 0.02)); // asked only when all before it are right
    CHECK_EQ(a.at(4, 0.9), 0.9);
    for (int i = 0; i < 200; i++) {
        a.verified(2, 0);
    }
    CHECK(a.at(0, 0.5) < 0.1);
}

void cost_is_the_curve_and_a_line_learned_from_steps() {
    step_cost cost({ { 1, 10 }, { 4, 16 }, { 8, 40 } });
    CHECK(!cost.is_known());
    CHECK(is_near(cost.with_draft(2), 12, 1e-9));
    CHECK(is_near(cost.with_draft(12), 64, 1e-9));
    for (int i = 0; i < 300; i++) {
        const int rows = 1 + i % 8;
        cost.add(rows, step_cost({ { 1, 10 }, { 4, 16 }, { 8, 40 } }).with_draft(rows) + 5 + 2*rows, 3);
    }
    CHECK(cost.is_known());
    CHECK(is_near(cost.with_draft(4), 16 + 5 + 8, 1.5));
    CHECK(is_near(cost.with_draft(8), 40 + 5 + 16, 1.5));
    CHECK(is_near(cost.without_draft(), 10 + 5 + 2 - 3, 1.5));
    const double before = cost.with_draft(4);
    cost.add(4, 1e6, 3); // the machine was busy with something else
    CHECK(cost.with_draft(4) < 1.2*before);
}

void an_unmeasured_curve_is_no_crash() {
    verify_width w;
    CHECK_EQ(w.choose(0, 5), 0); // before it is configured
    w.configure(0, 7, {});
    for (int i = 0; i < 100; i++) {
        const int n = w.choose(0, 7);
        CHECK(n >= 0 && n <= 7);
        if (n > 0) {
            w.verified(0, n, n/2);
            w.step(1, n, n/2, 0, 10, 1);
        }
    }
}

// Plays steps of one sequence whose every token is accepted with probability `p` (in a fixed pattern) and whose steps cost
// `draft + one + row*(rows - 1)` milliseconds, without a draft `single` (0: as much as `one`). The mean width of the last half, rests
// counted as 0.
double settled_width(verify_width & w, double p, double draft, double one, double row, int n_tokens = 4000, double single = 0) {
    uint64_t state = 1;
    const auto random = [&] { state = state*6364136223846793005ull + 1442695040888963407ull; return (state >> 40)/(double) (1 << 24); };
    double sum = 0;
    int    n_steps = 0;
    for (int i = 0; i < n_tokens; i++) {
        const int n = w.choose(3, 7);
        if (i >= n_tokens/2) {
            sum += n;
            n_steps++;
        }
        if (n == 0) {
            w.step(0, 0, 0, 1, single > 0 ? single : one, 0);
            continue;
        }
        int accepted = 0;
        while (accepted < n && random() < p) {
            accepted++;
        }
        w.verified(3, n, accepted);
        w.step(1, n, accepted, 0, draft + one + row*n, draft);
    }
    return sum/n_steps;
}

std::vector<step_cost::point> line(double one, double row) {
    std::vector<step_cost::point> curve;
    for (int n = 1; n <= 8; n++) {
        curve.push_back({ n, one + row*(n - 1) });
    }
    return curve;
}

void free_rows_are_all_used() {
    verify_width w;
    w.configure(0, 7, line(10, 0.01));
    CHECK(settled_width(w, 0.8, 1, 10, 0.01) > 6.5);
}

void dear_rows_are_used_as_far_as_they_pay() {
    verify_width w;
    w.configure(0, 7, line(10, 3));
    const double width = settled_width(w, 0.7, 1, 10, 3); // (1 + .7)/14, (1 + .7 + .49)/17, ... : best at 2
    CHECK(width > 1.3 && width < 3.2);
}

void the_line_corrects_a_wrong_curve() {
    verify_width w;
    w.configure(0, 7, line(10, 0.01)); // measured while experts were in memory, and now each row reads some
    const double width = settled_width(w, 0.7, 1, 10, 3);
    CHECK(width > 1.0 && width < 4.0);
}

void a_sequence_rests_when_drafting_is_slower_and_looks_again() {
    verify_width w;
    w.configure(0, 7, line(10, 2));
    CHECK(settled_width(w, 0.3, 2, 10, 2) < 0.2);
    const uint64_t n_rests = w.chosen()[0];
    CHECK(n_rests > 3000);
    CHECK(settled_width(w, 0.95, 2, 10, 2, 10000) > 4); // another text
}

void single_tokens_that_go_another_way_are_measured() {
    verify_width slow, fast;
    slow.configure(0, 7, line(10, 3));
    CHECK(settled_width(slow, 0.5, 2, 10, 3, 4000, 40) > 1); // 1.5/15 of a token a millisecond instead of 1/40, though the curve says 1/10
    fast.configure(0, 7, line(10, 1));
    CHECK(settled_width(fast, 0.7, 2, 10, 1, 4000, 3) < 0.2);
}

void a_step_that_builds_its_graph_is_passed_over() {
    verify_width w;
    w.configure(0, 7, {});
    for (int i = 0; i < 40; i++) {
        const int rows = i / 4 % 2 ? 4 : 6;
        w.step(1, rows - 1, 1, 0, i % 4 ? 10 : 50, 1);
    }
    CHECK(is_near(w.costs().with_draft(4), 10, 1));
    for (int i = 0; i < 40; i++) {
        w.step(1, 3 + i % 2, 1, 0, 20, 1); // never the same twice, and counted all the same
    }
    CHECK(w.costs().with_draft(4) > 12);
}

void fixed_is_fixed() {
    verify_width w;
    w.configure(4, 7, {});
    CHECK(!w.is_auto());
    for (int i = 0; i < 50; i++) {
        CHECK_EQ(w.choose(0, 7), 4);
        CHECK_EQ(w.choose(0, 2), 2);
        w.verified(0, 4, 0);
        w.step(1, 4, 0, 0, 100, 90);
    }
    w.configure(63, 7, {});
    CHECK_EQ(w.choose(1, 100), 7);
}

void sequences_are_judged_by_their_own_drafts() {
    verify_width w;
    w.configure(0, 7, line(10, 1.5));
    double good = 0, bad = 0;
    for (int i = 0; i < 600; i++) {
        const int a = w.choose(0, 7), b = w.choose(1, 7);
        const int n_bad = std::min(b, i % 4 == 0 ? 1 : 0);
        if (a > 0) {
            w.verified(0, a, a);
        }
        if (b > 0) {
            w.verified(1, b, n_bad);
        }
        w.step((a > 0) + (b > 0), a + b, a + n_bad, (a == 0) + (b == 0), 11 + 1.5*(a + b), 1);
        good += i >= 300 ? a : 0;
        bad  += i >= 300 ? b : 0;
    }
    CHECK(good > 2*bad);
}

} // namespace

int main() {
    RUN(acceptance_is_conditional_and_forgets);
    RUN(cost_is_the_curve_and_a_line_learned_from_steps);
    RUN(an_unmeasured_curve_is_no_crash);
    RUN(free_rows_are_all_used);
    RUN(dear_rows_are_used_as_far_as_they_pay);
    RUN(the_line_corrects_a_wrong_curve);
    RUN(a_sequence_rests_when_drafting_is_slower_and_looks_again);
    RUN(single_tokens_that_go_another_way_are_measured);
    RUN(a_step_that_builds_its_graph_is_passed_over);
    RUN(fixed_is_fixed);
    RUN(sequences_are_judged_by_their_own_drafts);
    return test::failures();
}
