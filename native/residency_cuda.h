// Residency on a CUDA device. Three parts: this class owns tables, counters and the life cycle; stager_cuda brings the
// experts of large steps ahead of their layer; swap_engine_cuda moves experts between steps.
//
// The table on the device says where each expert is read now. Steps read it when they run, not when they are enqueued, so
// a step that is replayed from a CUDA graph sees every change. An expert changes slots so:
//   retire: the table points to the home; wait until every step that had started by then has finished; fill; publish.
#pragma once

#include "device.h"
#include "route_cuda.h"
#include "stack_memory_cuda.h"

#include <atomic>
#include <mutex>
#include <vector>

namespace spark {

class prefetch_cuda;
class stager_cuda;
class swap_engine_cuda;

class residency_cuda : public device_residency {
public:
    static constexpr int32_t CONTEXTS_MAX = 256;

    residency_cuda(expert_store & store, ggml_backend_dev_t backend, const cuda_device & device);
    ~residency_cuda() override;

    ggml_backend_dev_t backend_device() const override { return backend; }
    size_t page_size() const override { return device.page; }
    std::unique_ptr<stack_memory> make_stack(const stack_layout & layout) override;
    void start() override;
    void stop() override;
    void pause() override;
    void resume() override;
    void place() override;
    void init_site(device_site & site, layer_state & layer, int32_t context, bool is_first) override;
    bool wants_ahead(const device_site & site, int64_t n_used, int64_t n_tokens) const override;
    bool wait_idle(int32_t timeout_ms) override;
    void update_stats() override;
    step_counts read_steps() override;

    void * reserve(size_t size) override;
    void   use(void * base, size_t begin, size_t end) override;
    void   unreserve(void * base, size_t size) override;
    void   copy(void * dst, const void * src, size_t size) override;
    void   set(void * dst, uint8_t value, size_t size) override;

    // For the swap engine; its stream, its thread or a caller that has stopped it.
    // Sends the table's copy on the host to the device and waits until it is there.
    void upload_table(cudaStream_t stream);
    // An expert enters a slot that holds it, or leaves its slot and is read from home; in the layer and in the table's copy on the
    // host. The caller holds the layer's lock; steps see it after upload_table.
    void enter_slot(layer_state & layer, int32_t expert, int32_t slot);
    void leave_slot(layer_state & layer, int32_t expert);
    // Enqueues the copy of an expert from its home into a slot.
    void copy_to_slot(const layer_state & layer, int32_t expert, int32_t slot, cudaStream_t stream);
    // Waits until every step that had started when this was called has finished; false after timeout_ms.
    bool wait_for_steps(cudaStream_t stream, int32_t timeout_ms);
    struct reads {
        uint64_t n_uses = 0;
        double   bytes  = 0; // of experts that were in no fast slot, read in place or brought ahead
    };
    // Adds what the device has counted since the last call to the layers' stats and policies; returns the sums.
    reads read_counters(cudaStream_t stream);
    // Experts of the layer that steps have used without a fast slot since the last call of this.
    std::vector<int32_t> take_missed(const layer_state & layer);
    bool is_staging();

    const int32_t  * device_table(const layer_state & layer) const;
    layer_counters * device_counters(const layer_state & layer) const;
    stack_memory_cuda & memory(const layer_state & layer, size_t tensor) const;

    expert_store & store;
    const cuda_device device;

private:
    void set_table(const layer_state & layer, int32_t expert, int32_t slot);
    static void enqueue_route(ggml_tensor * node, void * stream);
    static void enqueue_finish(ggml_tensor * node, void * stream);
    static bool is_route_capturable(const ggml_tensor * node);
    static bool is_always_capturable(const ggml_tensor * node);

    const ggml_backend_dev_t backend;
    std::vector<size_t> offsets; // [n_layers] of a layer's experts in tables and counts

    // one allocation, so that one copy brings all counters
    struct counters {
        uint32_t         * counts;   // [sum of n_expert]
        layer_counters   * layers;   // [n_layers]
        context_counters * contexts; // [CONTEXTS_MAX]
    };
    counters counters_in(char * memory) const;
    size_t counters_size() const;

    cuda_array<int32_t> table;        // device
    cuda_array<int32_t> host_table;   // pinned; protected by the layers' locks
    cuda_array<int32_t> sent_table;   // pinned; what upload_table sends
    cuda_array<char>    on_device;    // counters
    cuda_array<char>    on_host;      // pinned copy
    std::vector<char>   last;         // the copy before
    std::vector<std::vector<int32_t>> missed; // [n_layers]; an expert may be named several times
    std::mutex counters_mutex;
    std::atomic<uint64_t> n_enqueued { 0 }; // steps whose last node was enqueued, to run at once or to be recorded

    std::unique_ptr<stager_cuda>      stager;
    std::unique_ptr<prefetch_cuda>    prefetch;
    std::unique_ptr<swap_engine_cuda> engine;

    struct reserved;
    std::vector<std::unique_ptr<reserved>> others; // LoRA pairs
};

} // namespace spark
