// Brings the experts of large steps to the device ahead of their layer: while layer i computes, the experts of layer i+1
// that have no fast slot are copied into staging slots, by the copy engine, at PCIe speed. Two sets of staging memory
// take turns; every stack of the store maps one of them behind its fast slots.
#pragma once

#include "route_cuda.h"
#include "shared_slots_cuda.h"

#include <mutex>
#include <vector>

namespace spark {

class residency_cuda;
struct layer_state;

class stager_cuda {
public:
    explicit stager_cuda(residency_cuda & residency);
    ~stager_cuda();

    // Allocates staging for at most `budget` bytes of device memory, less when less is needed; no step runs.
    void place(size_t budget);
    // True when a step of this size should be staged: it uses about every expert.
    bool wants(const layer_state & layer, int64_t n_ids) const;
    // The step on `stream` has come to `layer`: its staged experts are there when the stream goes on, and the next
    // layer's are on their way. False: not now, another context is staging. Called while the graph is enqueued.
    bool reach(layer_state & layer, int32_t context, cudaStream_t stream, staged_slots & out);
    // The step of `context` has enqueued its last layer.
    void finish(int32_t context, cudaStream_t stream);
    // A staged step is running: leave PCIe to it.
    bool is_busy();

private:
    struct buffer {
        int32_t      layer = -1; // whose experts are in it
        staged_slots slots;
        cudaEvent_t  ready = nullptr;
    };
    void stage(layer_state & layer, buffer & target);

    residency_cuda & residency;
    shared_slots_cuda slots;
    std::mutex mutex;
    buffer  buffers[2];
    std::vector<int32_t> first_slots; // [n_layers]
    int32_t capacity  = 0;            // experts of a layer
    int32_t owner     = -1;           // context whose step is being enqueued
    bool    has_run   = false;
    cudaEvent_t  reached = nullptr;   // the stream has come to the layer
    cudaEvent_t  left    = nullptr;   // the last staged step has read its last staging slot
    cudaStream_t copies  = nullptr;
};

} // namespace spark
