#include "swap_engine.h"

#include "expert_store.h"

#include <algorithm>
#include <chrono>
#include <random>

namespace spark {

static constexpr size_t QUEUE_MAX = 1024; // misses; more than a few steps of them are out of date anyway

swap_engine::swap_engine(expert_store & store) : store(store) {
    thread = std::thread([this] {
        if (this->store.policy == SPARK_POLICY_CHAOS) {
            run_chaos();
        } else {
            work();
        }
    });
}

swap_engine::~swap_engine() {
    stop();
}

void swap_engine::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
        queue.clear();
    }
    has_work.notify_all();
    is_idle.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

void swap_engine::log_miss(int32_t layer_index, int32_t expert) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (queue.size() >= QUEUE_MAX) {
            return;
        }
        queue.push_back({ layer_index, expert });
    }
    has_work.notify_one();
}

bool swap_engine::wait_idle(int32_t timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex);
    return is_idle.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return queue.empty() && !busy; });
}

void swap_engine::work() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        has_work.wait(lock, [&] { return stopping || !queue.empty(); });
        if (stopping) {
            return;
        }
        const miss m = queue.front();
        queue.pop_front();
        busy = true;
        lock.unlock();

        // a step that waits for the disk goes first; bounded, so that a long prefill still learns
        for (int i = 0; i < 20 && store.foreground_reads.load(std::memory_order_relaxed) > 0; i++) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        promote(m);

        lock.lock();
        busy = false;
        if (queue.empty()) {
            is_idle.notify_all();
        }
    }
}

void swap_engine::promote(const miss & m) {
    layer_state & layer = *store.layers[m.layer_index];
    int32_t slot;
    if (store.retire(layer, m.expert, /*force =*/ false, slot)) {
        store.fill(layer, m.expert, slot);
    }
}

// Random promotions and evictions without end; only outputs that depend on placement would notice.
void swap_engine::run_chaos() {
    std::mt19937_64 random(store.seed);
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopping) {
        queue.clear();
        lock.unlock();

        layer_state & layer = *store.layers[random() % store.layers.size()];
        const int32_t expert = (int32_t) (random() % layer.file.n_expert);
        if (random() % 4 == 0) {
            store.evict(layer, expert);
        } else {
            int32_t slot;
            if (store.retire(layer, expert, /*force =*/ true, slot)) {
                store.fill(layer, expert, slot);
            }
        }
        const auto pause = std::chrono::microseconds(random() % 200);

        lock.lock();
        has_work.wait_for(lock, pause, [&] { return stopping; });
    }
}

} // namespace spark
