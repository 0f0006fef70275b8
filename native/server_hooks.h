// What llama-server calls when it runs inside another program (patches/0040). Every call has a default that does
// nothing, so a server without hooks behaves exactly like the llama-server binary.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

struct common_params;
struct llama_context;
struct server_http_context;
struct server_routes;
struct server_slot_stats;

// What the time of a step is spent on, see server_hooks::on_phase_end.
enum class server_phase { draft, verify, features, sampling, other };

struct server_hooks {
    virtual ~server_hooks() = default;

    // API routes are registered; more may be added and existing handlers wrapped. Before the server listens.
    virtual void on_routes(server_http_context & http, server_routes & routes) { (void) http; (void) routes; }

    // The model is about to be loaded (again after sleep); `params` may be changed. False: loading fails.
    virtual bool on_model_loading(common_params & params) { (void) params; return true; }

    // Model, draft and contexts are there with all their buffers, and nothing has been decoded (again after sleep). False:
    // loading fails.
    virtual bool on_contexts_created(llama_context * context, int n_ubatch) { (void) context; (void) n_ubatch; return true; }

    // The model is loaded and the server is about to print its addresses.
    virtual void on_model_loaded() {}

    // A request has left its slot, finished or cancelled. On the inference thread.
    virtual void on_request_finished(int id_slot, const server_slot_stats & stats) { (void) id_slot; (void) stats; }

    // A slot is about to draft in this step, at most n_allowed tokens. How many; 0: it writes one token without a draft. On the
    // inference thread, as the next three.
    virtual int n_draft(int id_slot, int n_allowed) { (void) id_slot; return n_allowed; }

    // A draft of `n_tokens` was made, 0 when there is nothing to propose. `context_draft` is null without a draft model.
    virtual void on_drafted(int id_slot, llama_context * context_draft, size_t n_tokens) { (void) id_slot; (void) context_draft; (void) n_tokens; }

    // The slot's draft was verified, and its first `n_accepted` tokens were what the target writes.
    virtual void on_verified(int id_slot, size_t n_accepted) { (void) id_slot; (void) n_accepted; }

    // The time since the last call was spent on this: making drafts, the target's batch (with prompts that share it), handing the
    // target's activations to the draft, sampling and comparing, or anything else.
    virtual void on_phase_end(server_phase phase) { (void) phase; }

    // Serving has ended; the model is still there.
    virtual void on_shutdown() {}

    // Router mode is about to start a child with these arguments, args[0] being the program.
    virtual void on_child_args(std::vector<std::string> & args) { (void) args; }
};

inline int server_n_draft(server_hooks * hooks, int id_slot, int n_allowed) {
    return hooks && n_allowed > 0 ? hooks->n_draft(id_slot, n_allowed) : n_allowed;
}

inline void server_phase_end(server_hooks * hooks, server_phase phase) {
    if (hooks) {
        hooks->on_phase_end(phase);
    }
}
