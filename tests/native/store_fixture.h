// A store over a small file, and the check that every slot a step was given holds the expert it asked for.
#pragma once

#include "expert_store.h"
#include "tiny_gguf.h"

#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace test {

// The model of the tests: `n_layers` layers of `n_expert` experts, written when the object is made.
struct model {
    model(const temporary_folder & folder, const std::string & name, int n_layers, int n_expert)
        : path(folder.file(name)), tensors(moe_tensors(n_layers, n_expert)), n_layers(n_layers), n_expert(n_expert) {
        write_gguf(path, tensors);
    }

    std::shared_ptr<spark::expert_store> open(int32_t n_fast, spark_policy policy, int32_t n_initial = 0, int32_t n_pinned = 0, uint64_t seed = 1) const {
        spark::store_options options;
        options.path = path;
        options.n_io_threads = 4;
        auto store = std::make_shared<spark::expert_store>(options);
        std::vector<int32_t> initial(n_initial);
        std::iota(initial.begin(), initial.end(), 0);
        std::vector<spark_layer_plan> layers;
        for (int il = 0; il < n_layers; il++) {
            layers.push_back({ il, n_fast, n_pinned, n_initial, initial.data(), nullptr });
        }
        store->set_plan({ n_layers, layers.data(), policy, seed, -1 });
        return store;
    }

    const std::string path;
    const std::vector<tensor_description> tensors;
    const int n_layers;
    const int n_expert;
};

// Keeps a store attached, as a loaded model does.
struct attached {
    explicit attached(std::shared_ptr<spark::expert_store> store) : store(std::move(store)) { this->store->attach(); }
    ~attached() { store->detach(); }
    std::shared_ptr<spark::expert_store> store;
};

// Number of (id, tensor) pairs whose slot does not hold the expert.
inline int wrong_slots(const model & m, const spark::layer_state & layer, const std::vector<int32_t> & ids, const std::vector<int32_t> & slots) {
    int wrong = 0;
    for (size_t i = 0; i < ids.size(); i++) {
        for (const auto & stack : layer.stacks) {
            const char * data = stack->memory->base() + (size_t) slots[i] * stack->tensor->stride;
            wrong += !holds_expert(find(m.tensors, stack->tensor->name), ids[i], data);
        }
    }
    return wrong;
}

// One step of one layer with packed ids [n_used, n_tokens].
inline std::vector<int32_t> acquire(spark::expert_store & store, spark::layer_state & layer, spark::context_lease & lease, const std::vector<int32_t> & ids, int64_t n_used) {
    std::vector<int32_t> slots(ids.size(), -7);
    store.acquire(layer, lease, (const char *) ids.data(), n_used, (int64_t) ids.size() / n_used, sizeof(int32_t), n_used * sizeof(int32_t), slots.data());
    return slots;
}

// Distinct experts for each token.
inline std::vector<int32_t> random_ids(std::mt19937 & random, int n_expert, int n_used, int n_tokens) {
    std::vector<int32_t> ids, all(n_expert);
    std::iota(all.begin(), all.end(), 0);
    for (int t = 0; t < n_tokens; t++) {
        for (int k = 0; k < n_used; k++) { std::swap(all[k], all[k + random() % (n_expert - k)]); }
        ids.insert(ids.end(), all.begin(), all.begin() + n_used);
    }
    return ids;
}

} // namespace test
