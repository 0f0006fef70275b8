// Plans: checking one, and changing to it, before a model is loaded or while it is.
#include "expert_store.h"

#include "status.h"
#include "swap_engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace spark {

struct expert_store::checked_layer {
    int32_t n_fast   = 0;
    int32_t n_pinned = 0;
    std::vector<int32_t> initial;
    std::vector<double>  hotness;
};

void expert_store::set_plan(const spark_plan & plan) {
    std::lock_guard<std::mutex> lock(users_mutex);
    if (n_users > 0) {
        throw error(SPARK_STATUS_BAD_STATE, "the plan cannot change while a model is loaded; place experts anew, or free the model first");
    }
    apply(plan, check_plan(plan));
}

void expert_store::place(const spark_plan & plan) {
    std::lock_guard<std::mutex> lock(users_mutex);
    if (n_users == 0) {
        throw error(SPARK_STATUS_BAD_STATE, "experts are placed anew only while a model is loaded; set a plan instead");
    }
    const bool is_fixed = std::any_of(layers.begin(), layers.end(), [](const auto & l) { return l->is_unrouted; });
    if (is_fixed) {
        throw error(SPARK_STATUS_BAD_STATE, "the model was loaded with every expert resident, and its graphs rely on that; load it again");
    }
    std::vector<checked_layer> checked = check_plan(plan);
    if (!device) {
        place_ram(plan, std::move(checked));
        return;
    }
    device->pause(); // the swap engine reads what a plan changes
    apply(plan, std::move(checked));
    for (auto & layer : layers) {
        std::lock_guard<std::mutex> layer_lock(layer->mutex);
        layer->policy.seed(layer->hotness);
    }
    device->place();
}

std::vector<expert_store::checked_layer> expert_store::check_plan(const spark_plan & plan) const {
    if (plan.policy < SPARK_POLICY_FREQUENCY || plan.policy > SPARK_POLICY_CHAOS) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("unknown policy %d", plan.policy));
    }
    if (plan.n_layers < 0 || (plan.n_layers > 0 && !plan.layers)) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("a plan of %d layers without layers", plan.n_layers));
    }

    std::vector<checked_layer> all(layers.size());
    std::vector<bool>          named(layers.size(), false);
    for (int32_t i = 0; i < plan.n_layers; i++) {
        const spark_layer_plan & p = plan.layers[i];
        const auto it = std::find_if(layers.begin(), layers.end(), [&](const auto & l) { return l->file.layer == p.layer; });
        if (it == layers.end()) {
            throw error(SPARK_STATUS_INVALID_ARGUMENT, format("block %d has no experts", p.layer));
        }
        const size_t  index    = it - layers.begin();
        const int32_t n_expert = (*it)->file.n_expert;
        if (named[index]) {
            throw error(SPARK_STATUS_INVALID_ARGUMENT, format("block %d is named twice", p.layer));
        }
        named[index] = true;
        if (p.n_fast < 0 || p.n_fast > n_expert) {
            throw error(SPARK_STATUS_INVALID_ARGUMENT, format("block %d: %d fast slots; 0 to %d are possible", p.layer, p.n_fast, n_expert));
        }
        if (p.n_initial < 0 || p.n_initial > p.n_fast || (p.n_initial > 0 && !p.initial)) {
            throw error(SPARK_STATUS_INVALID_ARGUMENT, format("block %d: %d initial experts for %d fast slots", p.layer, p.n_initial, p.n_fast));
        }
        if (p.n_pinned < 0 || p.n_pinned > p.n_initial) {
            throw error(SPARK_STATUS_INVALID_ARGUMENT, format("block %d: %d pinned of %d initial experts", p.layer, p.n_pinned, p.n_initial));
        }
        std::vector<bool> seen(n_expert, false);
        for (int32_t j = 0; j < p.n_initial; j++) {
            const int32_t e = p.initial[j];
            if (e < 0 || e >= n_expert || seen[e]) {
                throw error(SPARK_STATUS_INVALID_ARGUMENT, format("block %d: initial expert %d is out of range or named twice", p.layer, e));
            }
            seen[e] = true;
        }
        for (int32_t e = 0; p.hotness && e < n_expert; e++) {
            if (!std::isfinite(p.hotness[e]) || p.hotness[e] < 0 || p.hotness[e] > 1e15) {
                throw error(SPARK_STATUS_INVALID_ARGUMENT, format("block %d: expert %d begins with %g uses; 0 to 1e15 are possible", p.layer, e, p.hotness[e]));
            }
        }
        all[index].n_fast   = p.n_fast;
        all[index].n_pinned = p.n_pinned;
        all[index].initial.assign(p.initial, p.initial + p.n_initial);
        all[index].hotness.assign(p.hotness, p.hotness ? p.hotness + n_expert : nullptr);
    }
    return all;
}

void expert_store::apply(const spark_plan & plan, std::vector<checked_layer> checked) {
    for (size_t i = 0; i < layers.size(); i++) {
        layers[i]->n_fast   = checked[i].n_fast;
        layers[i]->n_pinned = checked[i].n_pinned;
        layers[i]->initial  = std::move(checked[i].initial);
        layers[i]->hotness  = std::move(checked[i].hotness);
    }
    policy = (spark_policy) plan.policy;
    seed   = plan.seed;
    staging_bytes = plan.staging_bytes;
}

// --- in RAM, while a model is loaded and no step runs ---

void expert_store::place_ram(const spark_plan & plan, std::vector<checked_layer> checked) {
    stop_engine();
    {
        // an idle context may hold what its last, perhaps aborted, graph read
        std::lock_guard<std::mutex> lock(contexts_mutex);
        for (auto & context : contexts) {
            release(context.second->lease);
        }
    }
    policy = (spark_policy) plan.policy;
    seed   = plan.seed;
    try {
        // those that shrink first, so that the old and the new never need memory together
        std::vector<size_t> order(layers.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_partition(order.begin(), order.end(), [&](size_t i) { return checked[i].n_fast < layers[i]->n_fast; });
        for (size_t i : order) {
            place_layer(*layers[i], checked[i]);
        }
    } catch (...) {
        start_engine();
        throw;
    }
    start_engine();
}

void expert_store::place_layer(layer_state & layer, checked_layer & checked) {
    std::vector<int32_t> arriving;
    {
        std::lock_guard<std::mutex> lock(layer.mutex);
        std::vector<bool> is_wanted(layer.file.n_expert, false);
        for (int32_t expert : checked.initial) {
            is_wanted[expert] = true;
        }
        layer.policy.seed(checked.hotness);

        // slots that go away, then the coldest that nobody asked for, until those that are asked for have slots
        int32_t n_free = checked.n_fast;
        std::vector<int32_t> unwanted;
        for (int32_t slot = 0; slot < (int32_t) layer.expert_in.size(); slot++) {
            const int32_t expert = layer.expert_in[slot];
            if (expert < 0) {
                continue;
            }
            if (slot >= checked.n_fast) {
                leave_slot(layer, slot, layer_state::SLOT_FREE);
                continue;
            }
            n_free--;
            if (!is_wanted[expert]) {
                unwanted.push_back(expert);
            }
        }
        for (int32_t expert : checked.initial) {
            if (layer.slot_of[expert] < 0) {
                arriving.push_back(expert);
            }
        }
        if ((int32_t) arriving.size() > n_free) {
            layer.policy.select_victims(unwanted, arriving.size() - n_free);
            for (int32_t expert : unwanted) {
                leave_slot(layer, layer.slot_of[expert], layer_state::SLOT_FREE);
            }
        }

        layer.pinned.assign(layer.file.n_expert, false);
        if (checked.n_fast < layer.n_fast) {
            layer.n_fast = checked.n_fast; // also when giving memory back fails half way
        }
        for (auto & stack : layer.stacks) {
            stack->memory->set_fast(checked.n_fast);
        }
        layer.n_fast = checked.n_fast;
        layer.expert_in.resize(layer.n_fast, layer_state::SLOT_FREE);
        layer.readers  .resize(layer.n_fast, 0);
        layer.n_pinned = checked.n_pinned;
        layer.initial  = std::move(checked.initial);
        layer.hotness  = std::move(checked.hotness);
        for (int32_t i = 0; i < layer.n_pinned; i++) {
            layer.pinned[layer.initial[i]] = true;
        }
    }
    fill_free_slots(layer, arriving);
}

void expert_store::fill_free_slots(layer_state & layer, const std::vector<int32_t> & experts) {
    std::vector<int32_t> slots;
    for (int32_t slot = 0; slot < layer.n_fast && slots.size() < experts.size(); slot++) {
        if (layer.expert_in[slot] == layer_state::SLOT_FREE) {
            slots.push_back(slot);
        }
    }
    std::vector<read_job> jobs;
    for (size_t i = 0; i < slots.size(); i++) {
        add_jobs(layer, experts[i], slots[i], jobs);
    }
    reader.read(jobs);
    const size_t n_tensors = layer.stacks.size();
    std::lock_guard<std::mutex> lock(layer.mutex);
    for (size_t i = 0; i < slots.size(); i++) {
        const auto first = jobs.begin() + i * n_tensors;
        const auto failed = std::find_if(first, first + n_tensors, [](const read_job & job) { return job.error != 0; });
        if (failed != first + n_tensors) {
            log(log_level::warn, "block %d: reading expert %d failed (%s); it stays in its home", layer.file.layer, experts[i],
                failed->error < 0 ? "unexpected end of the file" : strerror(failed->error));
            continue;
        }
        enter_slot(layer, experts[i], slots[i]);
        layer.stats.bytes_read += layer.file.expert_bytes;
    }
}

} // namespace spark
