#include "tree.h"

#include <cmath>
#include <queue>
#include <utility>

namespace spark {

namespace {

// A node that could be added next: the `rank`-th candidate after `parent`.
struct option {
    float   log_prob; // of the path
    size_t  order;    // of discovery
    int32_t parent;
    size_t  rank;

    bool operator<(const option & other) const { return log_prob != other.log_prob ? log_prob < other.log_prob : order > other.order; }
};

} // namespace

int32_t draft_tree::child(int32_t parent, int32_t token) const {
    for (size_t i = parent + 1; i < nodes.size(); i++) {
        if (nodes[i].parent == parent && nodes[i].token == token) {
            return (int32_t) i;
        }
    }
    return ROOT;
}

std::vector<int32_t> draft_tree::leaves() const {
    std::vector<bool> has_child(nodes.size());
    for (const node & n : nodes) {
        if (n.parent != ROOT) {
            has_child[n.parent] = true;
        }
    }
    std::vector<int32_t> result;
    for (size_t i = 0; i < nodes.size(); i++) {
        if (!has_child[i]) {
            result.push_back((int32_t) i);
        }
    }
    return result;
}

std::vector<std::vector<int32_t>> draft_tree::leaves_through() const {
    std::vector<std::vector<int32_t>> result(nodes.size());
    const std::vector<int32_t> ends = leaves();
    for (size_t leaf = 0; leaf < ends.size(); leaf++) {
        for (int32_t i = ends[leaf]; i != ROOT; i = nodes[i].parent) {
            result[i].push_back((int32_t) leaf);
        }
    }
    return result;
}

double draft_tree::expected_accepted() const {
    double sum = 0;
    for (const node & n : nodes) {
        sum += std::exp((double) n.log_prob);
    }
    return sum;
}

draft_tree grow_tree(int32_t root_token, int32_t max_depth, size_t budget, const draft_candidates & candidates) {
    draft_tree tree;
    if (max_depth < 1 || budget < 1) {
        return tree;
    }
    std::priority_queue<option> options;
    std::vector<std::vector<draft_candidate>> lists(1); // candidates after the root, then after each node
    size_t n_found = 0;
    const auto offer = [&](int32_t parent, size_t rank) {
        const std::vector<draft_candidate> & list = lists[parent + 1];
        if (rank < list.size() && list[rank].log_prob > -INFINITY) { // false for what is not a number
            const float before = parent == draft_tree::ROOT ? 0 : tree.nodes[parent].log_prob;
            options.push({ before + list[rank].log_prob, n_found++, parent, rank });
        }
    };
    lists[0] = candidates(0, root_token);
    offer(draft_tree::ROOT, 0);
    while (!options.empty() && tree.nodes.size() < budget) {
        const option best = options.top();
        options.pop();
        const int32_t depth = best.parent == draft_tree::ROOT ? 0 : tree.nodes[best.parent].depth + 1;
        const int32_t token = lists[best.parent + 1][best.rank].token;
        tree.nodes.push_back({ token, best.parent, depth, best.log_prob });
        lists.emplace_back();
        offer(best.parent, best.rank + 1);
        if (depth + 1 < max_depth && tree.nodes.size() < budget) {
            lists.back() = candidates(depth + 1, token);
            offer((int32_t) tree.nodes.size() - 1, 0);
        }
    }
    return tree;
}

} // namespace spark
