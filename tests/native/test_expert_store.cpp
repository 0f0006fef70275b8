// Slots, leases, counters and life cycle of a store, without llama.cpp.
#include "check.h"
#include "store_fixture.h"

#include <cstdlib>

using test::acquire;
using test::attached;
using test::wrong_slots;

static test::temporary_folder folder;
static const test::model M(folder, "store.gguf", 3, 8);

static void slots_hold_what_was_asked_for() {
    for (int n_fast = 0; n_fast <= 8; n_fast++) {
        for (spark_policy policy : { SPARK_POLICY_FREQUENCY, SPARK_POLICY_STATIC }) {
            attached a(M.open(n_fast, policy, n_fast / 2));
            std::mt19937 random(n_fast);
            spark::context_lease lease;
            for (int step = 0; step < 60; step++) {
                spark::layer_state & layer = *a.store->layers[step % 3];
                const auto ids = test::random_ids(random, 8, 2, 1 + random() % 5);
                const auto slots = acquire(*a.store, layer, lease, ids, 2);
                CHECK_EQ(wrong_slots(M, layer, ids, slots), 0);
                for (size_t i = 0; i < slots.size(); i++) {
                    CHECK(slots[i] < n_fast || slots[i] == layer.home_slot + ids[i]);
                }
            }
            a.store->release(lease);
        }
    }
}

static void strided_ids_are_read_where_they_are() {
    // what an argsort leaves: rows of n_expert ids, of which a step takes the first two
    attached a(M.open(3, SPARK_POLICY_FREQUENCY));
    spark::layer_state & layer = *a.store->layers[0];
    spark::context_lease lease;
    const std::vector<int32_t> sorted = { 5, 2, 0, 1, 3, 4, 6, 7, /**/ 7, 5, 0, 1, 2, 3, 4, 6, /**/ 1, 0, 2, 3, 4, 5, 6, 7 };
    std::vector<int32_t> slots(6);
    a.store->acquire(layer, lease, (const char *) sorted.data(), 2, 3, sizeof(int32_t), 8 * sizeof(int32_t), slots.data());
    CHECK_EQ(wrong_slots(M, layer, { 5, 2, 7, 5, 1, 0 }, slots), 0);
    CHECK_EQ(a.store->layer_stats(0).uses, (uint64_t) 6);
    a.store->release(lease);
}

static void counters_add_up() {
    attached a(M.open(4, SPARK_POLICY_FREQUENCY, 2));
    spark::layer_state & layer = *a.store->layers[1];
    spark::context_lease lease;
    CHECK_EQ(a.store->layer_stats(1).n_resident, 2);
    CHECK_EQ(a.store->layer_stats(1).promotions, (uint64_t) 2);
    acquire(*a.store, layer, lease, { 0, 1, 0, 5 }, 2); // 0 and 1 are resident, 5 takes a free slot
    spark_stats s = a.store->layer_stats(1);
    CHECK_EQ(s.uses, (uint64_t) 4);
    CHECK_EQ(s.hits, (uint64_t) 3);
    CHECK_EQ(s.misses, (uint64_t) 1);
    CHECK_EQ(s.misses_home, (uint64_t) 0);
    CHECK_EQ(s.bytes_read, layer.file.expert_bytes);
    CHECK_EQ(s.n_resident, 3);
    CHECK_EQ(s.layer, 1);
    // six experts for four slots: nothing is evicted, what has no slot is read in place
    acquire(*a.store, layer, lease, { 0, 1, 2, 3, 4, 6 }, 2);
    s = a.store->layer_stats(1);
    CHECK_EQ(s.evictions, (uint64_t) 0);
    CHECK_EQ(s.misses, (uint64_t) 5);
    CHECK_EQ(s.misses_home, (uint64_t) 3);
    CHECK_EQ(s.n_resident, 4);
    CHECK_EQ(s.uses, s.hits + s.misses);
    a.store->release(lease);
    CHECK_EQ(a.store->layer_stats(0).uses, (uint64_t) 0);
}

static void static_experts_never_move() {
    attached a(M.open(4, SPARK_POLICY_STATIC, 3));
    spark::layer_state & layer = *a.store->layers[0];
    spark::context_lease lease;
    std::mt19937 random(1);
    for (int step = 0; step < 50; step++) {
        const auto ids = test::random_ids(random, 8, 2, 1);
        CHECK_EQ(wrong_slots(M, layer, ids, acquire(*a.store, layer, lease, ids, 2)), 0);
    }
    const spark_stats s = a.store->layer_stats(0);
    CHECK_EQ(s.promotions, (uint64_t) 3);
    CHECK_EQ(s.evictions, (uint64_t) 0);
    CHECK_EQ(s.misses, s.misses_home);
    a.store->release(lease);
}

static void a_lease_protects_its_slots() {
    attached a(M.open(3, SPARK_POLICY_FREQUENCY, 0));
    spark::layer_state & layer = *a.store->layers[0];
    spark::context_lease holder, other;
    const std::vector<int32_t> held = { 0, 1, 2 };
    const auto held_slots = acquire(*a.store, layer, holder, held, 3);
    CHECK_EQ(wrong_slots(M, layer, held, held_slots), 0);
    // another context wants three others: all slots are read, so it reads in place and takes nothing
    const std::vector<int32_t> wanted = { 3, 4, 5 };
    const auto slots = acquire(*a.store, layer, other, wanted, 3);
    for (size_t i = 0; i < slots.size(); i++) { CHECK_EQ(slots[i], layer.home_slot + wanted[i]); }
    CHECK_EQ(wrong_slots(M, layer, held, held_slots), 0);
    int32_t slot = -1;
    CHECK(!a.store->retire(layer, 6, true, slot)); // gives up after its bounded wait, and the victim comes back
    CHECK_EQ(wrong_slots(M, layer, held, held_slots), 0);
    a.store->release(holder);
    CHECK(a.store->retire(layer, 6, true, slot));
    a.store->fill(layer, 6, slot);
    CHECK_EQ(layer.slot_of[6], slot);
    a.store->release(other);
}

static void a_lease_may_be_released_twice() {
    attached a(M.open(2, SPARK_POLICY_FREQUENCY));
    spark::context_lease lease;
    a.store->release(lease);
    acquire(*a.store, *a.store->layers[0], lease, { 1, 2 }, 2);
    a.store->release(lease);
    a.store->release(lease);
    for (int32_t readers : a.store->layers[0]->readers) { CHECK_EQ(readers, 0); }
}

static void pinned_experts_stay() {
    attached a(M.open(4, SPARK_POLICY_FREQUENCY, 4, 2));
    spark::layer_state & layer = *a.store->layers[0];
    spark::context_lease lease;
    std::mt19937 random(5);
    for (int step = 0; step < 200; step++) {
        std::vector<int32_t> ids = test::random_ids(random, 6, 2, 1);
        for (int32_t & id : ids) { id += 2; } // never the pinned ones, so they are the coldest
        CHECK_EQ(wrong_slots(M, layer, ids, acquire(*a.store, layer, lease, ids, 2)), 0);
    }
    CHECK(a.store->layer_stats(0).evictions > 0);
    CHECK(layer.slot_of[0] >= 0 && layer.slot_of[1] >= 0);
    CHECK(!a.store->evict(layer, 0));
    a.store->release(lease);
}

static void a_plan_is_checked_and_nothing_changes() {
    auto store = M.open(3, SPARK_POLICY_STATIC, 1);
    const int32_t one_twice[] = { 1, 1 }, outside[] = { 8 }, negative[] = { -1 }, fine[] = { 2 };
    const auto set = [&](spark_layer_plan layer, int32_t policy = SPARK_POLICY_FREQUENCY) { store->set_plan({ 1, &layer, policy, 0 }); };
    CHECK_THROWS(set({ 0, 9, 0, 0, nullptr }),    SPARK_STATUS_INVALID_ARGUMENT, "9 fast slots");
    CHECK_THROWS(set({ 0, -1, 0, 0, nullptr }),   SPARK_STATUS_INVALID_ARGUMENT, "-1 fast slots");
    CHECK_THROWS(set({ 7, 1, 0, 0, nullptr }),    SPARK_STATUS_INVALID_ARGUMENT, "block 7");
    CHECK_THROWS(set({ 0, 1, 0, 2, one_twice }),  SPARK_STATUS_INVALID_ARGUMENT, "initial");
    CHECK_THROWS(set({ 0, 2, 0, 2, one_twice }),  SPARK_STATUS_INVALID_ARGUMENT, "twice");
    CHECK_THROWS(set({ 0, 2, 0, 1, outside }),    SPARK_STATUS_INVALID_ARGUMENT, "expert 8");
    CHECK_THROWS(set({ 0, 2, 0, 1, negative }),   SPARK_STATUS_INVALID_ARGUMENT, "expert -1");
    CHECK_THROWS(set({ 0, 2, 2, 1, fine }),       SPARK_STATUS_INVALID_ARGUMENT, "pinned");
    CHECK_THROWS(set({ 0, 2, 0, 1, nullptr }),    SPARK_STATUS_INVALID_ARGUMENT, "initial");
    CHECK_THROWS(set({ 0, 2, 0, 1, fine }, 3),    SPARK_STATUS_INVALID_ARGUMENT, "policy 3");
    const spark_layer_plan twice[] = { { 1, 1, 0, 0, nullptr }, { 1, 2, 0, 0, nullptr } };
    CHECK_THROWS(store->set_plan({ 2, twice, 0, 0 }), SPARK_STATUS_INVALID_ARGUMENT, "named twice");
    CHECK_THROWS(store->set_plan({ -1, nullptr, 0, 0 }), SPARK_STATUS_INVALID_ARGUMENT, "-1 layers");
    CHECK_THROWS(store->set_plan({ 1, nullptr, 0, 0 }), SPARK_STATUS_INVALID_ARGUMENT, "without layers");
    for (const auto & layer : store->layers) {
        CHECK_EQ(layer->n_fast, 3);
        CHECK_EQ(layer->initial.size(), (size_t) 1);
    }
    CHECK_EQ((int) store->policy, (int) SPARK_POLICY_STATIC);
    attached a(store);
    CHECK_THROWS(set({ 0, 1, 0, 0, nullptr }), SPARK_STATUS_BAD_STATE, "loaded");
}

static void layers_that_are_not_named_have_no_slots() {
    auto store = M.open(3, SPARK_POLICY_FREQUENCY);
    const spark_layer_plan only = { 1, 2, 0, 0, nullptr };
    store->set_plan({ 1, &only, SPARK_POLICY_FREQUENCY, 0 });
    attached a(store);
    CHECK_EQ(store->layer_stats(0).n_fast, 0);
    CHECK_EQ(store->layer_stats(1).n_fast, 2);
    CHECK_EQ(store->layer_stats(2).fast_bytes, (uint64_t) 0);
    spark::context_lease lease;
    const auto slots = acquire(*store, *store->layers[0], lease, { 4, 6 }, 2);
    CHECK_EQ(wrong_slots(M, *store->layers[0], { 4, 6 }, slots), 0);
    store->release(lease);
}

static void without_a_plan_everything_is_resident() {
    spark::store_options options;
    options.path = M.path;
    attached a(std::make_shared<spark::expert_store>(options));
    spark::context_lease lease;
    const auto slots = acquire(*a.store, *a.store->layers[2], lease, { 0, 7, 3, 4 }, 2);
    CHECK_EQ(wrong_slots(M, *a.store->layers[2], { 0, 7, 3, 4 }, slots), 0);
    CHECK_EQ(a.store->layer_stats(2).misses, (uint64_t) 0);
    CHECK(!a.store->swaps()); // nothing to move, so no thread
    a.store->release(lease);
}

static void a_reload_starts_afresh() {
    auto store = M.open(6, SPARK_POLICY_FREQUENCY, 6);
    const int context = 0; // any address
    {
        attached a(store);
        spark::route_site * site = store->site_for(*store->layers[0], &context);
        acquire(*store, *store->layers[0], *site->lease, { 4, 5 }, 2); // as after an aborted graph: never released
    }
    CHECK(!store->is_loaded());
    const spark_layer_plan smaller = { 0, 1, 0, 0, nullptr };
    store->set_plan({ 1, &smaller, SPARK_POLICY_FREQUENCY, 0 });
    attached a(store);
    CHECK_EQ(store->layer_stats(0).uses, (uint64_t) 0);
    spark::route_site * site = store->site_for(*store->layers[0], &context);
    const auto slots = acquire(*store, *store->layers[0], *site->lease, { 3, 2 }, 2);
    CHECK_EQ(wrong_slots(M, *store->layers[0], { 3, 2 }, slots), 0);
    store->release(*site->lease);
    for (int32_t readers : store->layers[0]->readers) { CHECK_EQ(readers, 0); }
}

static void a_file_that_shrank_fails_the_load_and_leaves_nothing() {
    const test::model m(folder, "shrinks.gguf", 2, 4);
    auto store = m.open(4, SPARK_POLICY_FREQUENCY, 4);
    const auto & last = store->file.layers.back().tensors.back();
    CHECK_EQ(truncate(m.path.c_str(), (off_t) (last.offset + last.stride)), 0);
    CHECK_THROWS(store->attach(), SPARK_STATUS_IO, "unexpected end");
    CHECK(!store->is_loaded());
    test::write_gguf(m.path, m.tensors); // same file again (same inode): the store can be used
    attached a(store);
    spark::context_lease lease;
    CHECK_EQ(wrong_slots(m, *store->layers[1], { 3 }, acquire(*store, *store->layers[1], lease, { 3 }, 1)), 0);
    store->release(lease);
}

static void a_split_model_is_one_model() {
    // layer 0 lies in part 1, layer 1 in both, its down projection last
    const auto all = test::moe_tensors(2, 5);
    const std::string first = folder.file("split-00001-of-00002.gguf"), second = folder.file("split-00002-of-00002.gguf");
    test::write_gguf(first,  std::vector<test::tensor_description>(all.begin(), all.begin() + 6), 2, 0);
    test::write_gguf(second, std::vector<test::tensor_description>(all.begin() + 6, all.end()), 2, 1);
    spark::store_options options;
    options.path = first;
    auto store = std::make_shared<spark::expert_store>(options);
    CHECK_EQ(store->layers.size(), (size_t) 2);
    CHECK_EQ(store->file.shards.size(), (size_t) 2);
    attached a(store);
    spark::context_lease lease;
    const test::model whole(folder, "whole.gguf", 2, 5);
    for (int il = 0; il < 2; il++) {
        CHECK_EQ(store->layers[il]->stacks.size(), (size_t) 3);
        const auto slots = acquire(*store, *store->layers[il], lease, { 4, 0 }, 2);
        CHECK_EQ(wrong_slots(whole, *store->layers[il], { 4, 0 }, slots), 0);
    }
    store->release(lease);
    options.path = second;
    CHECK_THROWS(spark::expert_store other(options), SPARK_STATUS_BAD_FORMAT, "first part");
    unlink(second.c_str());
    options.path = first;
    CHECK_THROWS(spark::expert_store other(options), SPARK_STATUS_NOT_FOUND, "00002-of-00002");
}

int main() {
    RUN(slots_hold_what_was_asked_for);
    RUN(strided_ids_are_read_where_they_are);
    RUN(counters_add_up);
    RUN(static_experts_never_move);
    RUN(a_lease_protects_its_slots);
    RUN(a_lease_may_be_released_twice);
    RUN(pinned_experts_stay);
    RUN(a_plan_is_checked_and_nothing_changes);
    RUN(layers_that_are_not_named_have_no_slots);
    RUN(without_a_plan_everything_is_resident);
    RUN(a_reload_starts_afresh);
    RUN(a_file_that_shrank_fails_the_load_and_leaves_nothing);
    RUN(a_split_model_is_one_model);
    return test::failures();
}
