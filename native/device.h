// The seam between the store and a GPU: memory of the stacks, the nodes that route on the device, and the thread that
// moves experts between its slots. The store knows nothing else of the device; a build without CUDA has none.
#pragma once

#include "expert_hook.h"
#include "spark_moe.h"
#include "stack_memory.h"

#include <cstdint>
#include <memory>
#include <string>

namespace spark {

class expert_store;
struct layer_state;

// What selects the experts of a layer, as far as it was recognised in a graph; weights live as long as the model.
struct router_tensors {
    struct ggml_tensor * weight = nullptr; // [n_embd, n_expert]
    struct ggml_tensor * bias   = nullptr; // [n_expert], added before the selection
    bool is_sigmoid = false;
};

// What a routed node and the finishing node of one layer in one context know; `extra` of the nodes points to the ops.
struct device_site {
    struct node {
        spark_device_op op; // first, so that the node is found from the op
        device_site   * site;
    };
    node route_node;
    node finish_node;
    class device_residency * device = nullptr;
    layer_state * layer   = nullptr;
    int32_t       context = 0;     // number of the context, for its counters
    bool          is_first = false; // the first routed layer of the graphs of this context
    device_site * next     = nullptr; // of the layer after this in the same context; nullptr for the last
    router_tensors router;            // as last seen
    // while a graph is built: the next layer's experts are being brought from this input
    struct ggml_context * ahead_graph = nullptr;
    struct ggml_tensor  * ahead_input = nullptr;
};

class device_residency {
public:
    virtual ~device_residency() = default;

    virtual ggml_backend_dev_t backend_device() const = 0;
    // Slots and homes begin at multiples of this, bytes.
    virtual size_t page_size() const = 0;
    virtual std::unique_ptr<stack_memory> make_stack(const stack_layout & layout) = 0;

    // The stacks exist and the homes hold the experts: allocates tables and counters. Experts are read from home.
    virtual void start() = 0;
    // Ends the thread and frees what start allocated; no graph runs any more.
    virtual void stop() = 0;

    // No expert moves between pause and place or resume.
    virtual void pause() = 0;
    virtual void resume() = 0;
    // Fast slots as the plan has them now, with their initial experts; then experts may move. Waits for running steps.
    virtual void place() = 0;

    // For graphs. `site` keeps its address as long as the model is loaded.
    virtual void init_site(device_site & site, layer_state & layer, int32_t context, bool is_first) = 0;
    // Whether a step of this size should bring experts of the next layer while it computes this one.
    virtual bool wants_ahead(const device_site & site, int64_t n_used, int64_t n_tokens) const = 0;

    // False when there was still work after timeout_ms.
    virtual bool wait_idle(int32_t timeout_ms) = 0;
    // Brings the layers' counters up to date with what the device has counted.
    virtual void update_stats() = 0;
    // Steps computed since loading, and how many of them replayed a recorded graph.
    struct step_counts {
        uint64_t steps    = 0;
        uint64_t replayed = 0;
    };
    virtual step_counts read_steps() = 0;

    // Memory of buffers that llama.cpp allocates among the experts (LoRA pairs).
    virtual void * reserve(size_t size) = 0;
    virtual void   use(void * base, size_t begin, size_t end) = 0; // bytes from base; becomes readable and writable
    virtual void   unreserve(void * base, size_t size) = 0;
    virtual void   copy(void * dst, const void * src, size_t size) = 0; // any direction
    virtual void   set(void * dst, uint8_t value, size_t size) = 0;
};

// The device called `name` by ggml ("CUDA0"). Throws error INVALID_ARGUMENT: there is none, or this build has no CUDA.
std::unique_ptr<device_residency> make_device_residency(expert_store & store, const std::string & name);

// The index-th device. Throws error INVALID_ARGUMENT: there is none.
spark_device_info read_device_info(int32_t index);

struct device_memory {
    size_t total = 0; // bytes
    size_t free  = 0; // bytes, for all processes
};

// Throws error INVALID_ARGUMENT as above.
device_memory read_device_memory(const std::string & name);

} // namespace spark
