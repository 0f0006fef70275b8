// The graph side: turns expert ids into slots inside the graph.
#pragma once

struct ggml_cgraph;
struct ggml_context;
struct ggml_tensor;
struct spark_expert_hook;

namespace spark {

// See expert_hook.h for what these two do.
ggml_tensor * route(ggml_context * ctx, const spark_expert_hook * hook, ggml_tensor * ids, const void * context);
void          finish(ggml_context * ctx, ggml_cgraph * gf, const spark_expert_hook * hook, ggml_tensor * product, const void * context);

} // namespace spark
