// The kernels of routed nodes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace spark {

constexpr int32_t STAGED_MAX = 1024; // experts of a layer that can be staged

// Counters of one layer since loading, in device memory; they wrap.
struct layer_counters {
    uint32_t uses;   // (token, expert) selections
    uint32_t misses; // of these, those whose expert was in no fast slot
    uint32_t homes;  // experts read in place from their homes, once per step and expert
    uint32_t staged; // experts read from a staging or ring slot, once per step and expert
    uint32_t copied; // experts copied into ring slots
};

// Steps of one context, in device memory.
struct context_counters {
    uint32_t started;
    uint32_t finished; // the value of `started` when the last finished step began
};

// Slots where staged experts of a layer are, by expert; -1: not staged. Travels as a kernel parameter, so that nothing on the
// host must stay unchanged until the kernel runs.
struct staged_slots {
    int16_t slot[STAGED_MAX];
};

// Ring slots of one layer and the experts in them now, in device memory: steps that are replayed find what place() left.
constexpr int32_t RING_MAX         = 16; // slots
constexpr int32_t RING_TENSORS_MAX = 4;

struct ring_state {
    int32_t n_slots; // 0: none
    int32_t first_slot;
    int32_t home_slot;
    int32_t n_tensors;
    char *  base[RING_TENSORS_MAX];
    size_t  stride[RING_TENSORS_MAX];
    int32_t n_experts;
    int32_t expert[RING_MAX]; // [n_experts]
};

struct route_params {
    const char * ids;    // I32 [n_used, n_tokens] at byte strides nb0, nb1
    int64_t nb0, nb1;
    int32_t n_used;
    int32_t n_tokens;
    int32_t * slots;     // [n_used, n_tokens] packed
    int32_t n_expert;
    int32_t home_slot;   // slots from here on are homes
    const int32_t * table; // [n_expert] slot where each expert is read now
    uint32_t       * counts; // [n_expert] uses of each expert, or NULL
    layer_counters * layer;
    context_counters * context; // NULL, or: this node begins a step
    const ring_state * ring; // experts brought ahead for this layer, or NULL
};

// What guesses the experts of the next layer from this layer's input.
struct predict_params {
    const char * input;  // F32 [n_embd, n_tokens] at byte stride nb1
    int64_t nb1;
    int32_t n_tokens;
    int32_t n_embd;
    const float * router; // [n_embd, n_expert]
    const float * bias;   // [n_expert] or NULL
    bool    is_sigmoid;   // the bias is added to sigmoids, not to logits
    int32_t n_expert;
    int32_t n_used;
    const int32_t * table;
    float    * scores;    // [n_tokens * n_expert]
    uint32_t * arrived;   // 0 between launches
    ring_state * ring;
    layer_counters * counters;
};

void launch_route(const route_params & params, const staged_slots * staged, cudaStream_t stream);
// Guesses, and copies what has no fast slot into the ring.
void launch_prefetch(const predict_params & params, cudaStream_t stream);
void launch_finish(context_counters * context, cudaStream_t stream);

} // namespace spark
