#include "route.h"

#include "expert_store.h"

#include "ggml.h"

namespace spark {

// `hook` is the first member of the stack it belongs to.
static const expert_stack * stack_of(const spark_expert_hook * hook) {
    return reinterpret_cast<const expert_stack *>(hook);
}
static_assert(offsetof(expert_stack, hook) == 0, "stack_of relies on it");

// dst: slots [n_expert_used, n_tokens], packed; src[0]: ids of the same shape, usually a strided view of an argsort.
static void compute_route(ggml_tensor * dst, int ith, int nth, void * userdata) {
    (void) nth;
    if (ith != 0) {
        return;
    }
    const route_site & site = *(const route_site *) userdata;
    const ggml_tensor * ids = dst->src[0];
    site.store->acquire(*site.layer, *site.lease, (const char *) ids->data, ids->ne[0], ids->ne[1], ids->nb[0], ids->nb[1], (int32_t *) dst->data);
}

// dst: one unused element; src[0]: the product after which no slot of the graph is read any more.
static void compute_finish(ggml_tensor * dst, int ith, int nth, void * userdata) {
    (void) dst; (void) nth;
    if (ith != 0) {
        return;
    }
    const route_site & site = *(const route_site *) userdata;
    site.store->release(*site.lease);
}

ggml_tensor * route(ggml_context * ctx, const spark_expert_hook * hook, ggml_tensor * ids, const void * context) {
    const expert_stack * stack = stack_of(hook);
    route_site * site = stack->store->site_for(*stack->layer, context);
    ggml_tensor * slots = ggml_custom_4d(ctx, GGML_TYPE_I32, ids->ne[0], ids->ne[1], 1, 1, &ids, 1, compute_route, 1, site);
    ggml_format_name(slots, "ffn_moe_slots-%d", stack->layer->file.layer);
    return slots;
}

void finish(ggml_context * ctx, ggml_cgraph * gf, const spark_expert_hook * hook, ggml_tensor * product, const void * context) {
    const expert_stack * stack = stack_of(hook);
    if (!stack->ends_graph) {
        return; // the next layer's route ends the use of this layer's slots
    }
    route_site * site = stack->store->site_for(*stack->layer, context);
    ggml_tensor * end = ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, &product, 1, compute_finish, 1, site);
    ggml_format_name(end, "ffn_moe_slots_end-%d", stack->layer->file.layer);
    ggml_build_forward_expand(gf, end);
}

} // namespace spark
