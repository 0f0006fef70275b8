// A tree of drafted tokens, grown best first (docs/decisions/0050). Pure: knows no model, no batch, no sampler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace spark {

struct draft_candidate {
    int32_t token;
    float   log_prob; // of this token after its parent, <= 0
};

// Nodes in the order in which they were added, so every parent comes before its children. The root, the last token that was
// written, is no node: it is `parent` -1.
struct draft_tree {
    static constexpr int32_t ROOT = -1;

    struct node {
        int32_t token;
        int32_t parent;   // ROOT or an earlier node
        int32_t depth;    // 0: follows the root
        float   log_prob; // of the path from the root to here
    };

    std::vector<node> nodes;

    // The child of `parent` that is `token`, or ROOT when there is none.
    int32_t child(int32_t parent, int32_t token) const;

    // Nodes without children, in order.
    std::vector<int32_t> leaves() const;

    // [node]: for which leaves (positions in leaves()) the path leads through it; a batch gives the node one sequence for each.
    std::vector<std::vector<int32_t>> leaves_through() const;

    // Tokens that verification is expected to accept, if the draft's probabilities were the target's.
    double expected_accepted() const;
};

// Candidates at `depth` after `parent_token` (after the root's token at depth 0), best first, each token once. Called at most once
// for each node of the tree.
using draft_candidates = std::function<std::vector<draft_candidate>(int32_t depth, int32_t parent_token)>;

// The `budget` likeliest paths that are closed under prefixes and at most `max_depth` long: of all trees of that many nodes the one
// that expects most accepted tokens. Ties go to the node that could be added first. Candidates with a log_prob that is not a
// number, or is -infinity, are left out with all that follow them.
draft_tree grow_tree(int32_t root_token, int32_t max_depth, size_t budget, const draft_candidates & candidates);

} // namespace spark
