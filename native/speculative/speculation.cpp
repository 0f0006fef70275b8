#include "speculation.h"

#include "../status.h"

#include "llama-cpp.h"
#include "log.h"
#include "src/llama-ext.h"

#include <algorithm>
#include <cstring>

namespace spark {

namespace {

constexpr int32_t MAX_ROWS_ALONE = 64; // patches/0110

void require(bool condition, const std::string & text) {
    if (!condition) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, text);
    }
}

void require_stage(bool condition, const char * text) {
    if (!condition) {
        throw error(SPARK_STATUS_BAD_STATE, text);
    }
}

// llama.cpp's common library has a log of its own, which tells everyone what it loads. Warnings are enough from a library.
struct quiet {
    quiet() { common_log_set_verbosity_thold(std::min(before, LOG_LEVEL_WARN)); }
    ~quiet() { common_log_set_verbosity_thold(before); }

    const int before = common_log_get_verbosity_thold();
};

bool has_block(common_speculative_type type) {
    return type == COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH || type == COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK;
}

// llama.cpp asks for each node of the draft's graph whether to compute it before the next ones, and says when it has. A draft with a
// block is one pass, in which the heads follow the last norm of the backbone.
bool note_backbone(ggml_tensor * node, bool is_question, void * us) {
    if (is_question) {
        return strcmp(node->name, "result_norm") == 0;
    }
    *(int64_t *) us = ggml_time_us();
    return true;
}

common_speculative_type type_of(const char * name) {
    const common_speculative_type type = common_speculative_type_from_name(name ? name : "");
    switch (type) {
        case COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE:
        case COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3:
        case COMMON_SPECULATIVE_TYPE_DRAFT_MTP:
        case COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH:
        case COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK:
            return type;
        default:
            throw error(SPARK_STATUS_INVALID_ARGUMENT, format("'%s' is no kind of draft model: draft-simple, draft-eagle3, draft-mtp, draft-dflash or draft-dspark", name ? name : ""));
    }
}

common_params_sampling to_common(const spark_sampling & s) {
    common_params_sampling p;
    p.seed            = s.seed;
    p.temp            = s.temperature;
    p.top_k           = s.top_k;
    p.top_p           = s.top_p;
    p.min_p           = s.min_p;
    p.penalty_last_n  = s.penalty_last_n;
    p.penalty_repeat  = s.penalty_repeat;
    p.penalty_freq    = s.penalty_frequency;
    p.penalty_present = s.penalty_presence;
    if (s.grammar && s.grammar[0]) {
        p.grammar = { COMMON_GRAMMAR_TYPE_USER, s.grammar };
    }
    return p;
}

} // namespace

speculation::speculation(const spark_speculation_params & params)
    : ctx(params.context), model(llama_get_model(ctx)), vocab(llama_model_get_vocab(model)), n_ctx((int32_t) llama_n_ctx_seq(ctx)), n_draft(params.n_draft), exact_verify(params.exact_verify),
      measures_heads(params.measure_heads) {
    const common_speculative_type type = type_of(params.type);
    const int32_t n_most = std::min(max_rows(), n_ctx) - 1;
    require(params.n_draft >= 1 && params.n_draft <= n_most, format("%d tokens to draft at a time; this context allows 1 to %d", params.n_draft, n_most));
    require(!llama_model_is_recurrent(model) && !llama_model_is_hybrid(model), "the target has a recurrent memory, which cannot be cut back to the accepted tokens. Use it without a draft, or through dflash_server");
    require(!measures_heads || has_block(type), format("the heads of a %s draft are computed for each token anew, and are not measured apart", params.type));
    const quiet only_warnings;
    make_draft_context(params, type);
    check_pair(type);

    common_params_speculative p;
    p.types         = { type };
    p.draft.n_max   = params.n_draft;
    p.draft.ctx_tgt = ctx;
    p.draft.ctx_dft = ctx_draft;
    try {
        spec.reset(common_speculative_init(p, 1));
    } catch (const std::exception & e) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("the draft does not fit its target: %s", e.what()));
    }
    is_memory_shared = type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP && llama_get_ctx_other(ctx_draft) == ctx; // as llama.cpp tells it
    batch = common_batch(ctx);
    state.set_width(n_draft, n_draft, {}); // the caller's, who may ask for fewer
    is_exact = exact_verify && llama_set_rows_alone(ctx, true);
    llama_set_rows_alone(ctx, false);
    if (exact_verify && !is_exact) {
        log(log_level::warn, "draft: a device of the target cannot round verified tokens as single ones, so greedy text may differ from the text without a draft");
    }
}

speculation::~speculation() {
    // the target computes what it computed before
    if (ctx_draft) {
        const llama_model * draft = llama_get_model(ctx_draft);
        for (uint32_t i = 0; i < llama_model_target_layer_ids_n(draft); i++) {
            llama_set_embeddings_layer_inp(ctx, (uint32_t) llama_model_target_layer_ids(draft)[i], false);
        }
        llama_set_embeddings_nextn(ctx, false, false);
    }
}

void speculation::make_draft_context(const spark_speculation_params & params, common_speculative_type type) {
    const bool has_file = params.draft_path && params.draft_path[0];
    require(has_file || type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP, "draft_path is empty; only a next-token head can be in the target's own file");
    common_params p;
    p.n_ctx        = n_ctx;
    p.n_batch      = (int32_t) llama_n_batch(ctx);
    p.n_ubatch     = (int32_t) llama_n_ubatch(ctx);
    p.n_parallel   = 1;
    p.n_gpu_layers = params.n_gpu_layers;
    p.cpuparams.n_threads       = llama_n_threads(ctx);
    p.cpuparams_batch.n_threads = llama_n_threads(ctx); // its batches are as small as those that are verified, which use these
    p.speculative.types              = { type };
    p.speculative.draft.n_max        = params.n_draft;
    p.speculative.draft.n_gpu_layers = params.n_gpu_layers;
    if (measures_heads) {
        p.cb_eval           = note_backbone;
        p.cb_eval_user_data = &backbone_us;
    }
    if (has_file) {
        p.speculative.draft.mparams.path = params.draft_path;
    }
    common_params p_draft = common_base_params_to_speculative(p);
    loaded    = common_speculative_init_from_params(p_draft, const_cast<llama_model *>(model), ctx);
    ctx_draft = loaded->context();
    if (!ctx_draft) {
        throw error(has_file && !loaded->model() ? SPARK_STATUS_BAD_FORMAT : SPARK_STATUS_OUT_OF_MEMORY, has_file && !loaded->model() ? format("the draft model '%s' cannot be loaded", params.draft_path)
            : std::string("the context of the draft cannot be made"));
    }
}

// What common_speculative_init() would answer by ending the process.
void speculation::check_pair(common_speculative_type type) const {
    const llama_model * draft = llama_get_model(ctx_draft);
    const bool reads_layers = has_block(type) || type == COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3;
    if (reads_layers) {
        const uint32_t n = llama_model_target_layer_ids_n(draft);
        require(n > 0, "the draft does not say which layers of its target it reads");
        for (uint32_t i = 0; i < n; i++) {
            const int32_t layer = llama_model_target_layer_ids(draft)[i];
            require(layer >= 0 && layer <= llama_model_n_layer(model), format("the draft reads layer %d, the target has %d layers", layer, llama_model_n_layer(model)));
        }
        require(type == COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3 || llama_model_n_embd(draft) == llama_model_n_embd(model),
            format("the draft was made for a hidden size of %d, the target has %d", llama_model_n_embd(draft), llama_model_n_embd(model)));
    } else if (type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP) {
        require(llama_model_n_embd_out(draft) == llama_model_n_embd_out(model),
            format("the draft was made for a hidden size of %d, the target has %d", llama_model_n_embd_out(draft), llama_model_n_embd_out(model)));
    } else {
        require(!llama_model_is_recurrent(draft) && !llama_model_is_hybrid(draft), "the draft has a recurrent memory, which cannot be cut back to the accepted tokens. Give a draft without");
    }
}

// Tokens of one batch that is verified.
int32_t speculation::max_rows() const {
    const int32_t n_rows = (int32_t) std::min(llama_n_batch(ctx), llama_n_ubatch(ctx));
    return exact_verify ? std::min(n_rows, MAX_ROWS_ALONE) : n_rows;
}

void speculation::require_tokens(const llama_tokens & tokens) const {
    const int32_t n_vocab = llama_vocab_n_tokens(vocab);
    for (const llama_token t : tokens) {
        require(t >= 0 && t < n_vocab, format("token %d; the vocabulary has tokens 0 to %d", t, n_vocab - 1));
    }
}

// ---- the draft's memory

void speculation::clear_draft() {
    if (!is_memory_shared) {
        llama_memory_clear(llama_get_memory(ctx_draft), true);
    }
}

void speculation::cut_draft(int32_t pos) {
    if (is_memory_shared) {
        return;
    }
    llama_memory_t memory = llama_get_memory(ctx_draft);
    // EAGLE-3 keeps its last position for later, so two behind is no gap
    if (!llama_memory_seq_rm(memory, 0, pos, -1) || llama_memory_seq_pos_max(memory, 0) + 2 < pos) {
        clear_draft();
    }
}

// The target's activations of the batch go to the draft. Where it cannot take them its drafts begin anew: the text is not its business.
void speculation::feed_draft() {
    if (!common_speculative_process(spec.get(), batch)) {
        clear_draft();
        if (!common_speculative_process(spec.get(), batch)) {
            log(log_level::warn, "draft: %d tokens at position %d were not taken; the next drafts know less of the text", batch.size(), batch.tokens[0].pos[0]);
        }
    }
}

void speculation::adopt(const llama_tokens & tokens) {
    require_tokens(tokens);
    const int32_t n_memory = llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1;
    require(tokens.size() <= (size_t) n_memory, format("%zu tokens; the memory of the context holds %d", tokens.size(), n_memory));
    forget();
    text = tokens;
}

void speculation::forget() {
    clear_draft();
    text.clear();
    proposal.clear();
    n_verified = 0;
    at = stage::none;
    abandon_step();
}

// ---- time

void speculation::begin_step() {
    if (last_us == 0) {
        step_us = {};
        step_heads_us = 0;
        last_us = ggml_time_us();
    }
    end_phase(server_phase::other);
}

// What passes until the next step is nobody's.
void speculation::abandon_step() {
    state.request_finished();
    last_us = 0;
}

void speculation::end_phase(server_phase phase) {
    if (last_us == 0) {
        return; // a prompt is part of no step
    }
    const int64_t now_us = ggml_time_us();
    step_us[(int) phase] += (uint64_t) (now_us - last_us);
    last_us = now_us;
    state.phase_end(phase);
}

// ---- pieces

void speculation::compute(const llama_tokens & tokens, int32_t pos0, spark_speculation_logits logits) {
    const bool is_verify = logits == SPARK_SPECULATION_LOGITS_VERIFY;
    require_tokens(tokens);
    require(pos0 >= 0 && pos0 <= n_past(), format("position %d; the text has %d tokens", pos0, n_past()));
    require(tokens.size() <= (size_t) (n_ctx - pos0), format("%zu tokens at position %d; the context has %d", tokens.size(), pos0, n_ctx));
    require(!is_verify || tokens.size() <= (size_t) max_rows(), format("%zu tokens to verify; at most %d are at a time", tokens.size(), max_rows()));
    if (!llama_memory_seq_rm(llama_get_memory(ctx), 0, pos0, -1)) {
        throw error(SPARK_STATUS_INTERNAL, format("llama.cpp could not cut its memory at position %d", pos0));
    }
    text.resize(pos0);
    cut_draft(pos0);
    const size_t n_batch = llama_n_batch(ctx);
    for (size_t i0 = 0; i0 < tokens.size(); i0 += n_batch) {
        const size_t i1 = std::min(tokens.size(), i0 + n_batch);
        batch.clear();
        for (size_t i = i0; i < i1; i++) {
            batch.add(tokens[i], pos0 + (llama_pos) i, 0, logits != SPARK_SPECULATION_LOGITS_LAST || i + 1 == tokens.size());
        }
        llama_set_rows_alone(ctx, is_verify && exact_verify);
        const int status = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get());
        llama_synchronize(ctx);
        llama_set_rows_alone(ctx, false);
        end_phase(server_phase::verify);
        if (status != 0) {
            llama_memory_seq_rm(llama_get_memory(ctx), 0, n_past(), -1);
            throw error(SPARK_STATUS_INTERNAL, format("llama.cpp could not compute %zu tokens at position %d (status %d)", i1 - i0, pos0 + (int) i0, status));
        }
        feed_draft();
        end_phase(server_phase::features);
        text.insert(text.end(), tokens.begin() + i0, tokens.begin() + i1);
    }
}

llama_tokens speculation::make_proposal(llama_token last, int32_t pos, int32_t n_max) {
    text.resize(pos);
    cut_draft(pos);
    proposal.clear();
    const int32_t n = std::min(n_max, n_draft);
    // a draft computes all of its block, whose tokens have positions
    if (n <= 0 || pos + n_draft + 1 > n_ctx || state.n_draft(0, n) == 0) {
        return proposal;
    }
    begin_step();
    backbone_us = 0;
    common_speculative_get_draft_params(spec.get(), 0) = { /*.drafting =*/ true, /*.n_max =*/ n, /*.pos0 =*/ pos, /*.id_last =*/ last, /*.prompt =*/ &text, /*.result =*/ &proposal };
    common_speculative_draft(spec.get());
    if ((int32_t) proposal.size() > n) {
        proposal.resize(n);
    }
    if (!is_memory_shared) {
        llama_memory_seq_rm(llama_get_memory(ctx_draft), 0, pos, -1);
    }
    has_drafted = has_drafted || !proposal.empty();
    state.drafted(0, ctx_draft, proposal.size());
    end_phase(server_phase::draft);
    step_heads_us += backbone_us ? last_us - backbone_us : 0;
    return proposal;
}

void speculation::decode(const llama_tokens & tokens, int32_t pos0, spark_speculation_logits logits) {
    const bool is_verify = logits == SPARK_SPECULATION_LOGITS_VERIFY;
    if (!is_verify) {
        abandon_step();
    }
    n_verified = 0;
    compute(tokens, pos0, logits);
    at = stage::none;
    n_verified = is_verify ? (int32_t) std::min(proposal.size(), tokens.size() - 1) : 0;
}

llama_tokens speculation::propose(llama_token last, int32_t pos, int32_t n_max) {
    require_stage(at == stage::none, "a text with a sampler is open, which drafts by itself");
    require_tokens({ last });
    require(pos >= 0 && pos <= n_past(), format("position %d; the text has %d tokens", pos, n_past()));
    n_verified = 0;
    return make_proposal(last, pos, n_max);
}

void speculation::keep(int32_t n_accepted) {
    if (n_verified > 0) {
        require(n_accepted >= 0 && n_accepted <= n_verified, format("%d tokens accepted of %d", n_accepted, n_verified));
        common_speculative_accept(spec.get(), 0, (uint16_t) n_accepted);
        state.verified(0, n_accepted);
        heads_us += step_heads_us;
        end_phase(server_phase::other); // the caller's: sampling, and whatever it did with the tokens
    }
    n_verified = 0;
    abandon_step();
}

// ---- a text with a sampler

llama_token speculation::begin(const llama_tokens & prompt, const spark_sampling & sampling) {
    require(!prompt.empty(), "an empty prompt");
    require(prompt.size() < (size_t) n_ctx, format("a prompt of %zu tokens; the context has %d, and one must be left to write", prompt.size(), n_ctx));
    require_tokens(prompt);
    if (sampling.grammar && sampling.grammar[0]) { // common_sampler_init() leaks what it has made before it looks
        const llama_sampler_ptr grammar(llama_sampler_init_grammar(vocab, sampling.grammar, "root"));
        require(grammar != nullptr, "the grammar is not GBNF that llama.cpp can read; its log says where");
    }
    common_params_sampling p = to_common(sampling);
    common_sampler_ptr fresh(common_sampler_init(model, p));
    require(fresh != nullptr, "llama.cpp cannot make a sampler of these values");
    forget();
    compute(prompt, 0, SPARK_SPECULATION_LOGITS_LAST);
    common_speculative_begin(spec.get(), 0, text);
    for (const llama_token t : prompt) {
        common_sampler_accept(fresh.get(), t, /*is_generated =*/ false);
    }
    pending = common_sampler_sample(fresh.get(), ctx, -1);
    common_sampler_accept(fresh.get(), pending, /*is_generated =*/ true);
    sampler = std::move(fresh);
    at = stage::ready;
    return pending;
}

llama_tokens speculation::draft(int32_t n_max) {
    require_stage(at == stage::ready, at == stage::none ? "nothing to continue: begin a text first" : "the last step is open: accept it first");
    return make_proposal(pending, n_past(), n_max);
}

llama_tokens speculation::verify(const llama_tokens & tokens) {
    require_stage(at == stage::ready, at == stage::none ? "nothing to continue: begin a text first" : "the last step is open: accept it first");
    require_stage(n_past() < n_ctx, "the context is full");
    const size_t n_most = (size_t) std::min(n_ctx - n_past(), max_rows()) - 1;
    require(tokens.size() <= n_most, format("%zu tokens to verify; there is room for %zu", tokens.size(), n_most));
    require_tokens(tokens);
    begin_step();
    llama_tokens rows = { pending };
    rows.insert(rows.end(), tokens.begin(), tokens.end());
    const int32_t pos = n_past();
    compute(rows, pos, SPARK_SPECULATION_LOGITS_VERIFY);
    text.resize(pos); // until accept() says what stays
    drafted = tokens;
    sampler_before.reset(common_sampler_clone(sampler.get()));
    written = common_sampler_sample_and_accept_n(sampler.get(), ctx, drafted);
    const auto end = std::find_if(written.begin(), written.end(), [&](llama_token t) { return llama_vocab_is_eog(vocab, t); });
    n_kept_most = (size_t) (end - written.begin()) + (end != written.end());
    at = stage::verified;
    end_phase(server_phase::sampling);
    return { written.begin(), written.begin() + n_kept_most };
}

spark_speculation_step speculation::accept(int32_t n_keep) {
    require_stage(at == stage::verified, "nothing was verified");
    require(n_keep >= 0 && (size_t) n_keep <= n_kept_most, format("%d tokens to keep of %zu", n_keep, n_kept_most));
    end_phase(server_phase::other); // what the caller did since
    const size_t n = (size_t) n_keep;
    if (n < written.size()) { // the sampler as it was after token n, its random numbers included
        sampler = std::move(sampler_before);
        if (n > 0) {
            common_sampler_sample_and_accept_n(sampler.get(), ctx, llama_tokens(drafted.begin(), drafted.begin() + (n - 1)));
        }
    }
    const int32_t n_accepted = (int32_t) std::min(n, written.size() - 1);
    if (n > 0) {
        text.push_back(pending);
        text.insert(text.end(), written.begin(), written.begin() + (n - 1));
        pending = written[n - 1];
        if (has_drafted && !drafted.empty()) {
            common_speculative_accept(spec.get(), 0, (uint16_t) (n - 1));
        }
    }
    cut_draft(n_past());
    at = stage::ready;
    if (!llama_memory_seq_rm(llama_get_memory(ctx), 0, n_past(), -1)) {
        at = stage::none;
        throw error(SPARK_STATUS_INTERNAL, format("llama.cpp could not cut its memory at position %d", n_past()));
    }
    end_phase(server_phase::other);
    if (n > 0 && !drafted.empty()) {
        state.drafted(0, nullptr, drafted.size()); // these, whoever proposed them
        state.verified(0, (size_t) n_accepted);
        heads_us += step_heads_us;
    }
    abandon_step();
    const auto ms = [&](server_phase phase) { return (double) step_us[(int) phase]/1000.0; };
    return { (int32_t) drafted.size(), n_accepted, ms(server_phase::draft), measures_heads ? step_heads_us/1000.0 : -1, ms(server_phase::verify), ms(server_phase::features), ms(server_phase::sampling), ms(server_phase::other) };
}

} // namespace spark
