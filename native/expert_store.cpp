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
        n_tensors += described.tensors.size();
        layers.push_back(std::move(layer));
    }
    for (size_t i = 0; i < layers.size(); i++) {
        // multi-token prediction runs its blocks one by one, after and apart from the model's
        const bool is_last = i + 1 == layers.size() || layers[i + 1]->file.is_prediction;
        layers[i]->ends_graph = is_last || layers[i]->file.is_prediction;
    }
    if (!options.device.empty()) {
        device = make_device_residency(*this, options.device);
    }
    size_t largest = 0;
    for (const auto & layer : layers) {
        for (const expert_tensor & tensor : layer->file.tensors) {
            largest = std::max(largest, tensor.stride);
        }
    }
    for (auto & layer : layers) {
        for (const expert_tensor & tensor : layer->file.tensors) {
            layer->home_slot = std::max(layer->home_slot, stack_home_slot(tensor.stride, tensor.n_expert, device ? device->page_size() : 0, largest));
        }
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
            stack->ends_graph = layer->ends_graph && tensor.is_down;
            // The number of slots is the same at every residency, so that nothing in a backend can depend on it.
            stack->hook.stack = ggml_new_tensor_3d(stack_tensors, tensor.type, tensor.ne0, tensor.ne1, layer->home_slot + tensor.n_expert);
            stack->hook.layer = layer.get();
            layer->is_quantized &= ggml_is_quantized(tensor.type);
            ggml_set_name(stack->hook.stack, tensor.name.c_str());
            layer->stacks.push_back(std::move(stack));
        }
    }
}

expert_store::~expert_store() {
    ggml_free(stack_tensors);
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

namespace {

// Lines in the log while experts are read, ten for those that take a while.
class load_progress {
public:
    load_progress(size_t n_total, size_t n_bytes) : n_total(n_total), is_shown(n_bytes > ((size_t) 1 << 30)) {}

    void add(size_t n) {
        n_done += n;
        if (is_shown && n_total > 0 && (n_done - n_logged) * 10 >= n_total) {
            log(log_level::info, "loading experts: %3zu %%", n_done * 100 / n_total);
            n_logged = n_done;
        }
    }

private:
    const size_t n_total;
    const bool   is_shown;
    size_t n_done   = 0;
    size_t n_logged = 0;
};

} // namespace

// Homes are in pinned RAM and hold every expert; they come from the file once, the fast slots from them.
void expert_store::load_device() {
    size_t n_total = 0;
    // ggml fuses products where its allocator happens to allow it, which more nodes can change. For quantised experts both ways
    // compute the same; for others they round differently, so their graphs have the same nodes at every residency.
    const bool is_unrouted = policy != SPARK_POLICY_CHAOS &&
        std::all_of(layers.begin(), layers.end(), [](const auto & l) { return l->n_fast == l->file.n_expert && l->is_quantized; });
    for (auto & layer : layers) {
        for (auto & stack : layer->stacks) {
            const expert_tensor & t = *stack->tensor;
            stack->memory = device->make_stack({ t.stride, t.n_expert, layer->n_fast, layer->home_slot, file.shards[t.shard].fd, t.offset });
            ggml_tensor & tensor = *stack->hook.stack;
            tensor.data  = stack->memory->base();
            // read through expert ids it looks like the model's own tensor, which fused products with biases compare it with
            tensor.ne[2] = is_unrouted ? t.n_expert : stack->memory->n_slots();
            tensor.nb[3] = tensor.nb[2] * tensor.ne[2];
        }
        n_total += layer->file.expert_bytes * layer->file.n_expert;
        std::lock_guard<std::mutex> lock(layer->mutex);
        layer->slot_of.assign(layer->file.n_expert, -1);
        layer->policy      = residency_policy(layer->file.n_expert);
        layer->policy.seed(layer->hotness);
        layer->is_unrouted = is_unrouted;
        layer->stats.reset();
    }
    load_progress progress(n_total, n_total);
    for (auto & layer : layers) {
        std::vector<read_job> jobs;
        for (int32_t e = 0; e < layer->file.n_expert; e++) {
            add_jobs(*layer, e, layer->home_slot + e, jobs);
        }
        for (read_job & job : jobs) {
            job.through_cache = true; // memory of the driver takes no direct reads, and the next start finds the file in the cache
        }
        reader.read(jobs);
        check_jobs(*layer, jobs);
        progress.add(layer->file.expert_bytes * layer->file.n_expert);
    }
    device->start();
    device->place();
}

void expert_store::check_jobs(const layer_state & layer, const std::vector<read_job> & jobs) const {
    for (const read_job & job : jobs) {
        if (job.error != 0) {
            throw error(SPARK_STATUS_IO, format("cannot read experts of block %d from '%s': %s", layer.file.layer,
                file.shards[job.shard].path.c_str(), job.error < 0 ? "unexpected end of the file" : strerror(job.error)));
        }
    }
}

void expert_store::load() {
    try {
        device ? load_device() : load_ram();
    } catch (...) {
        unload();
        throw;
    }
}

void expert_store::load_ram() {
    size_t fast_bytes = 0;
    size_t n_initial  = 0;
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
        layer->policy.seed(layer->hotness);
        layer->stats.reset();
        for (int32_t i = 0; i < layer->n_pinned; i++) {
            layer->pinned[layer->initial[i]] = true;
        }
        n_initial += layer->initial.size();
    }

    // Reads go a few layers at a time: enough to keep the disk busy, and progress can be shown.
    load_progress progress(n_initial, fast_bytes);
    for (auto & layer : layers) {
        std::vector<read_job> jobs;
        for (size_t i = 0; i < layer->initial.size(); i++) {
            add_jobs(*layer, layer->initial[i], (int32_t) i, jobs);
        }
        reader.read(jobs);
        check_jobs(*layer, jobs);
        std::lock_guard<std::mutex> lock(layer->mutex);
        for (size_t i = 0; i < layer->initial.size(); i++) {
            enter_slot(*layer, layer->initial[i], (int32_t) i);
        }
        progress.add(layer->initial.size());
    }
    start_engine();
}

void expert_store::start_engine() {
    const bool may_change = std::any_of(layers.begin(), layers.end(), [](const auto & l) { return l->n_fast > 0 && l->n_fast < l->file.n_expert; });
    if ((may_change && policy == SPARK_POLICY_FREQUENCY) || policy == SPARK_POLICY_CHAOS) {
        engine = std::make_shared<swap_engine>(*this);
    }
}

void expert_store::stop_engine() {
    if (engine) {
        engine->stop(); // before the slots it may be filling go away
        engine.reset();
    }
}

void expert_store::unload() {
    stop_engine();
    if (device) {
        device->stop();
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

device_site * expert_store::device_site_for(layer_state & layer, const void * context) {
    std::lock_guard<std::mutex> lock(contexts_mutex);
    std::unique_ptr<context_state> & state = contexts[context];
    if (!state) {
        state = std::make_unique<context_state>();
        state->number = (int32_t) contexts.size() - 1;
        state->device_sites.resize(layers.size());
    }
    device_site & site = state->device_sites[layer.index];
    if (!site.device) {
        state->first_layer = std::min(state->first_layer, layer.index);
        const size_t next = (size_t) layer.index + 1;
        if (!layer.ends_graph && next < layers.size()) {
            site.next = &state->device_sites[next];
        }
        device->init_site(site, layer, state->number, layer.index == state->first_layer || layer.file.is_prediction);
    }
    return &site;
}

void expert_store::update_stats() const {
    std::lock_guard<std::mutex> lock(users_mutex);
    if (device && n_users > 0) {
        device->update_stats();
    }
}

device_residency::step_counts expert_store::step_counts() const {
    std::lock_guard<std::mutex> lock(users_mutex);
    return device && n_users > 0 ? device->read_steps() : device_residency::step_counts();
}

bool expert_store::wait_idle(int32_t timeout_ms) const {
    if (device) {
        return !is_loaded() || device->wait_idle(timeout_ms);
    }
    const std::shared_ptr<swap_engine> swaps_now = swaps();
    return !swaps_now || swaps_now->wait_idle(timeout_ms);
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
