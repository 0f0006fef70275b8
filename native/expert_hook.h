// What the patched llama.cpp and ggml see of an expert store (patches/0010, patches/0060).
//
// A tensor with GGML_TENSOR_FLAG_EXPERT_STACK set has a spark_expert_hook in `extra`: its experts are read from `stack`,
// a tensor with more slots than experts, through slot numbers that `route` makes out of expert ids. The hook finds its
// store through the tensor, never through a global, so several models and stores live side by side.
//
// A node of a graph (GGML_OP_CUSTOM) with the same flag has a spark_device_op in `extra`: it runs on a device.
#pragma once

#include "ggml.h"
#include "ggml-backend.h"

#include <string.h>

#define SPARK_EXPERT_BUFFER_NAME "SPARK_EXPERTS" // of every buffer type that holds expert stacks, on any device

struct spark_expert_hook {
    struct ggml_tensor * stack; // [ne0, ne1, n_slots], same type and stride as the weight
    const void         * layer; // same for all expert tensors of one layer: their slots are made once and shared

    // Adds the op that turns ids [n_expert_used, n_tokens] (I32, any strides) into slots of the same shape.
    // `context` identifies the context that will compute the graph.
    struct ggml_tensor * (*route)(struct ggml_context * ctx, const struct spark_expert_hook * hook, struct ggml_tensor * ids, const void * context);
    // Called after each product; may add a node to `gf` that ends the use of the slots once `product` is computed.
    void (*finish)(struct ggml_context * ctx, struct ggml_cgraph * gf, const struct spark_expert_hook * hook, struct ggml_tensor * product, const void * context);
};

struct spark_device_op {
    ggml_backend_dev_t device; // the only one that can run the node
    // Puts the node's work on `stream` (a cudaStream_t); nothing waits. While a CUDA graph is recorded, what is put there is recorded.
    void (*enqueue)(struct ggml_tensor * node, void * stream);
    // False when enqueue must be called at every run of the graph, so that the graph cannot be recorded and replayed.
    bool (*is_capturable)(const struct ggml_tensor * node);
};

static inline const struct spark_device_op * spark_device_op_of(const struct ggml_tensor * node) {
    return node->flags & GGML_TENSOR_FLAG_EXPERT_STACK ? (const struct spark_device_op *) node->extra : NULL;
}

static inline bool spark_device_op_runs_on(const struct ggml_tensor * node, ggml_backend_dev_t device) {
    return spark_device_op_of(node) && spark_device_op_of(node)->device == device;
}

static inline bool spark_device_op_is_capturable(const struct ggml_tensor * node) {
    return spark_device_op_of(node) && spark_device_op_of(node)->is_capturable(node);
}

static inline void spark_device_op_enqueue(struct ggml_tensor * node, void * stream) {
    GGML_ASSERT(spark_device_op_of(node));
    spark_device_op_of(node)->enqueue(node, stream);
}

static inline bool spark_buft_is_expert_stack(ggml_backend_buffer_type_t buft) {
    return strcmp(ggml_backend_buft_name(buft), SPARK_EXPERT_BUFFER_NAME) == 0;
}

// A stack itself, not the model's tensor: what products of routed experts read.
static inline bool spark_is_expert_stack(const struct ggml_tensor * tensor) {
    return tensor->buffer && spark_buft_is_expert_stack(ggml_backend_buffer_get_type(tensor->buffer));
}
