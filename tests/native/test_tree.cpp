// native/speculative: the tree that is grown is the best of its size, and walking it changes nothing about the target's text.
#include "check.h"

#include "speculative/tree.h"
#include "speculative/tree_walk.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <vector>

using spark::draft_candidate;
using spark::draft_candidates;
using spark::draft_tree;

namespace {

constexpr int32_t ROOT = draft_tree::ROOT;

// A random draft over `n_vocab` tokens whose distribution depends on the depth and the parent, as with a Markov head.
struct random_draft {
    int n_vocab, n_depth;
    std::vector<float> logits; // [depth][parent][token]

    random_draft(int n_vocab, int n_depth, unsigned seed) : n_vocab(n_vocab), n_depth(n_depth) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal(0, 2);
        logits.resize((size_t) n_depth*n_vocab*n_vocab);
        for (float & l : logits) {
            l = normal(random);
        }
    }

    std::vector<draft_candidate> operator()(int32_t depth, int32_t parent) const {
        const float * row = logits.data() + ((size_t) depth*n_vocab + parent)*n_vocab;
        float sum = 0;
        for (int t = 0; t < n_vocab; t++) {
            sum += std::exp(row[t]);
        }
        std::vector<draft_candidate> list;
        for (int t = 0; t < n_vocab; t++) {
            list.push_back({ t, row[t] - std::log(sum) });
        }
        std::sort(list.begin(), list.end(), [](const auto & a, const auto & b) { return a.log_prob > b.log_prob; });
        return list;
    }
};

// The largest sum of path probabilities of any prefix-closed set of `budget` paths: paths by probability, since a prefix is
// never less likely than the path.
double best_sum(const random_draft & draft, int32_t root, int32_t max_depth, size_t budget) {
    std::vector<double> all;
    struct path { int32_t depth, token; double log_prob; };
    std::vector<path> open = { { 0, root, 0.0 } };
    while (!open.empty()) {
        const path p = open.back();
        open.pop_back();
        if (p.depth == max_depth) {
            continue;
        }
        for (const draft_candidate & c : draft(p.depth, p.token)) {
            all.push_back(std::exp(p.log_prob + c.log_prob));
            open.push_back({ p.depth + 1, c.token, p.log_prob + c.log_prob });
        }
    }
    std::sort(all.rbegin(), all.rend());
    double sum = 0;
    for (size_t i = 0; i < std::min(budget, all.size()); i++) {
        sum += all[i];
    }
    return sum;
}

void grows_the_best_tree_of_its_size() {
    for (unsigned seed = 0; seed < 20; seed++) {
        const random_draft draft(5, 4, seed);
        for (size_t budget : { 1, 2, 7, 16, 60, 10000 }) {
            const draft_tree tree = spark::grow_tree(2, 4, budget, draft);
            CHECK_EQ(tree.nodes.size(), std::min<size_t>(budget, 5 + 25 + 125 + 625));
            CHECK(std::fabs(tree.expected_accepted() - best_sum(draft, 2, 4, budget)) < 1e-4);
        }
    }
}

void nodes_are_consistent() {
    const random_draft draft(6, 5, 42);
    const draft_tree tree = spark::grow_tree(3, 5, 40, draft);
    std::set<std::pair<int32_t, int32_t>> seen;
    for (size_t i = 0; i < tree.nodes.size(); i++) {
        const draft_tree::node & n = tree.nodes[i];
        CHECK(n.parent < (int32_t) i && n.parent >= ROOT);
        CHECK_EQ(n.depth, n.parent == ROOT ? 0 : tree.nodes[n.parent].depth + 1);
        CHECK(seen.insert({ n.parent, n.token }).second);
        CHECK(i == 0 || n.log_prob <= tree.nodes[i - 1].log_prob);
        CHECK_EQ(tree.child(n.parent, n.token), (int32_t) i);
        const float before = n.parent == ROOT ? 0 : tree.nodes[n.parent].log_prob;
        const auto list = draft(n.depth, n.parent == ROOT ? 3 : tree.nodes[n.parent].token);
        const auto found = std::find_if(list.begin(), list.end(), [&](const auto & c) { return c.token == n.token; });
        CHECK(std::fabs(before + found->log_prob - n.log_prob) < 1e-5f);
    }
    CHECK_EQ(tree.child(0, 99), ROOT);
}

void a_chain_is_the_tree_of_a_sure_draft() {
    const draft_candidates sure = [](int32_t depth, int32_t parent) { return std::vector<draft_candidate>{ { parent + 1, -0.01f }, { 77, -5.0f - depth } }; };
    const draft_tree tree = spark::grow_tree(10, 7, 7, sure);
    CHECK_EQ(tree.nodes.size(), (size_t) 7);
    for (int i = 0; i < 7; i++) {
        CHECK_EQ(tree.nodes[i].token, 11 + i);
        CHECK_EQ(tree.nodes[i].parent, i - 1);
    }
    CHECK_EQ(tree.leaves().size(), (size_t) 1);
}

void ties_and_ends_are_settled() {
    const draft_candidates even = [](int32_t, int32_t) { return std::vector<draft_candidate>{ { 1, -0.7f }, { 2, -0.7f } }; };
    const draft_tree a = spark::grow_tree(0, 3, 9, even), b = spark::grow_tree(0, 3, 9, even);
    CHECK_EQ(a.nodes.size(), (size_t) 9);
    for (size_t i = 0; i < a.nodes.size(); i++) {
        CHECK(a.nodes[i].token == b.nodes[i].token && a.nodes[i].parent == b.nodes[i].parent);
    }
    const draft_candidates broken = [](int32_t depth, int32_t) { return std::vector<draft_candidate>{ { 1, depth < 2 ? -0.5f : NAN }, { 2, depth < 2 ? -INFINITY : -1.0f } }; };
    CHECK_EQ(spark::grow_tree(0, 5, 9, broken).nodes.size(), (size_t) 2);
    CHECK(spark::grow_tree(0, 5, 0, even).nodes.empty());
    CHECK(spark::grow_tree(0, 0, 5, even).nodes.empty());
    const draft_candidates nothing = [](int32_t, int32_t) { return std::vector<draft_candidate>(); };
    CHECK(spark::grow_tree(0, 5, 5, nothing).nodes.empty());
}

void every_node_is_on_the_paths_of_its_leaves() {
    const random_draft draft(4, 4, 7);
    const draft_tree tree = spark::grow_tree(0, 4, 25, draft);
    const auto leaves = tree.leaves();
    const auto through = tree.leaves_through();
    size_t total = 0;
    for (size_t leaf = 0; leaf < leaves.size(); leaf++) {
        CHECK(through[leaves[leaf]] == std::vector<int32_t>{ (int32_t) leaf });
        total += tree.nodes[leaves[leaf]].depth + 1;
    }
    for (size_t i = 0; i < tree.nodes.size(); i++) {
        CHECK(!through[i].empty());
        total -= through[i].size();
        if (tree.nodes[i].parent != ROOT) { // a parent is on every path of its children
            const auto & above = through[tree.nodes[i].parent];
            CHECK(std::includes(above.begin(), above.end(), through[i].begin(), through[i].end()));
        }
    }
    CHECK_EQ(total, (size_t) 0);
}

// Depth 0 of `text` is what the target writes after the root.
spark::tree_walk walk(const draft_tree & tree, const std::vector<int32_t> & text, int32_t end = -2) {
    size_t n = 0;
    return spark::walk_tree(tree, [&](int32_t node) { CHECK_EQ(node == ROOT ? 0 : tree.nodes[node].depth + 1, (int32_t) n); return text[n++]; }, [&](int32_t t) { return t == end; });
}

void walks_as_far_as_the_target_agrees() {
    draft_tree tree;
    tree.nodes = { { 5, ROOT, 0, 0 }, { 6, ROOT, 0, 0 }, { 7, 0, 1, 0 }, { 8, 1, 1, 0 }, { 9, 3, 2, 0 } };
    CHECK(walk(tree, { 6, 8, 9, 4 }).nodes == (std::vector<int32_t>{ 1, 3, 4 }));
    CHECK(walk(tree, { 6, 8, 9, 4 }).tokens == (std::vector<int32_t>{ 6, 8, 9, 4 }));
    CHECK(walk(tree, { 6, 7 }).nodes == (std::vector<int32_t>{ 1 })); // 7 follows 5 only
    CHECK(walk(tree, { 1 }).nodes.empty());
    CHECK(walk(tree, { 6, 8, 1 }, 8).tokens == (std::vector<int32_t>{ 6, 8 })); // the end is written, and nothing below it accepted
    CHECK(walk(draft_tree(), { 3 }).tokens == (std::vector<int32_t>{ 3 }));
}

// Text of three tokens, sampled from a target with and without trees of a draft that is another model: the same distribution.
void sampled_text_has_the_distribution_of_the_target() {
    constexpr int V = 3, LENGTH = 3, N = 60000;
    const random_draft target(V, LENGTH, 1), draft(V, LENGTH, 2);
    std::mt19937 random(3);
    const auto sample = [&](int depth, int32_t parent) {
        double r = std::uniform_real_distribution<double>()(random);
        const auto list = target(depth, parent);
        for (const draft_candidate & c : list) {
            if ((r -= std::exp(c.log_prob)) < 0) {
                return c.token;
            }
        }
        return list.back().token;
    };
    std::map<std::vector<int32_t>, int> counts;
    size_t n_accepted = 0;
    for (int i = 0; i < N; i++) {
        std::vector<int32_t> text;
        while ((int) text.size() < LENGTH) {
            const int start = (int) text.size();
            const int32_t last = text.empty() ? 0 : text.back();
            const draft_tree tree = spark::grow_tree(last, LENGTH - start - 1, 4, [&](int32_t depth, int32_t parent) { return draft(start + depth, parent); });
            const auto w = spark::walk_tree(
                tree, [&](int32_t node) { return sample(start + (node == ROOT ? 0 : tree.nodes[node].depth + 1), node == ROOT ? last : tree.nodes[node].token); },
                [](int32_t) { return false; });
            n_accepted += w.nodes.size();
            text.insert(text.end(), w.tokens.begin(), w.tokens.end());
        }
        counts[text]++;
    }
    double chi2 = 0;
    int n_cells = 0;
    for (int a = 0; a < V; a++) {
        for (int b = 0; b < V; b++) {
            for (int c = 0; c < V; c++) {
                double p = 0;
                const int32_t tokens[] = { a, b, c };
                int32_t parent = 0;
                for (int d = 0; d < LENGTH; d++) {
                    for (const draft_candidate & x : target(d, parent)) {
                        p += x.token == tokens[d] ? x.log_prob : 0;
                    }
                    parent = tokens[d];
                }
                const double expected = N*std::exp(p);
                if (expected >= 5) {
                    chi2 += std::pow(counts[{ a, b, c }] - expected, 2)/expected;
                    n_cells++;
                }
            }
        }
    }
    CHECK(n_accepted > N/4);
    CHECK(chi2 < n_cells + 5*std::sqrt(2.0*n_cells)); // five standard deviations of the statistic
}

} // namespace

int main() {
    RUN(grows_the_best_tree_of_its_size);
    RUN(nodes_are_consistent);
    RUN(a_chain_is_the_tree_of_a_sure_draft);
    RUN(ties_and_ends_are_settled);
    RUN(every_node_is_on_the_paths_of_its_leaves);
    RUN(walks_as_far_as_the_target_agrees);
    RUN(sampled_text_has_the_distribution_of_the_target);
    return test::failures();
}
