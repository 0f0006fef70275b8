// The thread that moves experts between the slots of a device: reads what the device has counted, decides with the
// layers' policies, and copies on its own stream. Steps never wait for it; it waits for them.
#pragma once

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace spark {

class residency_cuda;
struct layer_state;

class swap_engine_cuda {
public:
    explicit swap_engine_cuda(residency_cuda & residency); // paused
    ~swap_engine_cuda();
    swap_engine_cuda(const swap_engine_cuda &) = delete;
    swap_engine_cuda & operator=(const swap_engine_cuda &) = delete;

    // No expert moves between pause and resume; pause waits for moves under way. Counters are read all the same.
    void pause();
    void resume();
    // Reads the counters now, in the calling thread.
    void poll();
    // False when experts still moved after timeout_ms. The chaos policy is never idle.
    bool wait_idle(int32_t timeout_ms);

private:
    struct move {
        layer_state * layer;
        int32_t expert;
        int32_t slot;
        int32_t victim; // leaves the slot, or -1
    };

    void work();
    bool collect(); // true when steps have run since
    void choose(std::vector<move> & moves);
    void choose_at_random(std::vector<move> & moves);
    void perform(const std::vector<move> & moves);

    residency_cuda & residency;
    std::mt19937_64 random;
    double credit = 0; // bytes that may be copied now

    std::mutex collect_mutex;
    std::mutex mutex;
    std::condition_variable wake;
    std::condition_variable settled;
    bool stopping = false;
    bool paused   = true;
    bool moving   = false;
    uint64_t n_quiet = 0; // rounds in a row without a move, after the counters were read
    std::thread thread;
};

} // namespace spark
