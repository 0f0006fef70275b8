// The C API over speculation. Checks arguments, turns exceptions into statuses.
#include "spark_moe.h"

#include "speculative/speculation.h"
#include "status.h"

#include <algorithm>
#include <memory>
#include <string>

struct spark_speculation {
    explicit spark_speculation(const spark_speculation_params & params) : core(params) {}

    spark::speculation core;
};

namespace {

using spark::error;

void require(bool condition, const char * text) {
    if (!condition) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, text);
    }
}

llama_tokens to_tokens(const int32_t * tokens, int32_t n_tokens) {
    require(n_tokens >= 0 && (tokens || n_tokens == 0), "tokens is NULL, or their number negative");
    return { tokens, tokens + n_tokens };
}

// A caller whose array is too small has lost nothing but this call.
void put(const llama_tokens & tokens, int32_t * out, int32_t n_out, int32_t * n_tokens) {
    if (tokens.size() > (size_t) n_out) {
        throw error(SPARK_STATUS_INTERNAL, spark::format("%zu tokens for an array of %d", tokens.size(), n_out));
    }
    std::copy(tokens.begin(), tokens.end(), out);
    *n_tokens = (int32_t) tokens.size();
}

} // namespace

int32_t spark_speculation_init(const spark_speculation_params * params, spark_speculation ** out) {
    return spark::guard([&] {
        require(params && out && params->context, "params, its context or out is NULL");
        *out = std::make_unique<spark_speculation>(*params).release();
    });
}

void spark_speculation_free(spark_speculation * speculation) {
    delete speculation;
}

int32_t spark_speculation_begin(spark_speculation * speculation, const int32_t * prompt, int32_t n_prompt, const spark_sampling * sampling, int32_t * token) {
    return spark::guard([&] {
        require(speculation && sampling && token, "speculation, sampling or token is NULL");
        *token = speculation->core.begin(to_tokens(prompt, n_prompt), *sampling);
    });
}

int32_t spark_speculation_draft(spark_speculation * speculation, int32_t n_max, int32_t * tokens, int32_t * n_tokens) {
    return spark::guard([&] {
        require(speculation && tokens && n_tokens && n_max >= 0, "speculation, tokens or n_tokens is NULL, or n_max negative");
        put(speculation->core.draft(n_max), tokens, n_max, n_tokens);
    });
}

int32_t spark_speculation_verify(spark_speculation * speculation, const int32_t * drafted, int32_t n_drafted, int32_t * tokens, int32_t * n_tokens) {
    return spark::guard([&] {
        require(speculation && tokens && n_tokens, "speculation, tokens or n_tokens is NULL");
        put(speculation->core.verify(to_tokens(drafted, n_drafted)), tokens, n_drafted + 1, n_tokens);
    });
}

int32_t spark_speculation_accept(spark_speculation * speculation, int32_t n_keep, spark_speculation_step * out) {
    return spark::guard([&] {
        require(speculation && out, "speculation or out is NULL");
        *out = speculation->core.accept(n_keep);
    });
}

int32_t spark_speculation_decode(spark_speculation * speculation, const int32_t * tokens, int32_t n_tokens, int32_t pos0, int32_t logits) {
    return spark::guard([&] {
        require(speculation && n_tokens > 0, "speculation is NULL, or there are no tokens");
        require(logits >= SPARK_SPECULATION_LOGITS_LAST && logits <= SPARK_SPECULATION_LOGITS_VERIFY, "logits is no value of enum spark_speculation_logits");
        speculation->core.decode(to_tokens(tokens, n_tokens), pos0, (spark_speculation_logits) logits);
    });
}

int32_t spark_speculation_propose(spark_speculation * speculation, int32_t last, int32_t pos, int32_t n_max, int32_t * tokens, int32_t * n_tokens) {
    return spark::guard([&] {
        require(speculation && tokens && n_tokens && n_max >= 0, "speculation, tokens or n_tokens is NULL, or n_max negative");
        put(speculation->core.propose(last, pos, n_max), tokens, n_max, n_tokens);
    });
}

int32_t spark_speculation_keep(spark_speculation * speculation, int32_t n_accepted) {
    return spark::guard([&] {
        require(speculation, "speculation is NULL");
        speculation->core.keep(n_accepted);
    });
}

int32_t spark_speculation_adopt(spark_speculation * speculation, const int32_t * tokens, int32_t n_tokens) {
    return spark::guard([&] {
        require(speculation, "speculation is NULL");
        speculation->core.adopt(to_tokens(tokens, n_tokens));
    });
}

int32_t spark_speculation_n_past(const spark_speculation * speculation) {
    return speculation ? speculation->core.n_past() : 0;
}

int32_t spark_speculation_get_stats(const spark_speculation * speculation, spark_speculation_stats * out) {
    return spark::guard([&] {
        require(speculation && out, "speculation or out is NULL");
        const spark::drafting::report r = speculation->core.get_report();
        const auto ms = [&](server_phase phase) { return (double) r.steps.us[(int) phase]/1000.0; };
        *out = {
            r.steps.n_steps, r.steps.n_drafted, r.steps.n_accepted, r.n_pauses, r.is_broken, speculation->core.verifies_exactly(), (int32_t) r.steps.drafted_at.size(),
            ms(server_phase::draft), speculation->core.get_heads_ms(), ms(server_phase::verify), ms(server_phase::features), ms(server_phase::sampling), ms(server_phase::other),
        };
    });
}

int32_t spark_speculation_get_depths(const spark_speculation * speculation, uint64_t * drafted_at, uint64_t * accepted_at, int32_t n) {
    return spark::guard([&] {
        require(speculation && drafted_at && accepted_at, "speculation or an out is NULL");
        const spark::step_profile::totals steps = speculation->core.get_report().steps;
        require(n >= 0 && (size_t) n <= steps.drafted_at.size(), "more depths than drafts have had");
        std::copy_n(steps.drafted_at.begin(), n, drafted_at);
        std::copy_n(steps.accepted_at.begin(), n, accepted_at);
    });
}
