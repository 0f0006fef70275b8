#include "prefetch_cuda.h"

#include "expert_store.h"
#include "residency_cuda.h"

#include <algorithm>

namespace spark {

prefetch_cuda::prefetch_cuda(residency_cuda & residency) : residency(residency), slots(residency) {
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
    slots.release();
    std::vector<ring_state> host(residency.store.layers.size());

    bool is_possible = true, has_home = false;
    for (const auto & layer : residency.store.layers) {
        has_home    |= layer->n_fast < layer->file.n_expert;
        is_possible &= layer->is_quantized; // see expert_store::load_device
        for (const auto & stack : layer->stacks) {
            is_possible &= stack->tensor->stride % sizeof(uint4) == 0 && layer->stacks.size() <= RING_TENSORS_MAX;
        }
    }
    if (is_possible && has_home && slots.bytes_for(RING_MAX) <= budget) {
        const std::vector<int32_t> first_slots = slots.allocate(RING_MAX);
        for (const auto & layer : residency.store.layers) {
            ring_state & state = host[layer->index];
            for (size_t i = 0; i < layer->stacks.size(); i++) {
                state.base[i]   = layer->stacks[i]->memory->base();
                state.stride[i] = layer->stacks[i]->tensor->stride;
            }
            state.n_tensors  = (int32_t) layer->stacks.size();
            state.first_slot = first_slots[layer->index];
            state.home_slot  = layer->home_slot;
            state.n_slots    = RING_MAX;
        }
    }
    check(cudaMemcpy(states.get(), host.data(), states.bytes(), cudaMemcpyHostToDevice), "cannot send the ring's slots");
}

bool prefetch_cuda::wants(const device_site & site, const device_site & next, int64_t n_used, int64_t n_tokens) const {
    const router_tensors & r = next.router;
    return slots.bytes() > 0 && site.context == 0 && n_tokens <= TOKENS_MAX && n_used * n_tokens <= 64 && r.weight && next.layer->n_fast < next.layer->file.n_expert &&
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
    p.n_used     = next.layer->n_used.load(std::memory_order_relaxed);
    p.table      = residency.device_table(*next.layer);
    p.scores     = scores.get();
    p.arrived    = arrived.get();
    p.ring       = states.get() + next.layer->index;
    p.counters   = residency.device_counters(*next.layer);
    launch_prefetch(p, side);
    cudaEventRecord(ready, side);
}

const ring_state * prefetch_cuda::join(const layer_state & layer, cudaStream_t stream) {
    cudaStreamWaitEvent(stream, ready, 0);
    return states.get() + layer.index;
}

} // namespace spark
