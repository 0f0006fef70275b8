// Placing experts anew while a model is loaded, and the uses that a policy begins with.
#include "check.h"
#include "store_fixture.h"
#include "swap_engine.h"

#include <cmath>
#include <limits>

using test::acquire;
using test::attached;
using test::wrong_slots;

static test::temporary_folder folder;
static const test::model M(folder, "plan.gguf", 3, 8);

static void place(spark::expert_store & store, const std::vector<int32_t> & n_fast, const std::vector<int32_t> & initial,
                  int32_t n_pinned = 0, spark_policy policy = SPARK_POLICY_FREQUENCY, const double * hotness = nullptr) {
    std::vector<spark_layer_plan> layers;
    for (int32_t il = 0; il < (int32_t) n_fast.size(); il++) {
        const int32_t n_initial = std::min((int32_t) initial.size(), n_fast[il]);
        layers.push_back({ il, n_fast[il], std::min(n_pinned, n_initial), n_initial, initial.data(), hotness });
    }
    store.place({ (int32_t) layers.size(), layers.data(), policy, 1, -1 });
}

static std::vector<int32_t> resident(const spark::layer_state & layer) {
    std::vector<int32_t> result;
    for (int32_t e = 0; e < (int32_t) layer.slot_of.size(); e++) {
        if (layer.slot_of[e] >= 0) { result.push_back(e); }
    }
    return result;
}

// Every table entry, slot and counter of a layer fits the others, and every resident expert's bytes are in its slot.
static void check_layer(spark::expert_store & store, int32_t index) {
    const spark::layer_state & layer = *store.layers[index];
    const auto experts = resident(layer);
    CHECK_EQ(layer.n_resident, (int32_t) experts.size());
    CHECK_EQ(layer.expert_in.size(), (size_t) layer.n_fast);
    std::vector<int32_t> slots;
    for (int32_t e : experts) {
        CHECK(layer.slot_of[e] < layer.n_fast);
        CHECK_EQ(layer.expert_in[layer.slot_of[e]], e);
        slots.push_back(layer.slot_of[e]);
    }
    CHECK_EQ(wrong_slots(M, layer, experts, slots), 0);
    size_t fast_bytes = 0;
    for (const auto & stack : layer.stacks) { fast_bytes += stack->memory->fast_bytes(); }
    CHECK_EQ(layer.n_fast == 0, fast_bytes == 0);
}

static void slots_grow_and_shrink_under_a_loaded_model() {
    attached a(M.open(2, SPARK_POLICY_FREQUENCY, 2));
    std::mt19937 random(3);
    spark::context_lease lease;
    for (int round = 0; round < 200; round++) {
        std::vector<int32_t> n_fast(3);
        for (int32_t & n : n_fast) { n = random() % 9; }
        place(*a.store, n_fast, test::random_ids(random, 8, random() % 9, 1), random() % 3);
        for (int il = 0; il < 3; il++) {
            spark::layer_state & layer = *a.store->layers[il];
            check_layer(*a.store, il);
            for (int step = 0; step < 4; step++) {
                const auto ids = test::random_ids(random, 8, 2, 1 + random() % 3);
                CHECK_EQ(wrong_slots(M, layer, ids, acquire(*a.store, layer, lease, ids, 2)), 0);
            }
        }
        a.store->release(lease);
    }
}

static void what_the_plan_names_is_resident_and_what_it_keeps_is_not_read_again() {
    attached a(M.open(4, SPARK_POLICY_FREQUENCY, 4)); // 0 1 2 3
    const spark::layer_state & layer = *a.store->layers[0];
    const int32_t slot_of_2 = layer.slot_of[2];
    const uint64_t read = a.store->layer_stats(0).bytes_read;
    place(*a.store, { 4, 4, 4 }, { 2, 6, 3, 7 });
    CHECK(resident(layer) == (std::vector<int32_t> { 2, 3, 6, 7 }));
    CHECK_EQ(layer.slot_of[2], slot_of_2);
    CHECK_EQ(a.store->layer_stats(0).bytes_read - read, 2 * layer.file.expert_bytes);
    place(*a.store, { 6, 6, 6 }, {}); // more room, nobody named: nothing moves
    CHECK(resident(layer) == (std::vector<int32_t> { 2, 3, 6, 7 }));
    CHECK_EQ(a.store->layer_stats(0).bytes_read - read, 2 * layer.file.expert_bytes);
    place(*a.store, { 0, 0, 0 }, {});
    CHECK(resident(layer).empty());
    CHECK_EQ(a.store->layer_stats(0).fast_bytes, (uint64_t) 0);
    CHECK(!a.store->swaps()); // nothing can move, so no thread
    place(*a.store, { 8, 8, 8 }, { 0, 1, 2, 3, 4, 5, 6, 7 });
    CHECK_EQ(resident(layer).size(), (size_t) 8);
}

static void an_idle_context_loses_its_lease() {
    attached a(M.open(4, SPARK_POLICY_FREQUENCY, 4));
    const int context = 0; // any address
    spark::route_site * site = a.store->site_for(*a.store->layers[0], &context);
    acquire(*a.store, *a.store->layers[0], *site->lease, { 2, 3 }, 2); // as after an aborted graph: never released
    place(*a.store, { 1, 1, 1 }, { 5 });
    check_layer(*a.store, 0);
    CHECK(resident(*a.store->layers[0]) == std::vector<int32_t> { 5 });
    const auto slots = acquire(*a.store, *a.store->layers[1], *site->lease, { 2, 5 }, 2);
    CHECK_EQ(wrong_slots(M, *a.store->layers[1], { 2, 5 }, slots), 0);
    a.store->release(*site->lease);
    for (int32_t readers : a.store->layers[0]->readers) { CHECK_EQ(readers, 0); }
}

static void pinned_share_follows_the_plan() {
    attached a(M.open(4, SPARK_POLICY_FREQUENCY, 4, 2));
    spark::layer_state & layer = *a.store->layers[0];
    place(*a.store, { 4, 4, 4 }, { 6, 7 }, 1);
    CHECK(layer.pinned[6] && !layer.pinned[7] && !layer.pinned[0] && !layer.pinned[1]);
}

static void the_policy_begins_with_the_uses_it_is_given() {
    std::vector<double> hotness = { 1, 80, 70, 2, 60, 3, 50, 4 };
    auto store = M.open(4, SPARK_POLICY_FREQUENCY);
    const int32_t initial[] = { 1, 2, 4, 6 };
    const spark_layer_plan layer_plan = { 0, 4, 0, 4, initial, hotness.data() };
    store->set_plan({ 1, &layer_plan, SPARK_POLICY_FREQUENCY, 1, -1 });
    attached a(store);
    spark::layer_state & layer = *store->layers[0];
    for (int e = 0; e < 8; e++) { CHECK_EQ(layer.policy.score(e) / layer.policy.unit(), hotness[e]); }
    // one use of a cold expert takes the slot of the coldest resident, never of a hotter one
    spark::context_lease lease;
    acquire(*store, layer, lease, { 0 }, 1);
    store->release(lease);
    CHECK(resident(layer) == (std::vector<int32_t> { 0, 1, 2, 4 }));
    // no hotness in a later plan: what was learned stays
    const double before = layer.policy.score(1);
    place(*store, { 4, 4, 4 }, {});
    CHECK_EQ(layer.policy.score(1), before);
    hotness[0] = 1000;
    place(*store, { 4, 4, 4 }, {}, 0, SPARK_POLICY_FREQUENCY, hotness.data());
    CHECK_EQ(layer.policy.score(0) / layer.policy.unit(), 1000.0);
}

static void a_bad_plan_changes_nothing() {
    auto store = M.open(3, SPARK_POLICY_FREQUENCY, 3);
    CHECK_THROWS(place(*store, { 1, 1, 1 }, {}), SPARK_STATUS_BAD_STATE, "only while a model is loaded");
    attached a(store);
    std::vector<double> hotness(8, 1.0);
    for (double bad : { -1.0, std::nan(""), std::numeric_limits<double>::infinity(), 1e16 }) {
        hotness[5] = bad;
        CHECK_THROWS(place(*store, { 1, 1, 1 }, {}, 0, SPARK_POLICY_FREQUENCY, hotness.data()), SPARK_STATUS_INVALID_ARGUMENT, "expert 5 begins with");
    }
    CHECK_THROWS(place(*store, { 9, 1, 1 }, {}), SPARK_STATUS_INVALID_ARGUMENT, "9 fast slots");
    for (int il = 0; il < 3; il++) {
        check_layer(*store, il);
        CHECK(resident(*store->layers[il]) == (std::vector<int32_t> { 0, 1, 2 }));
    }
}

static void a_file_that_shrank_leaves_experts_in_their_homes() {
    const test::model m(folder, "shrinks.gguf", 1, 4);
    attached a(m.open(2, SPARK_POLICY_FREQUENCY, 0));
    const spark::expert_tensor & last = a.store->file.layers[0].tensors.back();
    CHECK_EQ(truncate(m.path.c_str(), (off_t) (last.offset + last.stride)), 0);
    const int32_t initial[] = { 0, 3 };
    const spark_layer_plan layer = { 0, 3, 0, 2, initial, nullptr };
    a.store->place({ 1, &layer, SPARK_POLICY_FREQUENCY, 1, -1 });
    CHECK(resident(*a.store->layers[0]).size() < 2);
    test::write_gguf(m.path, m.tensors); // same inode: the next placing finds everything
    a.store->place({ 1, &layer, SPARK_POLICY_FREQUENCY, 1, -1 });
    CHECK(resident(*a.store->layers[0]) == (std::vector<int32_t> { 0, 3 }));
}

static void other_threads_may_ask_while_experts_are_placed() {
    attached a(M.open(4, SPARK_POLICY_FREQUENCY, 4));
    std::atomic<bool> stop { false };
    std::thread reader([&] {
        while (!stop) {
            for (int il = 0; il < 3; il++) { CHECK(a.store->layer_stats(il).n_resident <= 8); }
            a.store->wait_idle(0);
        }
    });
    std::mt19937 random(9);
    spark::context_lease lease;
    for (int round = 0; round < 100; round++) {
        place(*a.store, { (int32_t) (random() % 9), 3, (int32_t) (random() % 9) }, test::random_ids(random, 8, 3, 1));
        const auto ids = test::random_ids(random, 8, 2, 2);
        CHECK_EQ(wrong_slots(M, *a.store->layers[2], ids, acquire(*a.store, *a.store->layers[2], lease, ids, 2)), 0);
        a.store->release(lease);
    }
    stop = true;
    reader.join();
}

int main() {
    RUN(slots_grow_and_shrink_under_a_loaded_model);
    RUN(what_the_plan_names_is_resident_and_what_it_keeps_is_not_read_again);
    RUN(an_idle_context_loses_its_lease);
    RUN(pinned_share_follows_the_plan);
    RUN(the_policy_begins_with_the_uses_it_is_given);
    RUN(a_bad_plan_changes_nothing);
    RUN(a_file_that_shrank_leaves_experts_in_their_homes);
    RUN(other_threads_may_ask_while_experts_are_placed);
    return test::failures();
}
