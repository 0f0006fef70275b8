// How many drafted tokens of a sequence are verified at once: those that bring the most tokens per second, by what a step costs on this
// machine and by how deep this sequence's drafts are accepted.
#pragma once

#include <cstdint>
#include <vector>

namespace spark {

// How likely a draft's token at each depth is accepted once all before it are. One sequence, or the pool of all; recent drafts count more.
class acceptance {
public:
    static constexpr double HALF_LIFE = 32;  // drafts
    static constexpr double PRIOR     = 4;   // drafts that what is assumed weighs as much as

    void verified(int32_t n_drafted, int32_t n_accepted);

    // Of the token at `depth`, from 0; what nothing is known about is as `assumed`.
    double at(int32_t depth, double assumed) const;

private:
    struct depth_counts { double asked = 0, accepted = 0; };
    std::vector<depth_counts> depths;
};

// Milliseconds of a step by the rows it computes. Two parts: a curve measured once, whose shape is the kernels', and a straight line
// that live steps add to it (drafting, longer texts, experts that have to be read), fitted to recent ones.
class step_cost {
public:
    static constexpr double HALF_LIFE        = 32; // steps
    static constexpr double HALF_LIFE_SINGLE = 8;  // steps without a draft, which are few while drafting pays

    struct point {
        int32_t n_rows;
        double  ms;
    };

    step_cost() = default;

    // Ascending in rows; empty when nothing was measured, and then the line is all there is.
    explicit step_cost(std::vector<point> curve) : curve(std::move(curve)) {}

    // A step with drafts took this long, `draft_ms` of it for drafting.
    void add(int32_t n_rows, double ms, double draft_ms);

    // A step of one token, which nobody drafted for. Not a point of the line: where experts have to be read, a single token may go
    // another way than several.
    void add_single(double ms);

    // A step with drafts, and one of one token without.
    double with_draft(int32_t n_rows) const;
    double without_draft() const;

    // False until something is known that a choice can be made by.
    bool is_known() const { return n_steps >= LEAST_STEPS; }

    const std::vector<point> & points() const { return curve; }

private:
    static constexpr int    LEAST_STEPS = 4;
    static constexpr double MOST        = 4; // times the expected time; more is an interruption, and counts as this

    double at(int32_t n_rows) const;

    std::vector<point> curve;
    int    n_steps = 0;
    int    n_singles = 0;
    double single_sum = 0, single_ms = 0; // decayed
    double sum = 0, sum_x = 0, sum_xx = 0, sum_y = 0, sum_xy = 0; // decayed; x: rows, y: milliseconds beyond the curve
    double draft = 0;                                             // decayed sum of draft_ms
};

// Pure: no clock, no threads.
class verify_width {
public:
    // Of so many drafts of a sequence the first are verified in full and half: to see how deep they hold, and what other widths cost.
    // In a row, since a step of another width builds its graph anew.
    static constexpr int    LOOK_EVERY     = 64;
    static constexpr int    LOOK_DRAFTS    = 4;
    static constexpr int    LOOK_SINGLES   = 3;    // tokens without a draft before that, to see what they cost
    static constexpr int    TOKENS_OF_REST = 256;  // written without a draft when drafting is no faster than not; twice as many each time
    static constexpr int    MOST_DOUBLINGS = 3;    // that follows at once
    static constexpr double LEAST_GAIN     = 1.02; // over not drafting, or the sequence rests; and over its last width, or it keeps that

    // n_fixed > 0: always this many. 0: chosen, at most n_most.
    void configure(int32_t n_fixed, int32_t n_most, std::vector<step_cost::point> curve);

    // For the next draft of sequence `id`: 0 for none, at most n_allowed (> 0).
    int32_t choose(int id, int32_t n_allowed);

    // A draft of `id` was verified.
    void verified(int id, int32_t n_drafted, int32_t n_accepted);

    // A step ended in which n_drafts of n_drafted tokens in all were verified, beside n_singles sequences without a draft.
    void step(int32_t n_drafts, int32_t n_drafted, int32_t n_accepted, int32_t n_singles, double ms, double draft_ms);

    bool is_auto() const { return n_fixed == 0; }

    // [width]: drafts that were given it; [0]: tokens written without a draft, because drafting was no faster or to see what they cost.
    const std::vector<uint64_t> & chosen() const { return n_chosen; }
    const step_cost & costs() const { return cost; }

private:
    struct sequence {
        acceptance accepted;
        int n_drafts = 0; // since drafting began (again)
        int n_rest   = 0; // tokens until it begins again
        int n_singles = 0; // since the last draft, to see what they cost
        int n_rests  = 0; // one after the other, with no more than a look between them
        int32_t n_chosen = 0; // the width chosen last
    };

    // Decayed means over steps, of the drafts of other sequences in a step.
    struct mean_step { double n = 0, n_drafts = 0, n_rows = 0, n_tokens = 0; };

    sequence & at(int id);
    bool is_new_graph(int32_t n_rows);
    int32_t fastest(const sequence & s, int32_t n_allowed) const;

    int32_t n_fixed = 0;
    int32_t n_most  = 0;
    step_cost  cost;
    int32_t    last_rows = 0, n_passed = 0; // of the last step, and steps in a row whose time was passed over
    acceptance pool; // what a sequence is assumed to be like
    mean_step  recent;
    std::vector<sequence> sequences;
    std::vector<uint64_t> n_chosen;
};

} // namespace spark
