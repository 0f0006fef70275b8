// Which drafted tokens the target writes: a walk down a tree (docs/decisions/0050). Lossless: every token that comes out was
// sampled by the target after the tokens before it, so greedy text and sampled distributions are the target's own.
#pragma once

#include "tree.h"

#include <vector>

namespace spark {

struct tree_walk {
    std::vector<int32_t> nodes;  // accepted, from the root down
    std::vector<int32_t> tokens; // theirs, and the one that the target writes after them
};

// sample(node) is the token that the target samples after `node` (draft_tree::ROOT: after the last token); it is called once for
// each token of the result, in order, so a sampler's state follows the text. is_end(token): nothing may follow, so a drafted
// token below it is not looked at.
template <typename Sample, typename IsEnd>
tree_walk walk_tree(const draft_tree & tree, Sample && sample, IsEnd && is_end) {
    tree_walk walk;
    int32_t at = draft_tree::ROOT;
    while (true) {
        const int32_t token = sample(at);
        walk.tokens.push_back(token);
        const int32_t next = is_end(token) ? draft_tree::ROOT : tree.child(at, token);
        if (next == draft_tree::ROOT) {
            return walk;
        }
        walk.nodes.push_back(next);
        at = next;
    }
}

} // namespace spark
