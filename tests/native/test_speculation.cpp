// Draft, verify and accept through the C API, on the demo pair: the text is the target's own, whatever is kept of a step, and
// whatever is freed first.
#include "check.h"
#include "spark_moe.h"

#include "llama.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

using tokens = std::vector<int32_t>;

const std::string TARGET = SPARK_TEST_MODELS "/target-Q4_K_M.gguf";
const std::string DRAFT  = SPARK_TEST_MODELS "/draft-q8_0.gguf";
constexpr int32_t N_DRAFT = 4;
constexpr int32_t N_CTX   = 256; // llama.cpp rounds up to this

struct target {
    target() {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = params.n_batch = params.n_ubatch = N_CTX;
        params.n_threads = params.n_threads_batch = 1;
        model.reset(llama_model_load_from_file(TARGET.c_str(), llama_model_default_params()));
        context.reset(llama_init_from_model(model.get(), params));
    }

    tokens tokenize(const char * text) const {
        tokens ids(64);
        ids.resize(llama_tokenize(llama_model_get_vocab(model.get()), text, (int32_t) strlen(text), ids.data(), (int32_t) ids.size(), true, false));
        return ids;
    }

    // What it writes alone, greedily, token by token.
    tokens write(tokens text, int n) {
        llama_memory_clear(llama_get_memory(context.get()), true);
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
        tokens written;
        while ((int) written.size() < n) {
            if (llama_decode(context.get(), llama_batch_get_one(text.data(), (int32_t) text.size()))) {
                break;
            }
            const float * logits = llama_get_logits_ith(context.get(), -1);
            written.push_back((int32_t) (std::max_element(logits, logits + n_vocab) - logits));
            text = { written.back() };
        }
        return written;
    }

    struct free_model   { void operator()(llama_model * m) const { llama_model_free(m); } };
    struct free_context { void operator()(llama_context * c) const { llama_free(c); } };
    std::unique_ptr<llama_model, free_model>     model;
    std::unique_ptr<llama_context, free_context> context;
};

spark_speculation_params params_for(const target & t) {
    return { t.context.get(), DRAFT.c_str(), "draft-dspark", N_DRAFT, 0, true, false };
}

struct free_speculation { void operator()(spark_speculation * s) const { spark_speculation_free(s); } };
using speculation = std::unique_ptr<spark_speculation, free_speculation>;

speculation open(const target & t) {
    const spark_speculation_params params = params_for(t);
    spark_speculation * out = nullptr;
    CHECK_EQ(spark_speculation_init(&params, &out), SPARK_STATUS_OK);
    return speculation(out);
}

bool last_error_has(const char * part) { return strstr(spark_last_error(), part) != nullptr; }

spark_sampling greedy() {
    spark_sampling s = {};
    s.top_p = s.penalty_repeat = 1;
    return s;
}

// One step; n_keep negative: everything. What was kept.
tokens step(spark_speculation * s, int32_t n_keep = -1, spark_speculation_step * out = nullptr) {
    tokens drafted(N_DRAFT), written(N_DRAFT + 1);
    int32_t n_drafted = 0, n_written = 0;
    CHECK_EQ(spark_speculation_draft(s, N_DRAFT, drafted.data(), &n_drafted), SPARK_STATUS_OK);
    CHECK_EQ(spark_speculation_verify(s, drafted.data(), n_drafted, written.data(), &n_written), SPARK_STATUS_OK);
    CHECK(n_written >= 1 && n_written <= n_drafted + 1);
    written.resize(n_keep < 0 ? n_written : std::min(n_keep, n_written));
    spark_speculation_step unused;
    CHECK_EQ(spark_speculation_accept(s, (int32_t) written.size(), out ? out : &unused), SPARK_STATUS_OK);
    return written;
}

tokens begin(spark_speculation * s, const tokens & prompt, const spark_sampling & sampling) {
    int32_t token = -1;
    CHECK_EQ(spark_speculation_begin(s, prompt.data(), (int32_t) prompt.size(), &sampling, &token), SPARK_STATUS_OK);
    CHECK_EQ(spark_speculation_n_past(s), (int32_t) prompt.size());
    return { token };
}

void append(tokens & to, const tokens & from) { to.insert(to.end(), from.begin(), from.end()); }

// A refusal changes nothing.
void bad_arguments() {
    target t;
    spark_speculation * const untouched = reinterpret_cast<spark_speculation *>(&t);
    spark_speculation * out = untouched;
    spark_speculation_params params = params_for(t);
    const auto status = [&] {
        const int32_t s = spark_speculation_init(&params, &out);
        CHECK(out == untouched);
        return s;
    };
    CHECK_EQ(spark_speculation_init(nullptr, &out), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_init(&params, nullptr), SPARK_STATUS_INVALID_ARGUMENT);
    params.context = nullptr;
    CHECK_EQ(status(), SPARK_STATUS_INVALID_ARGUMENT);
    for (const char * type : { "", "draft", "ngram-simple", "none", (const char *) nullptr }) {
        params = params_for(t);
        params.type = type;
        CHECK_EQ(status(), SPARK_STATUS_INVALID_ARGUMENT);
    }
    for (const int32_t n : { 0, -1, INT_MIN, 64, INT_MAX }) {
        params = params_for(t);
        params.n_draft = n;
        CHECK_EQ(status(), SPARK_STATUS_INVALID_ARGUMENT);
        CHECK(last_error_has(std::to_string(n).c_str()));
    }
    params = params_for(t);
    params.draft_path = "";
    CHECK_EQ(status(), SPARK_STATUS_INVALID_ARGUMENT);
    params = params_for(t);
    params.type = "draft-simple"; // more than one pass
    params.measure_heads = true;
    CHECK_EQ(status(), SPARK_STATUS_INVALID_ARGUMENT);
    params = params_for(t);
    params.draft_path = "no-such-draft.gguf";
    CHECK_EQ(status(), SPARK_STATUS_BAD_FORMAT);
    CHECK(last_error_has("no-such-draft.gguf"));

    const speculation s = open(t);
    const spark_sampling sampling = greedy();
    int32_t token = 7, n = 7, array[2] = { 1, 2 };
    spark_speculation_step step;
    spark_speculation_stats stats;
    uint64_t depths[1];
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(t.model.get()));
    CHECK_EQ(spark_speculation_begin(nullptr, array, 2, &sampling, &token), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_begin(s.get(), nullptr, 2, &sampling, &token), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_begin(s.get(), array, 0, &sampling, &token), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_begin(s.get(), array, -1, &sampling, &token), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_begin(s.get(), array, 2, nullptr, &token), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_begin(s.get(), array, 2, &sampling, nullptr), SPARK_STATUS_INVALID_ARGUMENT);
    for (const int32_t bad : { -1, n_vocab, INT_MAX }) {
        array[1] = bad;
        CHECK_EQ(spark_speculation_begin(s.get(), array, 2, &sampling, &token), SPARK_STATUS_INVALID_ARGUMENT);
        CHECK_EQ(spark_speculation_decode(s.get(), array, 2, 0, SPARK_SPECULATION_LOGITS_LAST), SPARK_STATUS_INVALID_ARGUMENT);
        CHECK_EQ(spark_speculation_propose(s.get(), bad, 0, 2, array, &n), SPARK_STATUS_INVALID_ARGUMENT);
        CHECK_EQ(spark_speculation_adopt(s.get(), array, 2), SPARK_STATUS_INVALID_ARGUMENT);
    }
    array[1] = 2;
    const tokens too_long(N_CTX, 1);
    CHECK_EQ(spark_speculation_begin(s.get(), too_long.data(), N_CTX, &sampling, &token), SPARK_STATUS_INVALID_ARGUMENT);
    spark_sampling with_grammar = greedy();
    with_grammar.grammar = "root ::= (";
    CHECK_EQ(spark_speculation_begin(s.get(), array, 2, &with_grammar, &token), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK(last_error_has("grammar"));

    CHECK_EQ(spark_speculation_draft(s.get(), 2, array, &n), SPARK_STATUS_BAD_STATE);
    CHECK_EQ(spark_speculation_verify(s.get(), array, 1, array, &n), SPARK_STATUS_BAD_STATE);
    CHECK_EQ(spark_speculation_accept(s.get(), 0, &step), SPARK_STATUS_BAD_STATE);
    CHECK_EQ(spark_speculation_draft(s.get(), -1, array, &n), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_decode(s.get(), array, 0, 0, SPARK_SPECULATION_LOGITS_LAST), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_decode(s.get(), array, 2, 1, SPARK_SPECULATION_LOGITS_LAST), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_decode(s.get(), array, 2, -1, SPARK_SPECULATION_LOGITS_LAST), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_decode(s.get(), array, 2, 0, 3), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_decode(s.get(), too_long.data(), 65, 0, SPARK_SPECULATION_LOGITS_VERIFY), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_propose(s.get(), 1, 1, 2, array, &n), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_adopt(s.get(), array, 1), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK(last_error_has("holds 0"));
    CHECK_EQ(spark_speculation_get_stats(s.get(), nullptr), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_get_stats(nullptr, &stats), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_get_depths(s.get(), depths, depths, 1), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_get_stats(s.get(), &stats), SPARK_STATUS_OK);
    CHECK(stats.n_steps == 0 && stats.is_exact && !stats.is_broken);
    CHECK_EQ(token, 7);
    CHECK_EQ(spark_speculation_n_past(s.get()), 0);
    CHECK_EQ(spark_speculation_n_past(nullptr), 0);
}

void text_is_the_targets_own() {
    target t;
    const tokens prompt = t.tokenize("def fibonacci(n):\n");
    const tokens expected = t.write(prompt, 48);
    {
        const speculation s = open(t);
        tokens text = begin(s.get(), prompt, greedy());
        uint64_t n_steps = 0, n_drafted = 0, n_accepted = 0;
        double ms = 0;
        while (text.size() < expected.size()) {
            spark_speculation_step one;
            append(text, step(s.get(), -1, &one));
            n_steps += one.n_drafted > 0;
            n_drafted += one.n_drafted;
            n_accepted += one.n_accepted;
            CHECK(one.draft_ms > 0 && one.verify_ms > 0 && one.features_ms > 0 && one.sampling_ms >= 0 && one.other_ms >= 0);
            ms += one.draft_ms + one.verify_ms + one.features_ms + one.sampling_ms + one.other_ms;
        }
        CHECK_EQ(spark_speculation_n_past(s.get()), (int32_t) (prompt.size() + text.size() - 1));
        text.resize(expected.size());
        CHECK(text == expected);
        CHECK(n_accepted > 10); // or nothing was tested

        spark_speculation_stats stats;
        CHECK_EQ(spark_speculation_get_stats(s.get(), &stats), SPARK_STATUS_OK);
        CHECK_EQ(stats.n_steps, n_steps);
        CHECK_EQ(stats.n_drafted, n_drafted);
        CHECK_EQ(stats.n_accepted, n_accepted);
        CHECK_EQ(stats.n_depths, N_DRAFT);
        CHECK(stats.heads_ms < 0);
        const double sum = stats.draft_ms + stats.verify_ms + stats.features_ms + stats.sampling_ms + stats.other_ms;
        CHECK(sum > 0.9*ms && sum < 1.1*ms);
        std::vector<uint64_t> drafted_at(N_DRAFT), accepted_at(N_DRAFT);
        CHECK_EQ(spark_speculation_get_depths(s.get(), drafted_at.data(), accepted_at.data(), N_DRAFT), SPARK_STATUS_OK);
        uint64_t sum_drafted = 0, sum_accepted = 0;
        for (int i = 0; i < N_DRAFT; i++) {
            CHECK(i == 0 || accepted_at[i] <= accepted_at[i - 1]);
            sum_drafted += drafted_at[i];
            sum_accepted += accepted_at[i];
        }
        CHECK_EQ(sum_drafted, n_drafted);
        CHECK_EQ(sum_accepted, n_accepted);
    }
    CHECK(t.write(prompt, 48) == expected); // the target is what it was
}

// A caller may keep less than the target wrote, or nothing: the text, and a sampler with random numbers, go on as if it had been so.
void anything_can_be_kept() {
    target t;
    const tokens prompt = t.tokenize("import os\n");
    spark_sampling random = greedy();
    random.temperature = 0.9f;
    random.seed = 42;
    random.top_k = 40;
    random.penalty_last_n = 16;
    random.penalty_repeat = 1.1f;
    for (const spark_sampling & sampling : { greedy(), random }) {
        const speculation s = open(t);
        tokens expected = begin(s.get(), prompt, sampling);
        while (expected.size() < 20) {
            append(expected, step(s.get()));
        }
        for (const int32_t n_keep : { 1, 3 }) {
            tokens text = begin(s.get(), prompt, sampling);
            while (text.size() < 20) {
                CHECK(step(s.get(), 0).empty());
                append(text, step(s.get(), n_keep));
            }
            CHECK(std::equal(text.begin(), text.begin() + 20, expected.begin()));
        }
    }
}

void a_step_has_an_order() {
    target t;
    const speculation s = open(t);
    const tokens prompt = t.tokenize("x = 1\n");
    begin(s.get(), prompt, greedy());
    int32_t n = 0, drafted[N_DRAFT], written[N_DRAFT + 1];
    spark_speculation_step one;
    CHECK_EQ(spark_speculation_accept(s.get(), 0, &one), SPARK_STATUS_BAD_STATE);
    CHECK_EQ(spark_speculation_propose(s.get(), 1, 0, N_DRAFT, drafted, &n), SPARK_STATUS_BAD_STATE);
    CHECK_EQ(spark_speculation_verify(s.get(), drafted, 0, written, &n), SPARK_STATUS_OK); // no draft: one token
    CHECK_EQ(n, 1);
    CHECK_EQ(spark_speculation_verify(s.get(), drafted, 0, written, &n), SPARK_STATUS_BAD_STATE);
    CHECK_EQ(spark_speculation_draft(s.get(), N_DRAFT, drafted, &n), SPARK_STATUS_BAD_STATE);
    CHECK_EQ(spark_speculation_accept(s.get(), 2, &one), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_accept(s.get(), -1, &one), SPARK_STATUS_INVALID_ARGUMENT);
    CHECK_EQ(spark_speculation_accept(s.get(), 1, &one), SPARK_STATUS_OK);
    CHECK_EQ(one.n_drafted, 0);
    CHECK_EQ(spark_speculation_decode(s.get(), prompt.data(), 2, 0, SPARK_SPECULATION_LOGITS_LAST), SPARK_STATUS_OK); // ends the text
    CHECK_EQ(spark_speculation_draft(s.get(), N_DRAFT, drafted, &n), SPARK_STATUS_BAD_STATE);
}

// To the last cell of the context, and not behind it.
void text_ends_with_the_context() {
    target t;
    tokens prompt = t.tokenize("def f():\n");
    while (prompt.size() < N_CTX - 24) {
        prompt.push_back(prompt[prompt.size() % 5]);
    }
    const tokens expected = t.write(prompt, N_CTX - (int) prompt.size() + 1);
    const speculation s = open(t);
    tokens text = begin(s.get(), prompt, greedy());
    while (spark_speculation_n_past(s.get()) < N_CTX) {
        append(text, step(s.get()));
    }
    CHECK(text == expected);
    int32_t n = 7, out[1];
    CHECK_EQ(spark_speculation_draft(s.get(), 1, out, &n), SPARK_STATUS_OK);
    CHECK_EQ(n, 0);
    CHECK_EQ(spark_speculation_verify(s.get(), out, 0, out, &n), SPARK_STATUS_BAD_STATE);
    CHECK(last_error_has("full"));
}

// The calls for a caller with its own sampler, here the likeliest token.
void callers_may_sample_themselves() {
    target t;
    const tokens prompt = t.tokenize("class Point:\n");
    const tokens expected = t.write(prompt, 30);
    const speculation s = open(t);
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(t.model.get()));
    const auto likeliest = [&](int32_t row) {
        const float * logits = llama_get_logits_ith(t.context.get(), row);
        return (int32_t) (std::max_element(logits, logits + n_vocab) - logits);
    };
    for (const bool is_adopted : { false, true }) { // once with what the calls computed, once with what was there already
        if (is_adopted) {
            t.write(prompt, 1);
            CHECK_EQ(spark_speculation_adopt(s.get(), prompt.data(), (int32_t) prompt.size()), SPARK_STATUS_OK);
            CHECK_EQ(spark_speculation_n_past(s.get()), (int32_t) prompt.size());
        } else {
            CHECK_EQ(spark_speculation_decode(s.get(), prompt.data(), (int32_t) prompt.size(), 0, SPARK_SPECULATION_LOGITS_LAST), SPARK_STATUS_OK);
        }
        tokens text = { likeliest(-1) };
        while (text.size() < expected.size()) {
            tokens rows(1 + N_DRAFT, text.back());
            int32_t n = 0, n_kept = 0;
            const int32_t pos = (int32_t) (prompt.size() + text.size() - 1);
            CHECK_EQ(spark_speculation_propose(s.get(), text.back(), pos, N_DRAFT, rows.data() + 1, &n), SPARK_STATUS_OK);
            CHECK_EQ(spark_speculation_decode(s.get(), rows.data(), 1 + n, pos, SPARK_SPECULATION_LOGITS_VERIFY), SPARK_STATUS_OK);
            do {
                text.push_back(likeliest(n_kept));
            } while (n_kept < n && text.back() == rows[1 + n_kept++]);
            n_kept = (int32_t) (prompt.size() + text.size() - 1) - pos - 1;
            CHECK_EQ(spark_speculation_keep(s.get(), n_kept), SPARK_STATUS_OK);
        }
        text.resize(expected.size());
        CHECK(text == expected);
    }
    spark_speculation_stats stats;
    CHECK_EQ(spark_speculation_get_stats(s.get(), &stats), SPARK_STATUS_OK);
    CHECK(stats.n_steps > 5 && stats.n_accepted > 5 && stats.verify_ms > 0 && stats.sampling_ms == 0);
}

// Two pairs; either draft goes first, and its target goes on without. A context can get another draft after the first.
void pairs_are_freed_in_any_order() {
    target a, b;
    const tokens prompt = a.tokenize("for i in range(3):\n");
    const tokens expected = a.write(prompt, 20);
    speculation first = open(a), second = open(b);
    begin(first.get(), prompt, greedy());
    first.reset();
    tokens text = begin(second.get(), prompt, greedy());
    append(text, step(second.get()));
    CHECK(std::equal(text.begin(), text.end(), expected.begin()));
    CHECK(a.write(prompt, 20) == expected);
    first = open(a);
    CHECK(begin(first.get(), prompt, greedy())[0] == expected[0]);
    second.reset();
    b = target();
    CHECK(b.write(prompt, 20) == expected);
    spark_speculation_free(nullptr);
}

} // namespace

int main() {
    llama_log_set([](ggml_log_level level, const char * text, void *) { if (level == GGML_LOG_LEVEL_ERROR) { fputs(text, stderr); } }, nullptr);
    llama_backend_init();
    RUN(bad_arguments);
    RUN(text_is_the_targets_own);
    RUN(anything_can_be_kept);
    RUN(a_step_has_an_order);
    RUN(text_ends_with_the_context);
    RUN(callers_may_sample_themselves);
    RUN(pairs_are_freed_in_any_order);
    llama_backend_free();
    return test::failures();
}
