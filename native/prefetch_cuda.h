// Brings experts of the next layer to the device while a small step computes this one: the next layer's router, applied to
// this layer's input, says which experts it will probably select; those without a fast slot are copied from their homes
// into a ring slot. Wrong guesses cost PCIe traffic, and what was not guessed is read from its home: results never depend
// on it. Everything is enqueued with the step, so it is recorded into its CUDA graph as a parallel branch.
#pragma once

#include "device.h"
#include "route_cuda.h"
#include "cuda_util.h"
#include "shared_slots_cuda.h"

namespace spark {

class residency_cuda;
struct layer_state;

class prefetch_cuda {
public:
    explicit prefetch_cuda(residency_cuda & residency);
    ~prefetch_cuda();

    // Allocates ring slots for at most `budget` bytes of device memory; no step runs. Behind everything else in the stacks.
    void   place(size_t budget);
    size_t bytes() const { return slots.bytes(); }

    // For building graphs: whether a step of this size at `site` should bring experts of `next`.
    bool wants(const device_site & site, const device_site & next, int64_t n_used, int64_t n_tokens) const;

    // The step on `stream` has been routed at `site` and reads `input` [n_embd, n_tokens] there: brings experts of `next`.
    void begin(const device_site & next, const struct ggml_tensor * input, cudaStream_t stream);
    // The stream waits until the experts brought for `layer` are there. Returns where they are.
    const ring_state * join(const layer_state & layer, cudaStream_t stream);

    static constexpr int32_t TOKENS_MAX = 4; // of a step; larger ones miss too many experts for one layer's time

private:
    residency_cuda & residency;
    shared_slots_cuda slots;

    cuda_array<ring_state> states;  // device, [n_layers]
    cuda_array<float>      scores;  // device, [TOKENS_MAX * n_expert]
    cuda_array<uint32_t>   arrived; // device, [1]
    cudaStream_t side    = nullptr;
    cudaEvent_t  reached = nullptr;
    cudaEvent_t  ready   = nullptr;
};

} // namespace spark
