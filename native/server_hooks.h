// What llama-server calls when it runs inside another program (patches/0040). Every call has a default that does
// nothing, so a server without hooks behaves exactly like the llama-server binary.
#pragma once

#include <string>
#include <vector>

struct common_params;
struct llama_context;
struct server_http_context;
struct server_routes;
struct server_slot_stats;

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

    // Serving has ended; the model is still there.
    virtual void on_shutdown() {}

    // Router mode is about to start a child with these arguments, args[0] being the program.
    virtual void on_child_args(std::vector<std::string> & args) { (void) args; }
};
