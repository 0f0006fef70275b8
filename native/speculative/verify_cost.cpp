#include "verify_cost.h"

#include "../status.h"

#include "ggml.h"
#include "llama.h"
#include "src/llama-ext.h"

#include <algorithm>
#include <limits>

namespace spark {

namespace {

constexpr int    ROUNDS      = 4;
constexpr double MAX_STEP_MS = 1000;
constexpr double CURVE_MS    = 2000; // no new round of the curve's steps after so long
constexpr int    CURVE_ROUNDS = 5;
constexpr int32_t MAX_ROWS    = 64; // of a step that rounds tokens as single ones (patches/0110)

// Milliseconds of a step whose tokens all have outputs, n_of_sequence of the same sequence; negative when it fails.
double step_ms(llama_context * context, int32_t n_tokens, int32_t n_of_sequence) {
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    llama_batch batch = llama_batch_init(n_tokens, 0, 1);
    batch.n_tokens = n_tokens;
    for (int32_t i = 0; i < n_tokens; i++) {
        batch.token[i]     = (llama_token) (i*31 % n_vocab);
        batch.pos[i]       = i % n_of_sequence;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = i / n_of_sequence;
        batch.logits[i]    = true;
    }
    llama_memory_clear(llama_get_memory(context), false);
    const int64_t start_us = ggml_time_us();
    const bool ok = llama_decode(context, batch) == 0;
    llama_synchronize(context);
    const double ms = (ggml_time_us() - start_us)/1000.0;
    llama_batch_free(batch);
    return ok ? ms : -1;
}

} // namespace

verify_cost measure_verify_cost(llama_context * context, int32_t n_tokens) {
    verify_cost cost;
    cost.is_exact = llama_set_rows_alone(context, true);
    if (!cost.is_exact) {
        return cost;
    }
    cost.exact_ms = cost.fast_ms = std::numeric_limits<double>::max();
    const double first_ms = step_ms(context, n_tokens, n_tokens);
    bool is_measured = first_ms >= 0 && first_ms <= MAX_STEP_MS;
    for (int i = 0; i < 2*ROUNDS && is_measured; i++) {
        const bool is_exact = i % 2 == 0;
        llama_set_rows_alone(context, is_exact);
        const double ms = step_ms(context, n_tokens, n_tokens);
        double & best = is_exact ? cost.exact_ms : cost.fast_ms;
        best = std::min(best, ms);
        is_measured = ms >= 0;
    }
    cost.n_tokens = is_measured ? n_tokens : 0;
    llama_set_rows_alone(context, true);
    llama_memory_clear(llama_get_memory(context), true);
    llama_perf_context_reset(context);
    return cost;
}

std::vector<step_cost::point> measure_verify_curve(llama_context * context, int32_t n_of_sequence) {
    const int32_t n_rows_most = std::min<int32_t>({ MAX_ROWS, n_of_sequence*(int32_t) llama_n_seq_max(context), (int32_t) llama_n_ubatch(context) });
    std::vector<step_cost::point> curve;
    for (int32_t n = 1; n <= n_rows_most; n += n < 8 ? 1 : std::max(1, n/4)) { // kernels change between few rows, and seldom beyond
        curve.push_back({ n, std::numeric_limits<double>::max() });
    }
    if (!curve.empty() && curve.back().n_rows < n_rows_most) {
        curve.push_back({ n_rows_most, std::numeric_limits<double>::max() });
    }
    const int64_t start_us = ggml_time_us();
    bool ok = true;
    for (int round = -1; round < CURVE_ROUNDS && ok; round++) { // the first allocates, and does not count
        for (step_cost::point & p : curve) {
            const double ms = step_ms(context, p.n_rows, n_of_sequence);
            ok = ok && ms >= 0;
            p.ms = round < 0 ? p.ms : std::min(p.ms, ms);
        }
        if (round >= 0 && (ggml_time_us() - start_us)/1000.0 > CURVE_MS) {
            break;
        }
    }
    for (size_t i = curve.size(); i-- > 1;) { // fewer rows take no longer; where they seem to, the machine was busy
        curve[i - 1].ms = std::min(curve[i - 1].ms, curve[i].ms);
    }
    llama_memory_clear(llama_get_memory(context), true);
    llama_perf_context_reset(context);
    return ok ? curve : std::vector<step_cost::point>();
}

std::string describe(const verify_cost & cost) {
    if (!cost.is_exact) {
        return "draft: a device of this model rounds verified tokens in groups, so greedy text may differ from the text without a draft";
    }
    const std::string what = "draft: verified tokens are rounded as single ones, so greedy text is the text without a draft";
    if (cost.n_tokens == 0) {
        return what + "; what that costs was not measured";
    }
    return what + format("; a step of %d takes %.2f instead of %.2f ms here (%+.0f %%), --no-exact-verify gives that up", cost.n_tokens, cost.exact_ms, cost.fast_ms, 100*cost.share());
}

std::string describe(const std::vector<step_cost::point> & curve) {
    if (curve.size() < 2) {
        return "";
    }
    const step_cost::point & one = curve.front(), & half = curve[curve.size()/2], & most = curve.back();
    return format("; steps of %d, %d and %d take %.2f, %.2f and %.2f ms here", one.n_rows, half.n_rows, most.n_rows, one.ms, half.ms, most.ms);
}

} // namespace spark
