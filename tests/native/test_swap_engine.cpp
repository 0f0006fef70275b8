// Experts move while several contexts read: whatever a step was given stays what it asked for until it lets go.
// Run with -DSPARK_SANITIZE=thread this is the test of invariant 3 (a slot is never overwritten while it may be read).
#include "check.h"
#include "store_fixture.h"
#include "swap_engine.h"

#include <atomic>
#include <chrono>
#include <thread>

using test::acquire;
using test::attached;
using test::wrong_slots;

static test::temporary_folder folder;
static const test::model M(folder, "swap.gguf", 3, 10);

// Steps of `n_used` experts through all layers, each slot checked when it is given and again just before it is given back.
static int run_steps(spark::expert_store & store, uint32_t seed, int n_steps, int n_used) {
    std::mt19937 random(seed);
    spark::context_lease lease;
    int wrong = 0;
    for (int step = 0; step < n_steps; step++) {
        const int n_tokens = random() % 8 == 0 ? 6 : 1;
        for (auto & layer : store.layers) {
            const auto ids   = test::random_ids(random, M.n_expert, n_used, n_tokens);
            const auto slots = acquire(store, *layer, lease, ids, n_used);
            wrong += wrong_slots(M, *layer, ids, slots);
            if (step % 16 == 0) { std::this_thread::yield(); }
            wrong += wrong_slots(M, *layer, ids, slots);
        }
    }
    store.release(lease);
    return wrong;
}

static void contexts_read_while_experts_move() {
    for (spark_policy policy : { SPARK_POLICY_FREQUENCY, SPARK_POLICY_CHAOS }) {
        for (int n_fast : { 1, 3, 5, 9, 10 }) {
            attached a(M.open(n_fast, policy, n_fast / 2, n_fast / 4));
            std::atomic<int> wrong { 0 };
            std::atomic<bool> done { false };
            std::thread watcher([&] { // what a statistics page does
                while (!done) {
                    for (int il = 0; il < M.n_layers; il++) {
                        const spark_stats s = a.store->layer_stats(il);
                        if (s.uses != s.hits + s.misses || s.n_resident < 0 || s.n_resident > s.n_fast) { wrong++; }
                    }
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
            });
            std::vector<std::thread> contexts;
            for (uint32_t c = 0; c < 3; c++) {
                contexts.emplace_back([&, c] { wrong += run_steps(*a.store, 100 * n_fast + c, 40, 2); });
            }
            for (auto & t : contexts) { t.join(); }
            done = true;
            watcher.join();
            CHECK_EQ(wrong.load(), 0);
            for (auto & layer : a.store->layers) {
                std::lock_guard<std::mutex> lock(layer->mutex);
                for (int32_t readers : layer->readers) { CHECK_EQ(readers, 0); }
                int resident = 0;
                for (int32_t e = 0; e < M.n_expert; e++) {
                    const int32_t slot = layer->slot_of[e];
                    if (slot >= 0) {
                        resident++;
                        CHECK_EQ(layer->expert_in[slot], e);
                    }
                }
                CHECK_EQ(layer->n_resident, resident);
            }
        }
    }
}

static void chaos_moves_experts_all_the_time() {
    attached a(M.open(4, SPARK_POLICY_CHAOS, 4));
    const uint64_t before = a.store->layer_stats(0).evictions;
    for (int i = 0; i < 2000 && a.store->layer_stats(0).evictions < before + 5; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(a.store->layer_stats(0).evictions >= before + 5);
}

static void a_hot_expert_gets_a_slot() {
    attached a(M.open(2, SPARK_POLICY_FREQUENCY, 2));
    spark::layer_state & layer = *a.store->layers[0];
    spark::context_lease lease;
    // steps of three experts do not fit two slots, so they take none themselves; the engine promotes what is hot
    for (int step = 0; step < 50; step++) { acquire(*a.store, layer, lease, { 7, 8, 9 }, 3); }
    a.store->release(lease);
    CHECK(a.store->swaps()->wait_idle(10000));
    int32_t hot = 0;
    {
        std::lock_guard<std::mutex> lock(layer.mutex);
        for (int32_t e : { 7, 8, 9 }) { hot += layer.slot_of[e] >= 0; }
    }
    CHECK_EQ(hot, 2);
    CHECK(a.store->layer_stats(0).evictions >= 2);
}

static void a_store_goes_away_while_the_engine_works() {
    for (int round = 0; round < 20; round++) {
        attached a(M.open(2, round % 2 ? SPARK_POLICY_CHAOS : SPARK_POLICY_FREQUENCY, 2, 0, round));
        spark::context_lease lease;
        for (auto & layer : a.store->layers) { acquire(*a.store, *layer, lease, { 3, 4, 5, 6 }, 4); }
        a.store->release(lease);
        if (auto engine = a.store->swaps()) { engine->wait_idle(round % 3); } // sometimes waiting when it stops
    }
    CHECK(true);
}

static void a_full_queue_loses_promotions_only() {
    attached a(M.open(2, SPARK_POLICY_FREQUENCY, 2));
    for (int i = 0; i < 100000; i++) { a.store->swaps()->log_miss(i % M.n_layers, i % M.n_expert); }
    CHECK(a.store->swaps()->wait_idle(30000));
    CHECK_EQ(run_steps(*a.store, 3, 20, 2), 0);
}

int main() {
    RUN(contexts_read_while_experts_move);
    RUN(chaos_moves_experts_all_the_time);
    RUN(a_hot_expert_gets_a_slot);
    RUN(a_store_goes_away_while_the_engine_works);
    RUN(a_full_queue_loses_promotions_only);
    return test::failures();
}
