#include "prefetch_cuda.h"

#include "expert_store.h"
#include "residency_cuda.h"

#include <algorithm>

namespace spark {

prefetch_cuda::prefetch_cuda(residency_cuda & residency) : residency(residency) {
    device_guard guard(residency.device.ordinal);
    int32_t n_expert = 0;
    for (const auto & layer : residency.store.layers) {
        n_expert = std::max(n_expert, layer->file.n_expert);
    }
    states  = cuda_array<ring_state>(residency.store.layers.size(), /*is_pinned =*/ false);
    scores  = cuda_array<float>(TOKENS_MAX * (size_t) n_expert, /*is_pinned =*/ false);
    arrived = cuda_array<uint32_t>(1, /*is_pinned =*/ false);
    check(cudaEventCreateWithFlags(&reached, cudaEventDisableTiming), "cannot create an event");
    check(cudaEventCreateWithFlags(&ready,   cudaEventDisableTiming), "cannot create an event");
    check(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking), "cannot create a stream");
}

prefetch_cuda::~prefetch_cuda() {
    cudaStreamSynchronize(side);
    cudaStreamDestroy(side);
    cudaEventDestroy(reached);
    cudaEventDestroy(ready);
}

void prefetch_cuda::place(size_t budget) {
    device_guard guard(residency.device.ordinal);
    n_bytes = 0;
    for (auto & m : memory) {
        m.clear();
    }
    std::vector<ring_state> host(residency.store.layers.size());

    size_t n_tensors = 0;
    bool   is_possible = true;
    for (const auto & layer : residency.store.layers) {
        n_tensors = std::max(n_tensors, layer->stacks.size());
        is_possible &= layer->is_quantized; // see expert_store::load_device
        for (const auto & stack : layer->stacks) {
            is_possible &= stack->tensor->stride % sizeof(uint4) == 0 && layer->stacks.size() <= RING_TENSORS_MAX;
        }
    }
    std::vector<size_t> sizes(n_tensors, 0);
    size_t total = 0;
    for (size_t i = 0; i < n_tensors; i++) {
        for (const auto & layer : residency.store.layers) {
            if (i < layer->stacks.size()) {
                sizes[i] = std::max(sizes[i], residency.memory(*layer, i).shared_bytes(RING_MAX));
            }
        }
        total += 2 * ((sizes[i] + residency.device.page - 1) / residency.device.page * residency.device.page);
    }
    const bool has_home = std::any_of(residency.store.layers.begin(), residency.store.layers.end(), [](const auto & l) { return l->n_fast < l->file.n_expert; });
    if (is_possible && has_home && total <= budget) {
        for (auto & m : memory) {
            for (size_t size : sizes) {
                m.push_back(std::make_shared<physical_memory>(residency.device, size, /*is_host =*/ false));
                n_bytes += m.back()->size;
            }
        }
        for (const auto & layer : residency.store.layers) {
            ring_state & state = host[layer->index];
            int32_t first = 0;
            for (size_t i = 0; i < layer->stacks.size(); i++) {
                first = std::max(first, residency.memory(*layer, i).first_shared());
            }
            for (size_t i = 0; i < layer->stacks.size(); i++) {
                residency.memory(*layer, i).map_shared(memory[layer->index % 2][i], first);
                state.base[i]   = (char *) residency.memory(*layer, i).base();
                state.stride[i] = layer->stacks[i]->tensor->stride;
            }
            state.n_tensors  = (int32_t) layer->stacks.size();
            state.first_slot = first;
            state.home_slot  = layer->home_slot;
            state.n_slots    = RING_MAX;
        }
    }
    check(cudaMemcpy(states.get(), host.data(), states.bytes(), cudaMemcpyHostToDevice), "cannot send the ring's slots");
}

bool prefetch_cuda::wants(const device_site & site, const device_site & next, int64_t n_used, int64_t n_tokens) const {
    const router_tensors & r = next.router;
    return n_bytes > 0 && site.context == 0 && n_tokens <= TOKENS_MAX && n_used * n_tokens <= 64 && r.weight && next.layer->n_fast < next.layer->file.n_expert &&
        r.weight->type == GGML_TYPE_F32 && ggml_is_contiguous(r.weight) && r.weight->ne[1] == next.layer->file.n_expert &&
        (!r.bias || (r.bias->type == GGML_TYPE_F32 && r.bias->ne[0] == next.layer->file.n_expert));
}

void prefetch_cuda::begin(const device_site & next, const ggml_tensor * input, cudaStream_t stream) {
    cudaEventRecord(reached, stream);
    cudaStreamWaitEvent(side, reached, 0);
    predict_params p;
    p.input      = (const char *) input->data;
    p.nb1        = input->nb[1];
    p.n_tokens   = (int32_t) input->ne[1];
    p.n_embd     = (int32_t) input->ne[0];
    p.router     = (const float *) next.router.weight->data;
    p.bias       = next.router.bias ? (const float *) next.router.bias->data : nullptr;
    p.is_sigmoid = next.router.is_sigmoid;
    p.n_expert   = next.layer->file.n_expert;
    p.n_used     = next.layer->n_used;
    p.table      = residency.device_table(*next.layer);
    p.scores     = scores.get();
    p.arrived    = arrived.get();
    p.ring       = states.get() + next.layer->index;
    p.counters   = residency.device_counters(*next.layer);
    launch_prefetch(p, side);
    cudaEventRecord(ready, side);
}

void prefetch_cuda::join(cudaStream_t stream) {
    cudaStreamWaitEvent(stream, ready, 0);
}

ring_view prefetch_cuda::ring(const layer_state & layer) const {
    return { states.get() + layer.index };
}

} // namespace spark
