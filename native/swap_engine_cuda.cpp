#include "swap_engine_cuda.h"

#include "expert_store.h"
#include "residency_cuda.h"
#include "stager_cuda.h"

#include <algorithm>
#include <chrono>

namespace spark {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds POLL_BUSY { 2 };  // about one step
constexpr milliseconds POLL_IDLE { 50 };
constexpr size_t MOVES_MAX = 64;         // at once
// Bytes copied for each byte of experts that steps have missed. Both share PCIe: more would slow down the steps that the
// copies are for.
constexpr double COPIES_PER_READ = 1.0;
constexpr double CREDIT_MAX      = 256e6; // bytes
constexpr int32_t STEP_TIMEOUT_MS = 5000; // a step that takes longer has been aborted

} // namespace

swap_engine_cuda::swap_engine_cuda(residency_cuda & residency) : residency(residency), random(residency.store.seed) {
    thread = std::thread([this] { work(); });
}

swap_engine_cuda::~swap_engine_cuda() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    wake.notify_all();
    settled.notify_all();
    thread.join();
}

void swap_engine_cuda::pause() {
    std::unique_lock<std::mutex> lock(mutex);
    paused = true;
    settled.wait(lock, [&] { return !moving; });
}

void swap_engine_cuda::resume() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        paused  = false;
        n_quiet = 0;
    }
    wake.notify_all();
}

void swap_engine_cuda::poll() {
    device_guard guard(residency.device.ordinal);
    collect();
}

bool swap_engine_cuda::wait_idle(int32_t timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex);
    if (paused) {
        return true;
    }
    n_quiet = 0;
    wake.notify_all();
    return settled.wait_for(lock, milliseconds(timeout_ms), [&] { return n_quiet >= 2 || stopping; });
}

void swap_engine_cuda::work() {
    std::vector<move> moves;
    milliseconds pause_for = POLL_IDLE;
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopping) {
        wake.wait_for(lock, pause_for);
        if (stopping) {
            return;
        }
        const bool may_move = !paused;
        moving = may_move;
        lock.unlock();
        bool is_active = false;
        moves.clear();
        try {
            device_guard guard(residency.device.ordinal);
            is_active = collect();
            if (may_move) {
                if (residency.store.policy == SPARK_POLICY_CHAOS) {
                    choose_at_random(moves);
                    is_active = true;
                } else if (residency.store.policy == SPARK_POLICY_FREQUENCY) {
                    choose(moves);
                }
                perform(moves);
            }
        } catch (const std::exception & e) {
            log(log_level::error, "experts do not move any more: %s", e.what());
            lock.lock();
            paused = true;
            moving = false;
            settled.notify_all();
            continue;
        }
        lock.lock();
        moving  = false;
        n_quiet = moves.empty() ? n_quiet + 1 : 0;
        settled.notify_all();
        pause_for = is_active || !moves.empty() ? POLL_BUSY : POLL_IDLE;
    }
}

bool swap_engine_cuda::collect() {
    std::lock_guard<std::mutex> lock(collect_mutex);
    const residency_cuda::reads reads = residency.read_counters(cudaStreamPerThread);
    credit = std::min(credit + COPIES_PER_READ * reads.bytes, CREDIT_MAX);
    return reads.n_uses > 0;
}

void swap_engine_cuda::choose(std::vector<move> & moves) {
    if (residency.is_staging()) {
        return; // PCIe is the large step's
    }
    std::lock_guard<std::mutex> collect_lock(collect_mutex); // credit
    struct candidate { layer_state * layer; int32_t expert; double score; };
    std::vector<candidate> candidates;
    for (const auto & layer : residency.store.layers) {
        const std::vector<int32_t> missed = residency.take_missed(*layer);
        std::lock_guard<std::mutex> lock(layer->mutex);
        if (layer->n_fast == 0 || layer->n_fast >= layer->file.n_expert) {
            continue;
        }
        for (int32_t e : missed) {
            if (layer->slot_of[e] < 0) {
                candidates.push_back({ layer.get(), e, layer->policy.score(e) / layer->policy.unit() });
            }
        }
    }
    std::sort(candidates.begin(), candidates.end(), [](const candidate & a, const candidate & b) { return a.score > b.score; });

    std::vector<int32_t> victims;
    for (const candidate & c : candidates) {
        if (moves.size() >= MOVES_MAX) {
            break;
        }
        layer_state & layer = *c.layer;
        std::lock_guard<std::mutex> lock(layer.mutex);
        move m = { &layer, c.expert, -1, -1 };
        victims.clear();
        for (int32_t s = 0; s < layer.n_fast && m.slot < 0; s++) {
            if (layer.expert_in[s] == layer_state::SLOT_FREE) {
                m.slot = s;
            } else if (layer.expert_in[s] >= 0 && !layer.pinned[layer.expert_in[s]]) {
                victims.push_back(layer.expert_in[s]);
            }
        }
        if (m.slot < 0) {
            if (credit < (double) layer.file.expert_bytes) {
                continue;
            }
            layer.policy.select_victims(victims, 1);
            if (victims.empty() || !layer.policy.should_replace(c.expert, victims[0])) {
                continue;
            }
            credit  -= (double) layer.file.expert_bytes;
            m.victim = victims[0];
            m.slot   = layer.slot_of[m.victim];
            residency.leave_slot(layer, m.victim);
        }
        layer.expert_in[m.slot] = layer_state::SLOT_BUSY;
        moves.push_back(m);
    }
}

// Random promotions without end; only outputs that depend on placement would notice.
void swap_engine_cuda::choose_at_random(std::vector<move> & moves) {
    for (int i = 0; i < 8; i++) {
        layer_state & layer = *residency.store.layers[random() % residency.store.layers.size()];
        std::lock_guard<std::mutex> lock(layer.mutex);
        const int32_t expert = (int32_t) (random() % layer.file.n_expert);
        if (layer.n_fast == 0 || layer.slot_of[expert] >= 0) {
            continue;
        }
        const int32_t slot = (int32_t) (random() % layer.n_fast);
        const int32_t victim = layer.expert_in[slot];
        const bool is_taken = std::any_of(moves.begin(), moves.end(), [&](const move & m) { return m.layer == &layer && m.expert == expert; });
        if (victim == layer_state::SLOT_BUSY || is_taken || (victim >= 0 && layer.pinned[victim])) {
            continue;
        }
        if (victim >= 0) {
            residency.leave_slot(layer, victim);
        }
        layer.expert_in[slot] = layer_state::SLOT_BUSY;
        moves.push_back({ &layer, expert, slot, victim >= 0 ? victim : -1 });
    }
}

void swap_engine_cuda::perform(const std::vector<move> & moves) {
    if (moves.empty()) {
        return;
    }
    const cudaStream_t stream = cudaStreamPerThread;
    residency.upload_table(stream); // victims are read from home by steps that start now
    if (!residency.wait_for_steps(stream, STEP_TIMEOUT_MS)) {
        for (const move & m : moves) {
            std::lock_guard<std::mutex> lock(m.layer->mutex);
            if (m.victim >= 0) {
                residency.enter_slot(*m.layer, m.victim, m.slot);
            } else {
                m.layer->expert_in[m.slot] = layer_state::SLOT_FREE;
            }
        }
        residency.upload_table(stream);
        return;
    }
    for (const move & m : moves) {
        residency.copy_to_slot(*m.layer, m.expert, m.slot, stream);
    }
    check(cudaStreamSynchronize(stream), "cannot copy experts to the device");
    for (const move & m : moves) {
        std::lock_guard<std::mutex> lock(m.layer->mutex);
        residency.enter_slot(*m.layer, m.expert, m.slot);
        m.layer->stats.promotions++;
        m.layer->stats.evictions  += m.victim >= 0;
        m.layer->stats.bytes_read += m.layer->file.expert_bytes;
    }
    residency.upload_table(stream);
}

} // namespace spark
