// Residency while steps run: which slot each expert is read from, and how experts change slots under running graphs.
//
// A slot is FREE, holds an expert, or is BUSY. A step holds leases on the slots it reads (readers[slot] > 0). A slot is
// filled only when nobody reads it and no table points to it:
//   retire: the table points to the home again, the slot is BUSY; wait for readers[slot] == 0; fill; publish.
// acquire does the same inside one critical section with slots that have no readers, so it never waits for a reader.
#include "expert_store.h"

#include "status.h"
#include "swap_engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace spark {

void expert_store::add_jobs(layer_state & layer, int32_t expert, int32_t slot, std::vector<read_job> & jobs) const {
    for (const auto & stack : layer.stacks) {
        const expert_tensor & t = *stack->tensor;
        read_job job;
        job.shard  = t.shard;
        job.offset = t.offset + (size_t) expert * t.stride;
        job.size   = t.stride;
        job.dst    = stack->memory->base() + (size_t) slot * t.stride;
        jobs.push_back(job);
    }
}

// The slot gets an expert; the caller holds the layer's lock.
void expert_store::enter_slot(layer_state & layer, int32_t expert, int32_t slot) {
    layer.slot_of[expert] = slot;
    layer.expert_in[slot] = expert;
    layer.n_resident++;
    layer.stats.promotions++;
}

// The expert in the slot is read from home from now on; the caller holds the layer's lock.
void expert_store::leave_slot(layer_state & layer, int32_t slot, int32_t next_state) {
    layer.slot_of[layer.expert_in[slot]] = -1;
    layer.expert_in[slot] = next_state;
    layer.n_resident--;
    layer.stats.evictions++;
}

void expert_store::release(context_lease & lease) {
    layer_state * layer = lease.layer;
    if (!layer) {
        return;
    }
    if (!lease.slots.empty()) {
        {
            std::lock_guard<std::mutex> lock(layer->mutex);
            for (int32_t slot : lease.slots) {
                layer->readers[slot]--;
            }
        }
        layer->slot_released.notify_all();
        lease.slots.clear();
    }
    if (!lease.homes.empty()) {
        // All of them: a fault maps neighbours too. Another context that reads here takes its faults again.
        for (auto & stack : layer->stacks) {
            stack->memory->drop_homes();
        }
        lease.homes.clear();
    }
    lease.layer = nullptr;
}

// Slots for lease.missing, as many as may be taken now, into lease.targets; the caller holds the layer's lock.
void expert_store::choose_targets(layer_state & layer, context_lease & lease) {
    lease.targets.clear();
    if (policy == SPARK_POLICY_STATIC || layer.n_fast == 0 || lease.missing.empty()) {
        return;
    }
    for (int32_t slot = 0; slot < layer.n_fast && lease.targets.size() < lease.missing.size(); slot++) {
        if (layer.expert_in[slot] == layer_state::SLOT_FREE && layer.readers[slot] == 0) {
            lease.targets.push_back(slot);
        }
    }
    // A batch that touches more experts than there are slots must not sweep out what decoding needs.
    const bool fits = lease.distinct.size() <= (size_t) layer.n_fast;
    if (!fits || lease.targets.size() == lease.missing.size()) {
        return;
    }
    std::vector<int32_t> & victims = lease.victims;
    victims.clear();
    for (int32_t slot = 0; slot < layer.n_fast; slot++) {
        const int32_t expert = layer.expert_in[slot];
        if (expert >= 0 && layer.readers[slot] == 0 && !layer.pinned[expert] && lease.uses[expert] == 0) {
            victims.push_back(expert);
        }
    }
    layer.policy.select_victims(victims, lease.missing.size() - lease.targets.size());
    for (int32_t expert : victims) {
        const int32_t slot = layer.slot_of[expert];
        leave_slot(layer, slot, layer_state::SLOT_FREE);
        lease.targets.push_back(slot);
    }
}

// Reads lease.missing: the first into lease.targets, the rest in place. The caller holds the layer's lock; another
// context at the same layer waits, as it would for the same disk.
void expert_store::read_missing(layer_state & layer, context_lease & lease) {
    const auto start = std::chrono::steady_clock::now();
    foreground_reads.fetch_add(1, std::memory_order_relaxed);

    const size_t n_tensors = layer.stacks.size();
    lease.jobs.clear();
    for (size_t i = 0; i < lease.targets.size(); i++) {
        add_jobs(layer, lease.missing[i], lease.targets[i], lease.jobs);
    }
    reader.read(lease.jobs);
    for (size_t i = 0; i < lease.targets.size(); i++) {
        int failed = 0;
        for (size_t j = 0; j < n_tensors; j++) {
            const read_job & job = lease.jobs[i * n_tensors + j];
            if (job.error != 0) {
                failed = job.error;
            } else {
                layer.stats.bytes_read += job.size;
            }
        }
        if (failed == 0) {
            enter_slot(layer, lease.missing[i], lease.targets[i]);
        } else {
            log(log_level::warn, "block %d: reading expert %d failed (%s); it is read through the file mapping instead",
                layer.file.layer, lease.missing[i], failed < 0 ? "unexpected end of the file" : strerror(failed));
        }
    }

    // what got no slot is read in place
    for (int32_t expert : lease.missing) {
        if (layer.slot_of[expert] < 0) {
            lease.homes.push_back(expert);
            layer.stats.misses_home += lease.uses[expert];
            layer.stats.bytes_home  += layer.file.expert_bytes;
        }
    }
    const size_t n_homes = lease.homes.size();
    reader.run(n_homes * n_tensors, [&](size_t i) {
        layer.stacks[i % n_tensors]->memory->prefetch_home(lease.homes[i / n_tensors]);
    });

    foreground_reads.fetch_sub(1, std::memory_order_relaxed);
    layer.stats.read_ns += (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

void expert_store::acquire(layer_state & layer, context_lease & lease, const char * ids, int64_t n_used, int64_t n_tokens, size_t nb0, size_t nb1, int32_t * out) {
    release(lease);

    std::lock_guard<std::mutex> lock(layer.mutex);
    if (!layer.has_run) {
        // loading the other weights has read ahead into the experts between them
        for (auto & stack : layer.stacks) {
            stack->memory->drop_homes();
        }
        layer.has_run = true;
    }
    lease.layer = &layer;
    lease.uses.assign(layer.file.n_expert, 0);
    lease.distinct.clear();
    lease.missing.clear();
    for (int64_t t = 0; t < n_tokens; t++) {
        layer.policy.advance(1); // each token at its place: the end of a prompt says more about what follows than its beginning
        for (int64_t k = 0; k < n_used; k++) {
            int32_t expert;
            memcpy(&expert, ids + t * nb1 + k * nb0, sizeof(expert));
            GGML_ASSERT(expert >= 0 && expert < layer.file.n_expert);
            out[t * n_used + k] = expert;
            layer.policy.record(expert, 1);
            if (lease.uses[expert]++ == 0) {
                lease.distinct.push_back(expert);
            }
        }
    }

    for (int32_t expert : lease.distinct) {
        const int32_t n = lease.uses[expert];
        layer.stats.uses[expert] += n;
        layer.stats.n_uses       += n;
        const int32_t slot = layer.slot_of[expert];
        if (slot >= 0) {
            layer.stats.hits += n;
            layer.readers[slot]++;
            lease.slots.push_back(slot);
        } else {
            layer.stats.misses += n;
            lease.missing.push_back(expert);
        }
    }

    if (!lease.missing.empty()) {
        // the most used first: slots may not be enough for all
        std::sort(lease.missing.begin(), lease.missing.end(), [&](int32_t a, int32_t b) {
            return lease.uses[a] != lease.uses[b] ? lease.uses[a] > lease.uses[b] : a < b;
        });
        choose_targets(layer, lease);
        read_missing(layer, lease);
        for (int32_t expert : lease.missing) {
            const int32_t slot = layer.slot_of[expert];
            if (slot >= 0) {
                layer.readers[slot]++;
                lease.slots.push_back(slot);
            } else if (engine) {
                engine->log_miss(layer.index, expert);
            }
        }
    }

    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        const int32_t slot = layer.slot_of[out[i]];
        out[i] = slot >= 0 ? slot : layer.home_slot + out[i];
    }
}

bool expert_store::retire(layer_state & layer, int32_t expert, bool force, int32_t & slot) {
    std::unique_lock<std::mutex> lock(layer.mutex);
    if (layer.slot_of[expert] >= 0) {
        return false;
    }
    std::vector<int32_t> candidates;
    for (int32_t s = 0; s < layer.n_fast; s++) {
        if (layer.expert_in[s] == layer_state::SLOT_FREE && layer.readers[s] == 0) {
            layer.expert_in[s] = layer_state::SLOT_BUSY;
            slot = s;
            return true;
        }
        if (layer.expert_in[s] >= 0 && !layer.pinned[layer.expert_in[s]]) {
            candidates.push_back(layer.expert_in[s]);
        }
    }
    if (force) { // chaos: any victim, also one that is read right now
        if (candidates.empty()) {
            return false;
        }
        std::swap(candidates[0], candidates[layer.stats.promotions % candidates.size()]);
    } else {
        layer.policy.select_victims(candidates, 1);
        if (candidates.empty() || !layer.policy.should_replace(expert, candidates[0])) {
            return false;
        }
    }
    const int32_t victim = candidates[0];
    slot = layer.slot_of[victim];
    leave_slot(layer, slot, layer_state::SLOT_BUSY);

    // A context may hold its last lease while it is idle, so the wait is bounded and the victim comes back. A layer of a large
    // step can take a good part of this on a busy machine.
    const bool unread = layer.slot_released.wait_for(lock, std::chrono::milliseconds(500), [&] { return layer.readers[slot] == 0; });
    if (unread) {
        return true;
    }
    if (layer.slot_of[victim] < 0) {
        enter_slot(layer, victim, slot);
    } else {
        layer.expert_in[slot] = layer_state::SLOT_FREE; // it came back through another slot; readers drain before reuse
    }
    return false;
}

void expert_store::fill(layer_state & layer, int32_t expert, int32_t slot) {
    std::vector<read_job> jobs;
    add_jobs(layer, expert, slot, jobs);
    reader.read(jobs);
    const bool ok = std::all_of(jobs.begin(), jobs.end(), [](const read_job & job) { return job.error == 0; });

    std::lock_guard<std::mutex> lock(layer.mutex);
    if (ok && layer.slot_of[expert] < 0) {
        enter_slot(layer, expert, slot);
        layer.stats.bytes_read += layer.file.expert_bytes;
    } else {
        layer.expert_in[slot] = layer_state::SLOT_FREE;
    }
}

bool expert_store::evict(layer_state & layer, int32_t expert) {
    std::lock_guard<std::mutex> lock(layer.mutex);
    const int32_t slot = layer.slot_of[expert];
    if (slot < 0 || layer.pinned[expert]) {
        return false;
    }
    leave_slot(layer, slot, layer_state::SLOT_FREE); // readers drain before the slot is filled again
    return true;
}

} // namespace spark
