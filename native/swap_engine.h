// The thread that moves experts between steps: takes logged misses, retires a slot, reads the expert into it, publishes
// it. It waits for readers of a slot, never the other way round, and it yields to steps that wait for the disk.
#pragma once

#include "spark_moe.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

namespace spark {

class expert_store;

class swap_engine {
public:
    explicit swap_engine(expert_store & store);
    ~swap_engine();
    swap_engine(const swap_engine &) = delete;
    swap_engine & operator=(const swap_engine &) = delete;

    // Ends the thread; again is allowed.
    void stop();

    // Logs that a step read `expert` from its home. Bounded: when the queue is full the entry is dropped, and only a
    // promotion is lost. Called with the layer's lock held; never blocks for long.
    void log_miss(int32_t layer_index, int32_t expert);

    // False when there was still work after timeout_ms. The chaos policy is never idle.
    bool wait_idle(int32_t timeout_ms);

private:
    struct miss { int32_t layer_index; int32_t expert; };

    void work();
    void promote(const miss & m);
    void run_chaos();

    expert_store & store;
    std::mutex mutex;
    std::condition_variable has_work;
    std::condition_variable is_idle;
    std::deque<miss> queue;
    bool busy     = false;
    bool stopping = false;
    std::thread thread;
};

} // namespace spark
