// Life cycle: plan, allocation, first filling. What happens while steps run is in residency.cpp.
#include "expert_store.h"

#include "status.h"
#include "swap_engine.h"

#include <algorithm>
#include <cstring>

namespace spark {

expert_store::expert_store(const store_options & options)
    : options(options), file(options.path, options.direct_io), reader(file, options.n_io_threads) {
    size_t n_tensors = 0;
    for (size_t i = 0; i < file.layers.size(); i++) {
        const expert_layer & described = file.layers[i];
        auto layer = std::make_unique<layer_state>(described, (int32_t) i);
        layer->n_fast = described.n_expert;
        layer->initial.resize(described.n_expert);
        for (int32_t e = 0; e < described.n_expert; e++) {
            layer->initial[e] = e;
        }
        for (const expert_tensor & tensor : described.tensors) {
            layer->home_slot = std::max(layer->home_slot, stack_home_slot(tensor.stride, described.n_expert));
        }
        n_tensors += described.tensors.size();
        layers.push_back(std::move(layer));
    }

    const ggml_init_params params = { /*.mem_size =*/ n_tensors * ggml_tensor_overhead(), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true };
    stack_tensors = ggml_init(params);
    if (!stack_tensors) {
        throw error(SPARK_STATUS_OUT_OF_MEMORY, "out of memory for tensor descriptions");
    }
    for (auto & layer : layers) {
        for (const expert_tensor & tensor : layer->file.tensors) {
            auto stack = std::make_unique<expert_stack>();
            stack->store      = this;
            stack->layer      = layer.get();
            stack->tensor     = &tensor;
            stack->ends_graph = layer == layers.back() && tensor.is_down;
            // The number of slots is the same at every residency, so that nothing in a backend can depend on it.
            stack->hook.stack = ggml_new_tensor_3d(stack_tensors, tensor.type, tensor.ne0, tensor.ne1, layer->home_slot + tensor.n_expert);
            stack->hook.layer = layer.get();
            ggml_set_name(stack->hook.stack, tensor.name.c_str());
            layer->stacks.push_back(std::move(stack));
        }
    }
}

expert_store::~expert_store() {
    ggml_free(stack_tensors);
}

void expert_store::set_plan(const spark_plan & plan) {
    std::lock_guard<std::mutex> lock(users_mutex);
    if (n_users > 0) {
        throw error(SPARK_STATUS_BAD_STATE, "the plan cannot change while a model is loaded; free the model first");
    }
    if (plan.policy < SPARK_POLICY_FREQUENCY || plan.policy > SPARK_POLICY_CHAOS) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("unknown policy %d", plan.policy));
    }
    if (plan.n_layers < 0 || (plan.n_layers > 0 && !plan.layers)) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("a plan of %d layers without layers", plan.n_layers));
    }

    struct checked { int32_t n_fast = 0; int32_t n_pinned = 0; std::vector<int32_t> initial; };
    std::vector<checked> all(layers.size());
    std::vector<bool>    named(layers.size(), false);
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
        all[index] = { p.n_fast, p.n_pinned, std::vector<int32_t>(p.initial, p.initial + p.n_initial) };
    }

    for (size_t i = 0; i < layers.size(); i++) {
        layers[i]->n_fast   = all[i].n_fast;
        layers[i]->n_pinned = all[i].n_pinned;
        layers[i]->initial  = std::move(all[i].initial);
    }
    policy = (spark_policy) plan.policy;
    seed   = plan.seed;
}

void expert_store::attach() {
    std::lock_guard<std::mutex> lock(users_mutex);
    if (n_users == 0) {
        load();
    }
    n_users++;
}

void expert_store::detach() {
    std::lock_guard<std::mutex> lock(users_mutex);
    if (--n_users == 0) {
        unload();
    }
}

bool expert_store::is_loaded() const {
    std::lock_guard<std::mutex> lock(users_mutex);
    return n_users > 0;
}

void expert_store::load() {
    size_t fast_bytes = 0;
    size_t n_initial  = 0;
    bool   may_change = false;
    try {
        for (auto & layer : layers) {
            for (auto & stack : layer->stacks) {
                const expert_tensor & t = *stack->tensor;
                stack->memory = make_stack_memory_cpu({ t.stride, t.n_expert, layer->n_fast, layer->home_slot, file.shards[t.shard].fd, t.offset }, options.lock_fast);
                stack->hook.stack->data = stack->memory->base();
                fast_bytes += stack->memory->fast_bytes();
            }
            std::lock_guard<std::mutex> lock(layer->mutex);
            layer->slot_of  .assign(layer->file.n_expert, -1);
            layer->expert_in.assign(layer->n_fast, layer_state::SLOT_FREE);
            layer->readers  .assign(layer->n_fast, 0);
            layer->pinned   .assign(layer->file.n_expert, false);
            layer->n_resident = 0;
            layer->has_run    = false;
            layer->policy     = residency_policy(layer->file.n_expert);
            layer->stats.reset();
            for (int32_t i = 0; i < layer->n_pinned; i++) {
                layer->pinned[layer->initial[i]] = true;
            }
            n_initial  += layer->initial.size();
            may_change |= layer->n_fast > 0 && layer->n_fast < layer->file.n_expert;
        }

        // Reads go a few layers at a time: enough to keep the disk busy, and progress can be shown.
        size_t n_done = 0, n_shown = 0;
        for (auto & layer : layers) {
            std::vector<read_job> jobs;
            for (size_t i = 0; i < layer->initial.size(); i++) {
                add_jobs(*layer, layer->initial[i], (int32_t) i, jobs);
            }
            reader.read(jobs);
            for (const read_job & job : jobs) {
                if (job.error != 0) {
                    throw error(SPARK_STATUS_IO, format("cannot read experts of block %d from '%s': %s", layer->file.layer,
                        file.shards[job.shard].path.c_str(), job.error < 0 ? "unexpected end of the file" : strerror(job.error)));
                }
            }
            std::lock_guard<std::mutex> lock(layer->mutex);
            for (size_t i = 0; i < layer->initial.size(); i++) {
                enter_slot(*layer, layer->initial[i], (int32_t) i);
            }
            n_done += layer->initial.size();
            if (n_initial > 0 && fast_bytes > ((size_t) 1 << 30) && (n_done - n_shown) * 10 >= n_initial) {
                log(log_level::info, "loading experts: %3zu %%", n_done * 100 / n_initial);
                n_shown = n_done;
            }
        }
        if ((may_change && policy == SPARK_POLICY_FREQUENCY) || policy == SPARK_POLICY_CHAOS) {
            engine = std::make_shared<swap_engine>(*this);
        }
    } catch (...) {
        unload();
        throw;
    }
}

void expert_store::unload() {
    if (engine) {
        engine->stop(); // before the slots it may be filling go away
        engine.reset();
    }
    {
        // the contexts of this model are gone, and with them what their last, perhaps aborted, graph held
        std::lock_guard<std::mutex> lock(contexts_mutex);
        contexts.clear();
    }
    for (auto & layer : layers) {
        for (auto & stack : layer->stacks) {
            stack->memory.reset();
            stack->hook.stack->data   = nullptr;
            stack->hook.stack->buffer = nullptr;
        }
    }
}

std::shared_ptr<swap_engine> expert_store::swaps() const {
    std::lock_guard<std::mutex> lock(users_mutex);
    return engine;
}

expert_stack * expert_store::find_stack(const char * name) {
    for (auto & layer : layers) {
        for (auto & stack : layer->stacks) {
            if (stack->tensor->name == name) {
                return stack.get();
            }
        }
    }
    return nullptr;
}

route_site * expert_store::site_for(layer_state & layer, const void * context) {
    std::lock_guard<std::mutex> lock(contexts_mutex);
    std::unique_ptr<context_state> & state = contexts[context];
    if (!state) {
        state = std::make_unique<context_state>();
        state->sites.resize(layers.size());
    }
    route_site & site = state->sites[layer.index];
    site = { this, &layer, &state->lease };
    return &site;
}

spark_stats expert_store::layer_stats(int32_t index) const {
    const layer_state & layer = *layers[index];
    std::lock_guard<std::mutex> users_lock(users_mutex); // stacks do not go away meanwhile
    spark_stats out = {};
    out.layer    = layer.file.layer;
    out.n_expert = layer.file.n_expert;
    out.n_fast   = layer.n_fast;
    for (const auto & stack : layer.stacks) {
        if (stack->memory) {
            out.fast_bytes   += stack->memory->fast_bytes();
            out.locked_bytes += stack->memory->locked_bytes();
        }
    }
    std::lock_guard<std::mutex> lock(layer.mutex);
    out.n_resident = layer.n_resident;
    layer.stats.add_to(out);
    return out;
}

} // namespace spark
