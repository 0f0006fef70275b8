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

// Nodes of a device are run by its backend alone (patches/0060).
static void compute_on_device(ggml_tensor * dst, int ith, int nth, void * userdata) {
    (void) ith; (void) nth; (void) userdata;
    GGML_ABORT("spark: node '%s' of an expert store on a device was given to the CPU", dst->name);
}

static ggml_tensor * device_node(ggml_context * ctx, device_site::node & node, ggml_tensor ** src, int n_src, int64_t ne0, int64_t ne1) {
    ggml_tensor * result = ggml_custom_4d(ctx, GGML_TYPE_I32, ne0, ne1, 1, 1, src, n_src, compute_on_device, 1, nullptr);
    result->extra  = &node.op;
    result->flags |= GGML_TENSOR_FLAG_EXPERT_STACK;
    return result;
}

// The router behind `ids`: llama.cpp's graph goes from a product of the router's weight through activation, bias and top-k to
// the ids. Returns the router's input, or nullptr when the graph looks otherwise.
static ggml_tensor * find_router(ggml_tensor * ids, router_tensors & router) {
    router = {};
    ggml_tensor * t = ids;
    for (int i = 0; t && i < 16; i++) {
        if (t->op == GGML_OP_MUL_MAT) {
            const bool is_weight = t->src[0]->op == GGML_OP_NONE && t->src[1]->type == GGML_TYPE_F32 && t->src[1]->ne[2] == 1 && t->src[1]->ne[3] == 1;
            router.weight = is_weight ? t->src[0] : nullptr;
            return is_weight ? t->src[1] : nullptr;
        }
        if (t->op == GGML_OP_ADD && t->src[1]->op == GGML_OP_NONE) {
            router.bias = t->src[1];
        }
        router.is_sigmoid |= t->op == GGML_OP_UNARY && ggml_get_unary_op(t) == GGML_UNARY_OP_SIGMOID;
        t = t->view_src ? t->view_src : t->src[0];
    }
    return nullptr;
}

// Sources of a routed node on a device: [0] the ids; [1] the router's input when the next layer's experts are to be brought
// from it, else the ids; [2] that of the layer before when this layer's were: it stays allocated until they have arrived.
static ggml_tensor * device_route(ggml_context * ctx, device_site & site, ggml_tensor * ids, device_site * previous) {
    ggml_tensor * src[3] = { ids, ids, nullptr };
    int n_src = 1;
    ggml_tensor * input = find_router(ids, site.router);
    site.ahead_graph = nullptr;
    if (input && ggml_is_contiguous(input) && site.device->wants_ahead(site, ids->ne[0], ids->ne[1]) && input->ne[0] == site.next->router.weight->ne[0] && input->ne[1] == ids->ne[1]) {
        site.ahead_graph = ctx;
        site.ahead_input = src[1] = input;
        n_src = 2;
    }
    if (previous && previous->ahead_graph == ctx) {
        src[2] = previous->ahead_input;
        previous->ahead_graph = nullptr;
        n_src = 3;
    }
    return device_node(ctx, site.route_node, src, n_src, ids->ne[0], ids->ne[1]);
}

ggml_tensor * route(ggml_context * ctx, const spark_expert_hook * hook, ggml_tensor * ids, const void * context) {
    const expert_stack * stack = stack_of(hook);
    stack->layer->n_used.store((int32_t) ids->ne[0], std::memory_order_relaxed);
    if (stack->layer->is_unrouted) {
        return ids;
    }
    if (stack->store->device) {
        device_site * site = stack->store->device_site_for(*stack->layer, context);
        device_site * previous = stack->layer->index > 0 && (site - 1)->next == site ? site - 1 : nullptr; // a context's sites lie in layer order
        ggml_tensor * slots = device_route(ctx, *site, ids, previous);
        ggml_format_name(slots, "ffn_moe_slots-%d", stack->layer->file.layer);
        return slots;
    }
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
    if (stack->layer->is_unrouted) {
        return;
    }
    if (stack->store->device) {
        device_site * site = stack->store->device_site_for(*stack->layer, context);
        ggml_tensor * end = device_node(ctx, site->finish_node, &product, 1, 1, 1);
        ggml_format_name(end, "ffn_moe_slots_end-%d", stack->layer->file.layer);
        ggml_build_forward_expand(gf, end);
        return;
    }
    route_site * site = stack->store->site_for(*stack->layer, context);
    ggml_tensor * end = ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, &product, 1, compute_finish, 1, site);
    ggml_format_name(end, "ffn_moe_slots_end-%d", stack->layer->file.layer);
    ggml_build_forward_expand(gf, end);
}

} // namespace spark
