#include "stager_cuda.h"

#include "expert_store.h"
#include "residency_cuda.h"

#include <algorithm>

namespace spark {

// A step with this many selections for each expert of a layer uses nearly all of them.
static constexpr int64_t IDS_PER_EXPERT = 4;

stager_cuda::stager_cuda(residency_cuda & residency) : residency(residency), slots(residency) {
    device_guard guard(residency.device.ordinal);
    check(cudaEventCreateWithFlags(&reached, cudaEventDisableTiming), "cannot create an event");
    check(cudaEventCreateWithFlags(&left,    cudaEventDisableTiming), "cannot create an event");
    for (buffer & b : buffers) {
        check(cudaEventCreateWithFlags(&b.ready, cudaEventDisableTiming), "cannot create an event");
    }
    check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "cannot create a stream");
}

stager_cuda::~stager_cuda() {
    cudaStreamSynchronize(copies);
    cudaStreamDestroy(copies);
    cudaEventDestroy(reached);
    cudaEventDestroy(left);
    for (buffer & b : buffers) {
        cudaEventDestroy(b.ready);
    }
}

void stager_cuda::place(size_t budget) {
    device_guard guard(residency.device.ordinal);
    std::lock_guard<std::mutex> lock(mutex);
    slots.release();
    for (buffer & b : buffers) {
        b.layer = -1;
    }
    owner = -1;
    first_slots.clear();

    int32_t wanted = 0;
    for (const auto & layer : residency.store.layers) {
        wanted = std::max(wanted, layer->file.n_expert - layer->n_fast);
        if (layer->file.n_expert > STAGED_MAX || layer->home_slot > INT16_MAX) {
            wanted = 0;
            break;
        }
    }
    capacity = 0;
    for (int32_t low = 0, high = wanted; low < high;) { // the most that fits
        const int32_t middle = (low + high + 1) / 2;
        if (slots.bytes_for(middle) <= budget) {
            capacity = low = middle;
        } else {
            high = middle - 1;
        }
    }
    if (capacity > 0) {
        first_slots = slots.allocate(capacity);
    }
}

bool stager_cuda::wants(const layer_state & layer, int64_t n_ids) const {
    return capacity > 0 && layer.n_fast < layer.file.n_expert && n_ids >= IDS_PER_EXPERT * layer.file.n_expert;
}

// Enqueues the copies of the layer's experts that have no fast slot now, on `copies`.
void stager_cuda::stage(layer_state & layer, buffer & target) {
    std::vector<int32_t> cold;
    {
        std::lock_guard<std::mutex> lock(layer.mutex);
        for (int32_t e = 0; e < layer.file.n_expert; e++) {
            if (layer.slot_of[e] < 0) {
                cold.push_back(e);
            }
        }
        if ((int32_t) cold.size() > capacity) { // the rest is read in place
            std::nth_element(cold.begin(), cold.begin() + capacity, cold.end(), [&](int32_t a, int32_t b) {
                return layer.policy.score(a) > layer.policy.score(b);
            });
            cold.resize(capacity);
            std::sort(cold.begin(), cold.end());
        }
        layer.stats.bytes_ahead += cold.size() * layer.file.expert_bytes;
    }
    std::fill_n(target.slots.slot, layer.file.n_expert, (int16_t) -1);
    const int32_t first = first_slots[layer.index];
    for (size_t i = 0; i < cold.size(); i++) {
        target.slots.slot[cold[i]] = (int16_t) (first + (int32_t) i);
    }
    // neighbours in the file are neighbours in the staging slots: one copy
    for (size_t begin = 0; begin < cold.size();) {
        size_t end = begin + 1;
        while (end < cold.size() && cold[end] == cold[end - 1] + 1) {
            end++;
        }
        for (const auto & stack : layer.stacks) {
            char * base = stack->memory->base();
            const size_t stride = stack->tensor->stride;
            cudaMemcpyAsync(base + (size_t) (first + begin) * stride, base + (size_t) (layer.home_slot + cold[begin]) * stride,
                (end - begin) * stride, cudaMemcpyDefault, copies);
        }
        begin = end;
    }
    cudaEventRecord(target.ready, copies);
    target.layer = layer.index;
}

bool stager_cuda::reach(layer_state & layer, int32_t context, cudaStream_t stream, staged_slots & out) {
    std::lock_guard<std::mutex> lock(mutex);
    if (owner >= 0 && owner != context) {
        return false;
    }
    if (owner < 0) {
        buffers[0].layer = buffers[1].layer = -1; // experts have moved since
        if (has_run) {
            cudaStreamWaitEvent(copies, left, 0);
        }
    }
    owner = context;

    // When the stream comes here, all layers before are done with their staging slots.
    cudaEventRecord(reached, stream);
    cudaStreamWaitEvent(copies, reached, 0);
    buffer & mine = buffers[layer.index % 2];
    if (mine.layer != layer.index) {
        stage(layer, mine);
    }
    out = mine.slots;
    cudaStreamWaitEvent(stream, mine.ready, 0);
    if ((size_t) layer.index + 1 < residency.store.layers.size()) {
        layer_state & next = *residency.store.layers[layer.index + 1];
        if (next.n_fast < next.file.n_expert) {
            stage(next, buffers[next.index % 2]);
        }
    }
    return true;
}

void stager_cuda::finish(int32_t context, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex);
    if (owner == context) {
        cudaEventRecord(left, stream);
        has_run = true;
        owner   = -1;
    }
}

bool stager_cuda::is_busy() {
    std::lock_guard<std::mutex> lock(mutex);
    return owner >= 0 || (has_run && cudaEventQuery(left) == cudaErrorNotReady);
}

} // namespace spark
