// What the patched llm_graph_context::build_lora_mm_id sees of an expert store (patches/0010).
//
// A tensor with GGML_TENSOR_FLAG_EXPERT_STACK set has one of these in `extra`: its experts are read from `stack`, a
// tensor with more slots than experts, through slot numbers that `route` makes out of expert ids. The hook finds its
// store through the tensor, never through a global, so several models and stores live side by side.
#pragma once

#include "ggml.h"

struct spark_expert_hook {
    struct ggml_tensor * stack; // [ne0, ne1, n_slots], same type and stride as the weight
    const void         * layer; // same for all expert tensors of one layer: their slots are made once and shared

    // Adds the op that turns ids [n_expert_used, n_tokens] (I32, any strides) into slots of the same shape.
    // `context` identifies the context that will compute the graph.
    struct ggml_tensor * (*route)(struct ggml_context * ctx, const struct spark_expert_hook * hook, struct ggml_tensor * ids, const void * context);
    // Called after each product; may add a node to `gf` that ends the use of the slots once `product` is computed.
    void (*finish)(struct ggml_context * ctx, struct ggml_cgraph * gf, const struct spark_expert_hook * hook, struct ggml_tensor * product, const void * context);
};
