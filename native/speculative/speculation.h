// Speculative decoding of one sequence, driven from outside: the caller asks for a draft, has it verified, and says how much of what
// the target wrote is kept. Drafting and sampling are llama.cpp's (common/speculative.h, common/sampling.h).
#pragma once

#include "drafting.h"
#include "spark_moe.h"

#include "common.h"
#include "llama.h"
#include "sampling.h"
#include "speculative.h"

#include <array>
#include <cstdint>

namespace spark {

// Uses sequence 0 of the target's context. The last token of the text is pending: known, and not yet in the memory of the context.
// One thread at a time. Failures are spark::error.
class speculation {
public:
    explicit speculation(const spark_speculation_params & params);
    ~speculation();

    speculation(const speculation &) = delete;
    speculation & operator=(const speculation &) = delete;

    // ---- for callers that leave sampling to this class

    // The text begins anew. The first token after the prompt.
    llama_token begin(const llama_tokens & prompt, const spark_sampling & sampling);
    // Tokens that may follow the text, at most n_max; none where there is no room, or where drafting rests.
    llama_tokens draft(int32_t n_max);
    // What the target writes: as many tokens of `drafted` as it agrees with, and one more. Ends with an end of generation.
    llama_tokens verify(const llama_tokens & drafted);
    // Keeps the first n_keep of them; 0 undoes the step.
    spark_speculation_step accept(int32_t n_keep);
    // Tokens of the text before the pending one.
    int32_t n_past() const { return (int32_t) text.size(); }

    // ---- for callers that sample themselves

    // Computes tokens at positions pos0..; what was there and behind is forgotten.
    void decode(const llama_tokens & tokens, int32_t pos0, spark_speculation_logits logits);
    // Tokens that may follow `last`, which goes to position `pos`. What was computed there and behind is forgotten.
    llama_tokens propose(llama_token last, int32_t pos, int32_t n_max);
    // The first n of the tokens proposed last were kept; nothing where none were verified.
    void keep(int32_t n_accepted);
    // Someone else has changed the memory of the target's context, which holds these tokens now.
    void adopt(const llama_tokens & tokens);

    drafting::report get_report() const { return state.get(); }
    bool verifies_exactly() const { return is_exact; }
    // Of all steps in which a draft was verified; negative when that is not measured.
    double get_heads_ms() const { return measures_heads ? heads_us/1000.0 : -1; }

private:
    enum class stage { none, ready, verified };

    void check_pair(common_speculative_type type) const;
    void make_draft_context(const spark_speculation_params & params, common_speculative_type type);
    int32_t max_rows() const;
    void require_tokens(const llama_tokens & tokens) const;
    void compute(const llama_tokens & tokens, int32_t pos0, spark_speculation_logits logits);
    llama_tokens make_proposal(llama_token last, int32_t pos, int32_t n_max);
    void forget();
    void feed_draft();
    void clear_draft();
    void cut_draft(int32_t pos);
    void begin_step();
    void abandon_step();
    void end_phase(server_phase phase);

    llama_context * const ctx;
    const llama_model * const model;
    const llama_vocab * const vocab;
    const int32_t n_ctx;
    const int32_t n_draft; // tokens at a time
    const bool    exact_verify;
    const bool    measures_heads;

    // freed in reverse order: the drafting, then the draft's context
    common_speculative_init_result_ptr loaded;
    llama_context *        ctx_draft = nullptr; // loaded's
    common_speculative_ptr spec;
    common_batch           batch;
    bool is_memory_shared = false; // the draft reads the target's cache
    bool is_exact         = false; // every device of the target can round verified tokens as single ones

    common_sampler_ptr sampler;
    common_sampler_ptr sampler_before; // verify()
    stage        at      = stage::none;
    llama_token  pending = LLAMA_TOKEN_NULL;
    llama_tokens text;      // tokens in the memory of the context, by position
    llama_tokens proposal;  // made last
    llama_tokens drafted;   // verified last
    llama_tokens written;   // by the target, in verify()
    size_t       n_kept_most = 0; // of `written`, up to an end of generation
    int32_t      n_verified  = 0; // drafted tokens in the last batch of decode(), for keep()
    bool         has_drafted = false;

    drafting state;
    std::array<uint64_t, step_profile::N_PHASE> step_us {};
    int64_t last_us = 0; // 0: no step is open
    int64_t backbone_us   = 0; // when the draft's backbone was computed last; 0: not yet
    int64_t step_heads_us = 0;
    int64_t heads_us      = 0; // of all steps
};

} // namespace spark
