// Where every expert of one model is: slots, residency tables, and their life cycle. Threads that compute call acquire
// and release; the swap engine calls retire, publish and cancel. Locks: one per layer, never two at once; `users` and
// the list of contexts have their own.
#pragma once

#include "device.h"
#include "expert_hook.h"
#include "expert_reader.h"
#include "model_file.h"
#include "residency_policy.h"
#include "routing_stats.h"
#include "stack_memory.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace spark {

class expert_store;
class swap_engine;
struct layer_state;

// Slots a context reads in the layer it computes now, so that nobody overwrites them. A context computes one graph at a
// time, so its lease needs no lock.
struct context_lease {
    layer_state * layer = nullptr;
    std::vector<int32_t> slots; // fast slots in use
    std::vector<int32_t> homes; // experts read in place whose memory is given back on release

    // scratch of acquire, kept so that a step allocates nothing
    std::vector<int32_t>  uses;     // [n_expert] of the largest layer
    std::vector<int32_t>  distinct;
    std::vector<int32_t>  missing;
    std::vector<int32_t>  targets;
    std::vector<int32_t>  victims;
    std::vector<read_job> jobs;
};

// What a routed node of a graph knows: its layer, and the context that computes it.
struct route_site {
    expert_store  * store = nullptr;
    layer_state   * layer = nullptr;
    context_lease * lease = nullptr;
};

// An expert tensor with its stack; `hook` is what the tensor's `extra` points to.
struct expert_stack {
    spark_expert_hook hook = {};
    expert_store * store = nullptr;
    layer_state  * layer = nullptr;
    const expert_tensor * tensor = nullptr;
    bool ends_graph = false; // the last expert matrix that a graph reads
    std::unique_ptr<stack_memory> memory; // while a model is loaded
};

struct layer_state {
    layer_state(const expert_layer & file, int32_t index) : file(file), index(index), policy(file.n_expert), stats(file.n_expert) {}

    enum : int32_t { SLOT_FREE = -1, SLOT_BUSY = -2 };

    const expert_layer & file;
    const int32_t index;       // in expert_store::layers
    int32_t home_slot = 0;     // of expert 0
    std::atomic<int32_t> n_used = 0; // experts that a token selects; written by every context that builds a graph
    bool    ends_graph    = false; // no graph goes on to the next layer
    bool    is_quantized  = true;  // all matrices
    bool    is_unrouted   = false; // graphs read the stack through expert ids: every expert is in the slot of its number
    std::vector<std::unique_ptr<expert_stack>> stacks; // one per tensor of the file

    // plan
    int32_t n_fast = 0;
    std::vector<int32_t> initial;
    int32_t n_pinned = 0;
    std::vector<double> hotness; // [n_expert] uses that the policy begins with; empty: none

    // residency; all below is protected by `mutex`
    mutable std::mutex mutex;
    std::condition_variable slot_released;
    std::vector<int32_t> slot_of;   // [n_expert] fast slot, or -1: read from home
    std::vector<int32_t> expert_in; // [n_fast] expert, SLOT_FREE, or SLOT_BUSY: being emptied or filled
    std::vector<int32_t> readers;   // [n_fast] leases on the slot
    std::vector<bool>    pinned;    // [n_expert]
    int32_t n_resident = 0;
    bool    has_run    = false;     // a step has reached the layer since loading
    residency_policy policy;
    routing_stats    stats;
};

struct store_options {
    std::string path;
    int32_t n_io_threads = 8;
    bool    direct_io    = true;
    bool    lock_fast    = true;
    std::string device;         // ggml's name of the device whose memory holds the fast slots ("CUDA0"); empty: RAM
};

class expert_store : public std::enable_shared_from_this<expert_store> {
public:
    explicit expert_store(const store_options & options);
    ~expert_store();

    const store_options options;
    model_file    file;
    expert_reader reader;
    std::vector<std::unique_ptr<layer_state>> layers; // in block order
    spark_policy policy = SPARK_POLICY_FREQUENCY;
    uint64_t     seed   = 0;
    std::atomic<int32_t> foreground_reads { 0 }; // steps that wait for the disk now
    int64_t      staging_bytes = -1; // device memory for staging large steps; -1: all they want
    std::unique_ptr<device_residency> device; // or nullptr: fast slots are in RAM

    // Plan; throws error INVALID_ARGUMENT or BAD_STATE, and then nothing has changed.
    void set_plan(const spark_plan & plan);
    // The same while a model is loaded: fast slots change their number and experts. On a device running steps are waited
    // for; in RAM none may run, and experts that the plan keeps stay where they are. Throws error INVALID_ARGUMENT,
    // BAD_STATE (nothing changed), OUT_OF_MEMORY (device: every expert is read from home then; RAM: some layers are placed).
    void place(const spark_plan & plan);

    // A buffer of this store's type is allocated / freed. The first allocates the stacks and reads the initial experts,
    // the last gives everything back. Throws error OUT_OF_MEMORY, IO.
    void attach();
    void detach();
    bool is_loaded() const;

    // The stack of a tensor by name; nullptr when it is none of ours.
    expert_stack * find_stack(const char * name);

    // For graphs; `context` identifies the context that computes.
    route_site * site_for(layer_state & layer, const void * context);
    device_site * device_site_for(layer_state & layer, const void * context);

    // A step of `lease`'s context reaches `layer` with ids [n_used, n_tokens] at byte strides nb0, nb1. Writes the slot of
    // each to out (packed), and holds these slots until the next acquire or release of the same lease.
    void acquire(layer_state & layer, context_lease & lease, const char * ids, int64_t n_used, int64_t n_tokens, size_t nb0, size_t nb1, int32_t * out);
    void release(context_lease & lease);

    // Swap engine. Takes a slot for `expert` (out of any, or of `victim`'s), false when there is none worth it.
    // The slot is busy afterwards and nobody reads it.
    bool retire(layer_state & layer, int32_t expert, bool force, int32_t & slot);
    // Reads `expert` into a busy slot and publishes it, or frees the slot when the expert has arrived another way.
    void fill(layer_state & layer, int32_t expert, int32_t slot);
    // Tests (chaos): a resident expert that is not pinned leaves its slot; false when it cannot leave now.
    bool evict(layer_state & layer, int32_t expert);

    // The swap engine while a model is loaded and experts may move, else nullptr; shared, so that it outlives the caller's use.
    std::shared_ptr<swap_engine> swaps() const;

    // Counters that a device holds become visible in layer_stats.
    void update_stats() const;
    spark_stats layer_stats(int32_t index) const;
    device_residency::step_counts step_counts() const;
    // False when experts still moved after timeout_ms.
    bool wait_idle(int32_t timeout_ms) const;

private:
    void load();
    void load_ram();
    void load_device();
    void unload();
    struct checked_layer;
    std::vector<checked_layer> check_plan(const spark_plan & plan) const;
    void apply(const spark_plan & plan, std::vector<checked_layer> checked);
    void place_ram(const spark_plan & plan, std::vector<checked_layer> checked);
    void place_layer(layer_state & layer, checked_layer & checked);
    void fill_free_slots(layer_state & layer, const std::vector<int32_t> & experts);
    void start_engine();
    void stop_engine();
    void add_jobs(layer_state & layer, int32_t expert, int32_t slot, std::vector<read_job> & jobs) const;
    void check_jobs(const layer_state & layer, const std::vector<read_job> & jobs) const;
    void choose_targets(layer_state & layer, context_lease & lease);
    void read_missing(layer_state & layer, context_lease & lease);
    void leave_slot(layer_state & layer, int32_t slot, int32_t next_state);
    void enter_slot(layer_state & layer, int32_t expert, int32_t slot);

    struct context_state {
        context_lease lease;
        std::vector<route_site>  sites;        // [n_layers], RAM
        std::vector<device_site> device_sites; // [n_layers], device
        int32_t number      = 0;               // in order of appearance
        int32_t first_layer = INT32_MAX;       // the lowest that a graph of this context routes
    };

    mutable std::mutex users_mutex;
    int32_t n_users = 0;

    std::mutex contexts_mutex;
    std::unordered_map<const void *, std::unique_ptr<context_state>> contexts;

    std::shared_ptr<swap_engine> engine;
    struct ggml_context * stack_tensors = nullptr;
};

} // namespace spark
