// The graph side on ggml's CPU backend: mul_mat_id through routed slots gives the bits of mul_mat_id on the plain tensor,
// for every batch size, with ids that are a view of an argsort, and while experts move.
#include "check.h"
#include "route.h"
#include "store_fixture.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <cstring>
#include <memory>
#include <thread>

static test::temporary_folder folder;
static const test::model M(folder, "route.gguf", 2, 12);

struct ggml_deleter { void operator()(ggml_context * ctx) const { ggml_free(ctx); } };
using context_ptr = std::unique_ptr<ggml_context, ggml_deleter>;

static context_ptr make_context(size_t mb) { return context_ptr(ggml_init({ mb << 20, nullptr, false })); }

// What buffer_type.cpp does when llama.cpp loads the model, without llama.cpp.
static void install_hooks(spark::expert_store & store) {
    for (auto & layer : store.layers) {
        for (auto & stack : layer->stacks) {
            stack->hook.route  = spark::route;
            stack->hook.finish = spark::finish;
        }
    }
}

static spark::expert_stack & stack_of(spark::layer_state & layer, const char * kind) {
    for (auto & stack : layer.stacks) {
        if (stack->tensor->name.find(kind) != std::string::npos) { return *stack; }
    }
    throw std::runtime_error("no such tensor");
}

// Selected experts [n_used, n_tokens] as top-k makes them: a view of an argsort over n_expert.
static ggml_tensor * top_k_view(ggml_context * ctx, int n_used, int n_tokens, std::mt19937 & random) {
    ggml_tensor * scores = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, M.n_expert, n_tokens);
    for (int64_t i = 0; i < ggml_nelements(scores); i++) { ((float *) scores->data)[i] = (float) (random() % 100000); }
    ggml_tensor * sorted = ggml_argsort(ctx, scores, GGML_SORT_ORDER_DESC);
    return ggml_view_4d(ctx, sorted, n_used, n_tokens, 1, 1, sorted->nb[1], sorted->nb[2], sorted->nb[3], 0);
}

static ggml_tensor * plain_weight(ggml_context * ctx, const std::string & name) {
    const auto & t = test::find(M.tensors, name);
    ggml_tensor * w = ggml_new_tensor_3d(ctx, t.type, t.ne[0], t.ne[1], t.ne[2]);
    memcpy(w->data, t.bytes.data(), t.bytes.size());
    return w;
}

// gate and down of one layer, chained as a feed-forward is; returns the number of values that differ.
static int compare(spark::expert_store & store, int il, int n_tokens, uint32_t seed, const void * who) {
    const int n_used = 4;
    context_ptr ctx = make_context(64);
    std::mt19937 random(seed);
    spark::layer_state & layer = *store.layers[il];
    const std::string b = "blk." + std::to_string(il) + ".";

    ggml_tensor * x = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 96, 1, n_tokens);
    for (int64_t i = 0; i < ggml_nelements(x); i++) { ((float *) x->data)[i] = (float) (random() % 2001) / 1000.0f - 1.0f; }
    ggml_tensor * ids = top_k_view(ctx.get(), n_used, n_tokens, random);

    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_tensor * gate = ggml_mul_mat_id(ctx.get(), plain_weight(ctx.get(), b + "ffn_gate_exps.weight"), x, ids);
    ggml_tensor * down = ggml_mul_mat_id(ctx.get(), plain_weight(ctx.get(), b + "ffn_down_exps.weight"), gate, ids);
    ggml_build_forward_expand(gf, down);

    spark::expert_stack & s_gate = stack_of(layer, "gate"), & s_down = stack_of(layer, "down");
    ggml_tensor * slots  = s_gate.hook.route(ctx.get(), &s_gate.hook, ids, who);
    ggml_tensor * r_gate = ggml_mul_mat_id(ctx.get(), s_gate.hook.stack, x, slots);
    s_gate.hook.finish(ctx.get(), gf, &s_gate.hook, r_gate, who);
    ggml_tensor * r_down = ggml_mul_mat_id(ctx.get(), s_down.hook.stack, r_gate, slots);
    ggml_build_forward_expand(gf, r_down);
    s_down.hook.finish(ctx.get(), gf, &s_down.hook, r_down, who);

    if (ggml_graph_compute_with_ctx(ctx.get(), gf, 2) != GGML_STATUS_SUCCESS) { return -1; }
    int different = 0;
    for (int64_t i = 0; i < ggml_nelements(down); i++) {
        different += memcmp((float *) down->data + i, (float *) r_down->data + i, sizeof(float)) != 0;
    }
    bool constant = true; // a product of zeros would compare equal too
    for (int64_t i = 1; i < ggml_nelements(down); i++) { constant = constant && ((float *) down->data)[i] == ((float *) down->data)[0]; }
    return constant ? -1 : different;
}

static void routed_products_are_the_plain_ones() {
    for (int n_fast : { 0, 1, 4, 7, 12 }) {
        test::attached a(M.open(n_fast, SPARK_POLICY_FREQUENCY, n_fast / 2));
        install_hooks(*a.store);
        for (int n_tokens : { 1, 2, 3, 5, 8, 9, 33, 130 }) {
            for (int il = 0; il < 2; il++) { CHECK_EQ(compare(*a.store, il, n_tokens, 10 * n_tokens + il, &n_fast), 0); }
        }
        // the last product of the last layer has let go of everything
        for (auto & layer : a.store->layers) {
            for (int32_t readers : layer->readers) { CHECK_EQ(readers, 0); }
        }
    }
}

static void contexts_compute_while_experts_move() {
    test::attached a(M.open(4, SPARK_POLICY_CHAOS, 4));
    install_hooks(*a.store);
    std::vector<std::thread> contexts;
    contexts.reserve(3); // their addresses name the contexts
    for (int c = 0; c < 3; c++) {
        contexts.emplace_back([&, c] {
            for (int step = 0; step < 15; step++) {
                for (int il = 0; il < 2; il++) { CHECK_EQ(compare(*a.store, il, 1 + step % 3, 1000 * c + step, &contexts[c]), 0); }
            }
        });
    }
    for (auto & t : contexts) { t.join(); }
    CHECK(a.store->layer_stats(0).evictions > 0);
}

int main() {
    RUN(routed_products_are_the_plain_ones);
    RUN(contexts_compute_while_experts_move);
    return test::failures();
}
