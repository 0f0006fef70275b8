// llama-server inside this process: its entry function, with our callbacks behind its hooks (patches/0040).
#include "spark_moe.h"

#include "server_hooks.h"
#include "speculative/drafting.h"
#include "speculative/verify_cost.h"
#include "status.h"

#include "common.h"
#include "llama.h"
#include "server-common.h"
#include "server-context.h"
#include "server-http.h"
#include "common/log.h"
#include "common/speculative.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

int llama_server_with_hooks(int argc, char ** argv, server_hooks * hooks);

struct spark_http_reply {
    int32_t     status = 200;
    std::string content_type;
    std::string body;
};

namespace {

class callback_hooks : public server_hooks {
public:
    explicit callback_hooks(const spark_server_callbacks & callbacks) : callbacks(callbacks) {}

    void on_routes(server_http_context & http, server_routes & routes) override {
        for (int32_t i = 0; i < callbacks.n_routes; i++) {
            const std::string path = callbacks.routes[i];
            http.get(path, [this, path](const server_http_req &) { return answer(path); });
        }
        if (callbacks.props) {
            const server_http_context::handler_t upstream = routes.get_props;
            routes.get_props = [this, upstream](const server_http_req & req) { return add_props(upstream(req)); };
        }
    }

    bool on_model_loading(common_params & params) override {
        n_draft_most = common_speculative_n_max(&params.speculative);
        drafting.reset();
        if (!callbacks.model_loading) {
            return true;
        }
        if (overrides_of_user.empty()) {
            overrides_of_user = params.tensor_buft_overrides; // after sleep the params still carry those of the last store
        }
        const std::string draft_path = params.speculative.draft.mparams.path;
        spark_server_model model = {};
        model.path          = params.model.path.c_str();
        model.draft_path    = draft_path.c_str();
        model.n_ctx         = params.n_ctx;
        model.n_batch       = params.n_batch;
        model.n_ubatch      = params.n_ubatch;
        model.n_parallel    = params.n_parallel;
        model.n_gpu_layers  = params.n_gpu_layers;
        model.device        = params.devices.empty() || !params.devices[0] ? "" : ggml_backend_dev_name(params.devices[0]);
        model.use_mmap      = params.load_mode == LLAMA_LOAD_MODE_AUTO || params.load_mode == LLAMA_LOAD_MODE_MMAP || params.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK;
        model.use_mlock     = params.load_mode == LLAMA_LOAD_MODE_MLOCK || params.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK;
        model.has_overrides = !overrides_of_user.empty() && overrides_of_user.front().pattern != nullptr;

        spark_store * store = nullptr;
        if (callbacks.model_loading(callbacks.user, &model, &store) != 0) {
            return false;
        }
        params.n_ctx = model.n_ctx;
        is_on_device = spark_store_get_device(store)[0] != '\0';
        if (store) {
            use_store(params, store);
        } else {
            params.tensor_buft_overrides = overrides_of_user;
        }
        return true;
    }

    bool on_contexts_created(llama_context * context, int n_ubatch) override {
        target = context;
        if (is_on_device) {
            warm_up(context, n_ubatch);
        }
        if (n_draft_most > 0) {
            prepare_drafting(context);
        }
        return !callbacks.contexts_created || callbacks.contexts_created(callbacks.user, context) == 0;
    }

    void on_model_loaded() override {
        if (callbacks.model_loaded) {
            callbacks.model_loaded(callbacks.user);
        }
    }

    int n_draft(int id_slot, int n_allowed) override { return drafting.n_draft(id_slot, n_allowed); }
    void on_drafted(int id_slot, llama_context * context_draft, size_t n_tokens) override { drafting.drafted(id_slot, context_draft, n_tokens); }
    void on_verified(int id_slot, size_t n_accepted) override { drafting.verified(id_slot, n_accepted); }

    void on_phase_end(server_phase phase) override {
        if (n_draft_most > 0) {
            drafting.phase_end(phase);
            if (phase == server_phase::verify) {
                drafting.computed(llama_perf_context(target).n_reused);
            }
        }
    }

    void on_request_finished(int id_slot, const server_slot_stats & stats) override {
        drafting.request_finished();
        if (callbacks.request_finished) {
            callbacks.request_finished(callbacks.user, id_slot, (int32_t) stats.n_prompt_processed, (int32_t) stats.n_gen, stats.t_prompt_ms(), stats.t_gen_ms());
        }
    }

    void on_shutdown() override {
        const std::string drafted = spark::describe(drafting.get());
        if (!drafted.empty()) {
            LOG_INF("spark: %s\n", drafted.c_str());
        }
        if (callbacks.shutdown) {
            callbacks.shutdown(callbacks.user);
        }
    }

    void on_child_args(std::vector<std::string> & args) override {
        if (callbacks.child_program && !args.empty()) {
            args[0] = callbacks.child_program;
        }
        args.insert(args.end(), callbacks.child_args, callbacks.child_args + callbacks.n_child_args);
    }

private:
    void use_store(common_params & params, spark_store * store) const {
        // the user's own overrides come first, so they win
        std::vector<llama_model_tensor_buft_override> overrides;
        for (const auto & o : overrides_of_user) {
            if (o.pattern) {
                overrides.push_back(o);
            }
        }
        for (auto * o = (const llama_model_tensor_buft_override *) spark_store_get_overrides(store); o->pattern; o++) {
            overrides.push_back(*o);
        }
        overrides.resize(std::max(overrides.size() + 1, overrides_of_user.size()), { nullptr, nullptr });
        params.tensor_buft_overrides = overrides;

        // A mapping of the whole file would be read ahead and stay resident, experts included.
        if (params.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK) {
            params.load_mode = LLAMA_LOAD_MODE_MLOCK;
        } else if (params.load_mode != LLAMA_LOAD_MODE_MLOCK && params.load_mode != LLAMA_LOAD_MODE_DIRECT_IO) {
            params.load_mode = LLAMA_LOAD_MODE_NONE;
        }
        if (is_on_device) {
            params.fit_params = false; // it would count the addresses of the experts as device memory
            params.devices    = { ggml_backend_dev_by_name(spark_store_get_device(store)), nullptr }; // one device holds all experts
        } else {
            params.no_op_offload = true; // a stack has slots without memory behind them, so it cannot be copied to a device as a whole
        }
        params.warmup = false; // llama.cpp warms up by selecting every expert: a full read of the file
    }

    // A full micro-batch and a single token, so that backends allocate what they allocate at first use: what is measured
    // afterwards is all that serving needs.
    static void warm_up(llama_context * context, int n_ubatch) {
        const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(context));
        const int32_t n_vocab = llama_vocab_n_tokens(vocab);
        std::vector<llama_token> tokens(std::max(1, std::min<int>(n_ubatch, (int) llama_n_ctx_seq(context) - 1)));
        for (size_t i = 0; i < tokens.size(); i++) {
            tokens[i] = (llama_token) (i * 31 % n_vocab);
        }
        bool ok = llama_decode(context, llama_batch_get_one(tokens.data(), (int32_t) tokens.size())) == 0;
        for (int i = 0; i < 3 && ok; i++) {
            ok = llama_decode(context, llama_batch_get_one(tokens.data(), 1)) == 0;
        }
        llama_synchronize(context);
        llama_memory_clear(llama_get_memory(context), true);
        llama_perf_context_reset(context);
        if (!ok) {
            spark::log(spark::log_level::warn, "the first computation failed; device memory may be needed later that is not accounted for");
        }
    }

    // How verified tokens are rounded, what that costs, and how many are verified at once. (llama.cpp's own info lines are not shown.)
    void prepare_drafting(llama_context * context) {
        bool is_exact = false;
        if (callbacks.drafting.exact_verify) {
            const spark::verify_cost cost = spark::measure_verify_cost(context, 1 + n_draft_most);
            is_exact = cost.is_exact;
            LOG_INF("spark: %s\n", spark::describe(cost).c_str());
        } else {
            LOG_INF("spark: draft: verified tokens are rounded in groups (--no-exact-verify), so greedy text may differ from the text without a draft\n");
        }
        int32_t width = callbacks.drafting.verify_width;
        if (width == 0 && !is_exact) {
            width = callbacks.drafting.inexact_width;
        }
        if (width > 0) {
            drafting.set_width(width, n_draft_most, {});
            LOG_INF("spark: draft: %d tokens of a sequence are verified at once\n", std::min(width, n_draft_most));
            return;
        }
        const auto curve = spark::measure_verify_curve(context, 1 + n_draft_most);
        drafting.set_width(0, n_draft_most, curve);
        LOG_INF("spark: draft: up to %d tokens of a sequence are verified at once, as many as pay%s\n", n_draft_most, spark::describe(curve).c_str());
    }

    // `body`, a JSON object, with one member more; unchanged, with a line in the log, when that fails.
    template <typename F>
    static std::string with_member(const std::string & body, const char * name, F && value) {
        try {
            json object = json::parse(body);
            object[name] = value();
            return safe_json_to_str(object);
        } catch (const std::exception & e) {
            spark::log(spark::log_level::error, "cannot add \"%s\" to an answer: %s", name, e.what());
            return body;
        }
    }

    static json curve_json(const std::vector<spark::step_cost::point> & curve) {
        json points = json::array();
        for (const auto & point : curve) {
            points.push_back(json::array({ point.n_rows, point.ms }));
        }
        return points;
    }

    static json draft_json(const spark::drafting::report & report) {
        const auto & t = report.steps;
        const auto ms = [&](server_phase phase) { return t.us[(int) phase]/1000.0; };
        return {
            { "steps", t.n_steps }, { "drafts", t.n_drafts }, { "drafted", t.n_drafted }, { "accepted", t.n_accepted },
            { "drafted_at", t.drafted_at }, { "accepted_at", t.accepted_at },
            { "verify_width", { { "auto", report.has_auto_width }, { "drafts", report.n_by_width }, { "ms_by_rows", curve_json(report.verify_curve) } } },
            { "graphs", { { "computed", report.n_graphs }, { "reused", report.n_reused } } },
            { "pauses", report.n_pauses }, { "paused", report.n_paused }, { "broken", report.is_broken },
            { "ms", {
                { "draft", ms(server_phase::draft) }, { "heads", nullptr }, // in the draft's own graph, so part of its time
                { "verify", ms(server_phase::verify) }, { "features", ms(server_phase::features) }, { "sampling", ms(server_phase::sampling) }, { "other", ms(server_phase::other) },
            } },
        };
    }

    server_http_res_ptr answer(const std::string & path) const {
        spark_http_reply reply;
        const bool ok = callbacks.http_get && callbacks.http_get(callbacks.user, path.c_str(), &reply) == 0;
        auto res = std::make_unique<server_http_res>();
        res->status = ok ? reply.status : 500;
        if (ok && !reply.content_type.empty()) {
            res->content_type = reply.content_type;
        }
        if (ok && path == "/spark/stats" && n_draft_most > 0) {
            reply.body = with_member(reply.body, "draft", [&] { return draft_json(drafting.get()); });
        }
        res->data = ok ? reply.body : R"({"error":{"code":500,"message":"the handler of this route failed, see the server's log","type":"server_error"}})";
        return res;
    }

    server_http_res_ptr add_props(server_http_res_ptr res) const {
        spark_http_reply reply;
        if (res && res->status == 200 && callbacks.props(callbacks.user, &reply) == 0) {
            res->data = with_member(res->data, "spark", [&] { return json::parse(reply.body); });
        }
        return res;
    }

    const spark_server_callbacks callbacks;
    std::vector<llama_model_tensor_buft_override> overrides_of_user;
    bool is_on_device = false;
    spark::drafting drafting;
    llama_context * target = nullptr; // while a model is loaded
    int32_t n_draft_most = 0; // most tokens that are drafted at once; 0: no drafting
};

std::atomic<bool> is_running { false };

} // namespace

void spark_http_reply_set(spark_http_reply * reply, int32_t status, const char * content_type, const char * body, size_t n_body) {
    if (reply) {
        reply->status       = status;
        reply->content_type = content_type ? content_type : "";
        reply->body.assign(body ? body : "", body ? n_body : 0);
    }
}

int32_t spark_server_run(int32_t argc, const char * const * argv, const spark_server_callbacks * callbacks, int32_t * exit_code) {
    return spark::guard([&] {
        if (argc < 1 || !argv || !exit_code) {
            throw spark::error(SPARK_STATUS_INVALID_ARGUMENT, "argv needs at least the program's name, and exit_code must not be NULL");
        }
        if (is_running.exchange(true)) {
            throw spark::error(SPARK_STATUS_BAD_STATE, "a server is running in this process already");
        }
        struct reset { ~reset() { is_running = false; } } on_return;

        std::vector<std::string> copies(argv, argv + argc);
        std::vector<char *> args;
        for (std::string & copy : copies) {
            args.push_back(&copy[0]);
        }
        args.push_back(nullptr);
        callback_hooks hooks(callbacks ? *callbacks : spark_server_callbacks {});
        *exit_code = llama_server_with_hooks(argc, args.data(), &hooks);
    });
}
