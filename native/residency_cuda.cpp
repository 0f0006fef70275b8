#include "residency_cuda.h"

#include "expert_store.h"
#include "prefetch_cuda.h"
#include "stager_cuda.h"
#include "swap_engine_cuda.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace spark {

static constexpr size_t MISSED_MAX    = 4096; // of a layer

residency_cuda::residency_cuda(expert_store & store, ggml_backend_dev_t backend, const cuda_device & device)
    : store(store), device(device), backend(backend) {
    size_t n = 0;
    for (const auto & layer : store.layers) {
        offsets.push_back(n);
        n += layer->file.n_expert;
    }
    offsets.push_back(n);
}

residency_cuda::~residency_cuda() = default;

std::unique_ptr<stack_memory> residency_cuda::make_stack(const stack_layout & layout) {
    device_guard guard(device.ordinal);
    return std::make_unique<stack_memory_cuda>(layout, device);
}

stack_memory_cuda & residency_cuda::memory(const layer_state & layer, size_t tensor) const {
    return static_cast<stack_memory_cuda &>(*layer.stacks[tensor]->memory);
}

size_t residency_cuda::counters_size() const {
    return offsets.back() * sizeof(uint32_t) + store.layers.size() * sizeof(layer_counters) + CONTEXTS_MAX * sizeof(context_counters);
}

residency_cuda::counters residency_cuda::counters_in(char * memory) const {
    counters c;
    c.counts   = (uint32_t *) memory;
    c.layers   = (layer_counters *) (c.counts + offsets.back());
    c.contexts = (context_counters *) (c.layers + store.layers.size());
    return c;
}

void residency_cuda::start() {
    device_guard guard(device.ordinal);
    table      = cuda_array<int32_t>(offsets.back(), /*is_pinned =*/ false);
    host_table = cuda_array<int32_t>(offsets.back(), /*is_pinned =*/ true);
    sent_table = cuda_array<int32_t>(offsets.back(), /*is_pinned =*/ true);
    on_device  = cuda_array<char>(counters_size(), /*is_pinned =*/ false);
    on_host    = cuda_array<char>(counters_size(), /*is_pinned =*/ true);
    last.assign(counters_size(), 0);
    n_enqueued = 0;
    missed.assign(store.layers.size(), {});
    stager   = std::make_unique<stager_cuda>(*this);
    prefetch = std::make_unique<prefetch_cuda>(*this);
    for (const auto & layer : store.layers) {
        for (int32_t e = 0; e < layer->file.n_expert; e++) {
            host_table[offsets[layer->index] + e] = layer->home_slot + e;
        }
    }
    upload_table(cudaStreamPerThread);
    engine = std::make_unique<swap_engine_cuda>(*this);
}

void residency_cuda::stop() {
    device_guard guard(device.ordinal);
    engine.reset();
    cudaDeviceSynchronize(); // a context that was freed may have left work behind
    stager.reset();
    prefetch.reset();
    table.reset();
    host_table.reset();
    sent_table.reset();
    on_device.reset();
    on_host.reset();
}

// The slot of the i-th initial expert. With room for all, experts lie in the order of their numbers (layer_state::is_unrouted).
static int32_t slot_for(const layer_state & layer, size_t i) {
    return layer.n_fast == layer.file.n_expert ? layer.initial[i] : (int32_t) i;
}

void residency_cuda::pause() {
    engine->pause();
}

void residency_cuda::resume() {
    engine->resume();
}

void residency_cuda::place() {
    device_guard guard(device.ordinal);
    engine->pause();
    const cudaStream_t stream = cudaStreamPerThread;

    // Everything is read from home while fast slots come and go.
    for (const auto & layer : store.layers) {
        std::lock_guard<std::mutex> lock(layer->mutex);
        for (int32_t e = 0; e < layer->file.n_expert; e++) {
            set_table(*layer, e, layer->home_slot + e);
        }
        layer->slot_of  .assign(layer->file.n_expert, -1);
        layer->expert_in.assign(layer->n_fast, layer_state::SLOT_FREE);
        layer->pinned   .assign(layer->file.n_expert, false);
        layer->n_resident = 0;
        for (int32_t i = 0; i < layer->n_pinned; i++) {
            layer->pinned[layer->initial[i]] = true;
        }
    }
    upload_table(stream);
    check(cudaDeviceSynchronize(), "a step failed on the device");
    stager->place(0);
    prefetch->place(0);

    for (const auto & layer : store.layers) {
        for (size_t i = 0; i < layer->stacks.size(); i++) {
            memory(*layer, i).set_fast(0); // all first, so that the new and the old never need memory together
        }
    }
    for (const auto & layer : store.layers) {
        for (size_t i = 0; i < layer->stacks.size(); i++) {
            memory(*layer, i).set_fast(layer->n_fast);
        }
    }
    const size_t staging_bytes = store.staging_bytes >= 0 ? (size_t) store.staging_bytes : SIZE_MAX / 2;
    prefetch->place(staging_bytes / 2);
    stager->place(staging_bytes - prefetch->bytes());

    for (const auto & layer : store.layers) {
        for (size_t i = 0; i < layer->initial.size(); i++) {
            copy_to_slot(*layer, layer->initial[i], slot_for(*layer, i), stream);
        }
    }
    check(cudaStreamSynchronize(stream), "cannot copy experts to the device");
    for (const auto & layer : store.layers) {
        std::lock_guard<std::mutex> lock(layer->mutex);
        for (size_t i = 0; i < layer->initial.size(); i++) {
            enter_slot(*layer, layer->initial[i], slot_for(*layer, i));
            layer->stats.promotions++;
        }
    }
    upload_table(stream);
    engine->resume();
}

void residency_cuda::set_table(const layer_state & layer, int32_t expert, int32_t slot) {
    host_table[offsets[layer.index] + expert] = slot;
}

void residency_cuda::enter_slot(layer_state & layer, int32_t expert, int32_t slot) {
    layer.slot_of[expert] = slot;
    layer.expert_in[slot] = expert;
    layer.n_resident++;
    set_table(layer, expert, slot);
}

void residency_cuda::leave_slot(layer_state & layer, int32_t expert) {
    layer.slot_of[expert] = -1;
    layer.n_resident--;
    set_table(layer, expert, layer.home_slot + expert);
}

void residency_cuda::copy_to_slot(const layer_state & layer, int32_t expert, int32_t slot, cudaStream_t stream) {
    for (const auto & stack : layer.stacks) {
        char * base = stack->memory->base();
        const size_t stride = stack->tensor->stride;
        check(cudaMemcpyAsync(base + (size_t) slot * stride, base + (size_t) (layer.home_slot + expert) * stride, stride, cudaMemcpyDefault, stream),
            "cannot copy an expert to the device");
    }
}

void residency_cuda::upload_table(cudaStream_t stream) {
    for (const auto & layer : store.layers) {
        std::lock_guard<std::mutex> lock(layer->mutex);
        std::copy_n(host_table.get() + offsets[layer->index], layer->file.n_expert, sent_table.get() + offsets[layer->index]);
    }
    check(cudaMemcpyAsync(table.get(), sent_table.get(), table.bytes(), cudaMemcpyHostToDevice, stream), "cannot send the residency table");
    check(cudaStreamSynchronize(stream), "cannot send the residency table");
}

bool residency_cuda::wait_for_steps(cudaStream_t stream, int32_t timeout_ms) {
    std::lock_guard<std::mutex> lock(counters_mutex);
    const size_t offset = (char *) counters_in(on_device.get()).contexts - on_device.get();
    const context_counters * now = counters_in(on_host.get()).contexts;
    const auto read = [&] {
        check(cudaMemcpyAsync(on_host.get() + offset, on_device.get() + offset, CONTEXTS_MAX * sizeof(context_counters), cudaMemcpyDeviceToHost, stream),
            "cannot read the step counters");
        check(cudaStreamSynchronize(stream), "cannot read the step counters");
    };
    read();
    std::vector<uint32_t> started;
    for (int32_t c = 0; c < CONTEXTS_MAX; c++) {
        started.push_back(now[c].started);
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (true) {
        bool is_done = true;
        for (int32_t c = 0; c < CONTEXTS_MAX; c++) {
            is_done &= (int32_t) (now[c].finished - started[c]) >= 0;
        }
        if (is_done || std::chrono::steady_clock::now() > deadline) {
            return is_done;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        read();
    }
}

residency_cuda::reads residency_cuda::read_counters(cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(counters_mutex);
    check(cudaMemcpyAsync(on_host.get(), on_device.get(), on_device.bytes(), cudaMemcpyDeviceToHost, stream), "cannot read the counters");
    check(cudaStreamSynchronize(stream), "cannot read the counters");
    const counters now    = counters_in(on_host.get());
    const counters before = counters_in(last.data());
    reads sum;
    for (const auto & layer : store.layers) {
        const layer_counters & a = before.layers[layer->index];
        const layer_counters & b = now.layers[layer->index];
        const uint32_t n_uses = b.uses - a.uses;
        if (n_uses == 0) {
            continue;
        }
        const uint32_t n_misses = b.misses - a.misses, n_homes = b.homes - a.homes, n_staged = b.staged - a.staged;
        sum.n_uses += n_uses;
        sum.bytes  += (double) (n_homes + n_staged) * (double) layer->file.expert_bytes;

        std::vector<int32_t> & without_slot = missed[layer->index];
        if (without_slot.size() > MISSED_MAX) {
            without_slot.clear(); // out of date: nobody took them for long
        }
        std::lock_guard<std::mutex> layer_lock(layer->mutex);
        const int64_t n_tokens = std::max<int64_t>(1, n_uses / std::max(1, layer->n_used.load(std::memory_order_relaxed)));
        layer->policy.advance(n_tokens);
        const double weight = layer->policy.mean_weight(n_tokens); // which token of a prompt used it is not known here
        for (int32_t e = 0; e < layer->file.n_expert; e++) {
            const size_t i = offsets[layer->index] + e;
            const uint32_t n = now.counts[i] - before.counts[i];
            if (n == 0) {
                continue;
            }
            layer->policy.record(e, weight * n);
            layer->stats.uses[e] += n;
            if (layer->slot_of[e] < 0) {
                without_slot.push_back(e);
            }
        }
        layer->stats.n_uses      += n_uses;
        layer->stats.hits        += n_uses - n_misses;
        layer->stats.misses      += n_misses;
        layer->stats.misses_home += n_staged > 0 ? std::min(n_misses, n_homes) : n_misses;
        layer->stats.bytes_home  += (uint64_t) n_homes * layer->file.expert_bytes;
        layer->stats.bytes_ahead += (uint64_t) (b.copied - a.copied) * layer->file.expert_bytes;
        layer->stats.reads_home  += n_homes;
        layer->stats.reads_ahead += n_staged;
    }
    std::copy_n(on_host.get(), on_host.bytes(), last.data());
    return sum;
}

std::vector<int32_t> residency_cuda::take_missed(const layer_state & layer) {
    std::vector<int32_t> result;
    std::lock_guard<std::mutex> lock(counters_mutex);
    result.swap(missed[layer.index]);
    std::sort(result.begin(), result.end());
    result.erase(std::unique(result.begin(), result.end()), result.end());
    return result;
}

bool residency_cuda::is_staging() {
    return stager->is_busy();
}

void residency_cuda::update_stats() {
    if (engine) {
        engine->poll();
    }
}

bool residency_cuda::wait_idle(int32_t timeout_ms) {
    return !engine || engine->wait_idle(timeout_ms);
}

residency_cuda::step_counts residency_cuda::read_steps() {
    std::lock_guard<std::mutex> lock(counters_mutex);
    step_counts sum;
    if (!last.empty()) {
        for (int32_t c = 0; c < CONTEXTS_MAX; c++) {
            sum.steps += counters_in(last.data()).contexts[c].started;
        }
    }
    sum.replayed = sum.steps - std::min<uint64_t>(sum.steps, n_enqueued);
    return sum;
}

// --- nodes ---

static device_site & site_of(const ggml_tensor * node) {
    return *((const device_site::node *) node->extra)->site;
}

void residency_cuda::init_site(device_site & site, layer_state & layer, int32_t context, bool is_first) {
    site.route_node  = { { backend, enqueue_route,  is_route_capturable  }, &site };
    site.finish_node = { { backend, enqueue_finish, is_always_capturable }, &site };
    site.device   = this;
    site.layer    = &layer;
    site.context  = std::min(context, CONTEXTS_MAX - 1);
    site.is_first = is_first;
    if (context >= CONTEXTS_MAX) {
        // their counters would mix, and a slot could be filled under a running step
        log(log_level::warn, "more than %d contexts over one model: experts do not move any more", CONTEXTS_MAX);
        engine->pause();
    }
}

bool residency_cuda::wants_ahead(const device_site & site, int64_t n_used, int64_t n_tokens) const {
    return site.next && site.next->device && prefetch->wants(site, *site.next, n_used, n_tokens);
}

const int32_t * residency_cuda::device_table(const layer_state & layer) const {
    return table.get() + offsets[layer.index];
}

layer_counters * residency_cuda::device_counters(const layer_state & layer) const {
    return counters_in(on_device.get()).layers + layer.index;
}

bool residency_cuda::is_route_capturable(const ggml_tensor * node) {
    const device_site & site = site_of(node);
    const auto & self = static_cast<const residency_cuda &>(*site.device);
    return !self.stager->wants(*site.layer, node->ne[0] * node->ne[1]);
}

bool residency_cuda::is_always_capturable(const ggml_tensor *) {
    return true;
}

void residency_cuda::enqueue_route(ggml_tensor * node, void * stream) {
    const device_site & site = site_of(node);
    auto & self = static_cast<residency_cuda &>(*site.device);
    const ggml_tensor * ids = node->src[0];
    const counters c = self.counters_in(self.on_device.get());
    const size_t offset = self.offsets[site.layer->index];

    route_params p;
    p.ids      = (const char *) ids->data;
    p.nb0      = ids->nb[0];
    p.nb1      = ids->nb[1];
    p.n_used   = (int32_t) ids->ne[0];
    p.n_tokens = (int32_t) ids->ne[1];
    p.slots    = (int32_t *) node->data;
    p.n_expert  = site.layer->file.n_expert;
    p.home_slot = site.layer->home_slot;
    p.table    = self.table.get() + offset;
    p.counts   = c.counts + offset;
    p.layer    = c.layers + site.layer->index;
    p.context  = site.is_first ? c.contexts + site.context : nullptr;
    p.ring     = nullptr;
    if (node->src[2]) { // brought while the layer before was computed
        p.ring = self.prefetch->join(*site.layer, (cudaStream_t) stream);
    }

    staged_slots staged;
    const bool is_staged = self.stager->wants(*site.layer, node->ne[0] * node->ne[1]) &&
        self.stager->reach(*site.layer, site.context, (cudaStream_t) stream, staged);
    launch_route(p, is_staged ? &staged : nullptr, (cudaStream_t) stream);
    if (node->src[1] && node->src[1] != ids) {
        self.prefetch->begin(*site.next, node->src[1], (cudaStream_t) stream);
    }
}

void residency_cuda::enqueue_finish(ggml_tensor * node, void * stream) {
    const device_site & site = site_of(node);
    auto & self = static_cast<residency_cuda &>(*site.device);
    self.n_enqueued++;
    launch_finish(self.counters_in(self.on_device.get()).contexts + site.context, (cudaStream_t) stream);
    self.stager->finish(site.context, (cudaStream_t) stream);
}

// --- other tensors ---

struct residency_cuda::reserved {
    reserved(size_t size, size_t page) : range(size, page), pages(range.size / page) {}
    address_range range;
    std::vector<std::unique_ptr<physical_memory>> pages; // those in use
};

void * residency_cuda::reserve(size_t size) {
    device_guard guard(device.ordinal);
    others.push_back(std::make_unique<reserved>(size, device.page));
    return (void *) others.back()->range.base;
}

void residency_cuda::use(void * base, size_t begin, size_t end) {
    device_guard guard(device.ordinal);
    for (const auto & r : others) {
        if (r->range.base != (CUdeviceptr) base) {
            continue;
        }
        for (size_t i = begin / device.page; i * device.page < end; i++) {
            if (!r->pages[i]) {
                auto page = std::make_unique<physical_memory>(device, device.page, /*is_host =*/ false);
                page->map(r->range.base + i * device.page);
                r->pages[i] = std::move(page);
                check(cuMemsetD8(r->range.base + i * device.page, 0, device.page), "cannot clear device memory");
            }
        }
    }
}

void residency_cuda::unreserve(void * base, size_t size) {
    (void) size;
    device_guard guard(device.ordinal);
    const auto it = std::find_if(others.begin(), others.end(), [&](const auto & r) { return r->range.base == (CUdeviceptr) base; });
    if (it != others.end()) {
        for (size_t i = 0; i < (*it)->pages.size(); i++) {
            if ((*it)->pages[i]) {
                (*it)->pages[i]->unmap((*it)->range.base + i * device.page);
            }
        }
        others.erase(it);
    }
}

void residency_cuda::copy(void * dst, const void * src, size_t size) {
    device_guard guard(device.ordinal);
    check(cudaMemcpyAsync(dst, src, size, cudaMemcpyDefault, cudaStreamPerThread), "cannot copy to or from the device");
    check(cudaStreamSynchronize(cudaStreamPerThread), "cannot copy to or from the device");
}

void residency_cuda::set(void * dst, uint8_t value, size_t size) {
    device_guard guard(device.ordinal);
    check(cudaMemset(dst, value, size), "cannot fill device memory");
}

// --- the device ---

static ggml_backend_dev_t find_device(const std::string & name, int & ordinal) {
    const ggml_backend_dev_t backend = ggml_backend_dev_by_name(name.c_str());
    if (!backend || name.rfind("CUDA", 0) != 0) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("there is no CUDA device '%s'", name.c_str()));
    }
    ordinal = atoi(name.c_str() + 4);
    return backend;
}

std::unique_ptr<device_residency> make_device_residency(expert_store & store, const std::string & name) {
    cuda_device device;
    const ggml_backend_dev_t backend = find_device(name, device.ordinal);
    device_guard guard(device.ordinal);
    check(cudaFree(nullptr), "cannot use the CUDA device"); // makes its primary context
    int has_vmm = 0, has_host_vmm = 0;
    check(cuDeviceGetAttribute(&has_vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device.ordinal), "cannot ask the CUDA device");
    check(cuDeviceGetAttribute(&has_host_vmm, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device.ordinal), "cannot ask the CUDA device");
    if (!has_vmm || !has_host_vmm) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("device '%s' cannot map pinned RAM next to its own memory, which experts on a GPU need", name.c_str()));
    }
    check(cuDeviceGetAttribute(&device.numa, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device.ordinal), "cannot ask the CUDA device");
    device.numa = std::max(device.numa, 0); // -1: the machine has one node
    for (const bool is_host : { false, true }) {
        CUmemAllocationProp prop = {};
        prop.type          = CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location.type = is_host ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
        prop.location.id   = is_host ? device.numa : device.ordinal;
        size_t granularity = 0;
        check(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "cannot ask the CUDA device");
        device.page = std::max(device.page, granularity);
    }
    return std::make_unique<residency_cuda>(store, backend, device);
}

spark_device_info read_device_info(int32_t index) {
    const ggml_backend_dev_t backend = index >= 0 ? ggml_backend_dev_by_name(format("CUDA%d", index).c_str()) : nullptr;
    if (!backend) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("there is no CUDA device %d", index));
    }
    spark_device_info info = {};
    snprintf(info.name, sizeof(info.name), "%s", ggml_backend_dev_name(backend));
    snprintf(info.description, sizeof(info.description), "%s", ggml_backend_dev_description(backend));
    check(cudaDeviceGetPCIBusId(info.pci_bus_id, sizeof(info.pci_bus_id), index), "cannot ask the CUDA device");
    return info;
}

device_memory read_device_memory(const std::string & name) {
    int ordinal;
    find_device(name, ordinal);
    device_guard guard(ordinal);
    device_memory memory;
    check(cudaMemGetInfo(&memory.free, &memory.total), "cannot read the device's memory");
    return memory;
}

} // namespace spark
