// Reads texts on a loaded model, micro-batch by micro-batch, so that a store counts the experts they need. Conversations are
// rendered by llama.cpp's own templates, as llama-server renders requests.
#include "spark_moe.h"

#include "status.h"

#include "chat.h"
#include "common.h"
#include "llama.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

struct spark_prefill {
    spark_prefill(llama_context * context, int32_t n_outputs)
        : context(context), n_outputs(n_outputs), model(llama_get_model(context)), vocab(llama_model_get_vocab(model)), templates(common_chat_templates_init(model, "")) {
        clear();
    }

    ~spark_prefill() {
        clear();
        llama_perf_context_reset(context);
    }

    spark_prefill(const spark_prefill &) = delete;
    spark_prefill & operator=(const spark_prefill &) = delete;

    void clear() {
        llama_synchronize(context);
        llama_memory_clear(llama_get_memory(context), true);
    }

    int32_t begin(const std::string & text, bool is_rendered, int32_t n_max) {
        tokens = common_tokenize(vocab, text, /*add_special =*/ true, /*parse_special =*/ is_rendered);
        // the last position stays free: some memories need it
        const size_t n = (size_t) std::max<int64_t>(0, std::min<int64_t>(n_max, (int64_t) llama_n_ctx_seq(context) - 1));
        tokens.resize(std::min(tokens.size(), n));
        n_done = 0;
        clear();
        return (int32_t) tokens.size();
    }

    llama_context * const context;
    const int32_t n_outputs;
    const llama_model * const model;
    const llama_vocab * const vocab;
    const common_chat_templates_ptr templates;
    std::vector<llama_token> tokens;
    std::vector<int8_t> outputs; // of a micro-batch: whether a token has one
    size_t n_done = 0;
};

namespace {

using spark::error;

// Tokens to an output, where the context allows so many: an output costs its logits, a hundredth of a token's time and more.
constexpr size_t OUTPUT_EVERY = 8;

void require(bool condition, const char * text) {
    if (!condition) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, text);
    }
}

// The messages' texts one after the other, for models whose template refuses the conversation (roles that must take turns).
std::string as_plain_text(const std::vector<common_chat_msg> & messages) {
    std::string text;
    const auto add = [&](const std::string & part) {
        if (!part.empty()) {
            text += part;
            text += "\n\n";
        }
    };
    for (const common_chat_msg & message : messages) {
        add(message.reasoning_content);
        add(message.content);
        for (const common_chat_msg_content_part & part : message.content_parts) {
            add(part.text);
        }
        for (const common_chat_tool_call & call : message.tool_calls) {
            add(call.name + " " + call.arguments);
        }
    }
    return text;
}

} // namespace

int32_t spark_prefill_init(llama_context * context, int32_t n_outputs, spark_prefill ** out) {
    return spark::guard([&] {
        require(context && out, "context or out is NULL");
        require(n_outputs >= 1, "a micro-batch has one output at least");
        *out = std::make_unique<spark_prefill>(context, n_outputs).release();
    });
}

void spark_prefill_free(spark_prefill * prefill) {
    delete prefill;
}

int32_t spark_prefill_begin_chat(spark_prefill * prefill, const char * messages, size_t n_messages, int32_t n_max, int32_t * n_tokens, bool * is_plain) {
    return spark::guard([&] {
        require(prefill && messages && n_tokens && is_plain, "prefill, messages or an out is NULL");
        common_chat_templates_inputs inputs;
        try {
            inputs.messages = common_chat_msgs_parse_oaicompat(common_json::parse(std::string(messages, n_messages)));
        } catch (const std::exception & e) {
            throw error(SPARK_STATUS_INVALID_ARGUMENT, spark::format("these are no chat messages: %s", e.what()));
        }
        require(!inputs.messages.empty(), "a conversation without messages");
        inputs.add_generation_prompt = false;
        inputs.use_jinja = true;
        std::string text;
        bool is_refused = false;
        try {
            text = common_chat_templates_apply(prefill->templates.get(), inputs).prompt;
        } catch (const std::exception &) { // a template may refuse with any text, which is for the author of the request
            is_refused = true;
            text = as_plain_text(inputs.messages);
        }
        *n_tokens = prefill->begin(text, !is_refused, n_max);
        *is_plain = is_refused;
    });
}

int32_t spark_prefill_begin_text(spark_prefill * prefill, const char * text, size_t n_text, int32_t n_max, int32_t * n_tokens) {
    return spark::guard([&] {
        require(prefill && text && n_tokens, "prefill, text or n_tokens is NULL");
        *n_tokens = prefill->begin(std::string(text, n_text), /*is_rendered =*/ false, n_max);
    });
}

int32_t spark_prefill_step(spark_prefill * prefill, int32_t * n_left) {
    return spark::guard([&] {
        require(prefill && n_left, "prefill or n_left is NULL");
        std::vector<llama_token> & tokens = prefill->tokens;
        const size_t n = std::min(tokens.size() - prefill->n_done, (size_t) std::min(llama_n_ubatch(prefill->context), llama_n_batch(prefill->context)));
        if (n > 0) {
            // The last layer is computed for tokens with an output only, so its experts are counted for those: every so many, and
            // the last, which llama.cpp asks of a micro-batch.
            const size_t every = std::max<size_t>(OUTPUT_EVERY, (n + prefill->n_outputs - 1) / prefill->n_outputs);
            prefill->outputs.assign(n, 0);
            for (size_t from_end = 0; from_end < n; from_end += every) {
                prefill->outputs[n - 1 - from_end] = 1;
            }
            llama_batch batch = llama_batch_get_one(tokens.data() + prefill->n_done, (int32_t) n);
            batch.logits = prefill->outputs.data();
            const int status = llama_decode(prefill->context, batch);
            prefill->n_done += n;
            if (status != 0) {
                prefill->n_done = tokens.size();
                prefill->clear();
                throw error(SPARK_STATUS_INTERNAL, spark::format("llama.cpp could not compute a prompt (status %d)", status));
            }
            llama_synchronize(prefill->context); // so that the time it took is seen by whoever has a limit
        }
        *n_left = (int32_t) (tokens.size() - prefill->n_done);
    });
}
