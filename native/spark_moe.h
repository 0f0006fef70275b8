// The C API of pyspark_moe: expert residency for mixture-of-experts models in llama.cpp.
//
// What the handles are:
//   spark_store   the experts of ONE model file: where each expert is now (a fast slot or its home), the memory that
//                 holds them, the counters, and the thread that moves them. It hands llama.cpp a buffer type; the
//                 model that is loaded through that buffer type reads its experts from the store. Owner: the caller
//                 of spark_store_init. Memory that a loaded model still reads outlives spark_store_free and is
//                 released with the last model, so models, contexts and stores may be freed in any order.
//   spark_prefill a loaded model that reads texts only so that the experts they need are counted. Owner: the caller of
//                 spark_prefill_init; the context must outlive it and compute nothing else meanwhile.
//   spark_speculation  a draft model beside a loaded model, and the one text that they write together, step by step: draft,
//                 verify, accept. Owner: the caller of spark_speculation_init; the context must outlive it, and while it is
//                 open its sequence 0 is computed through it alone. One for each context at a time.
//   spark_http_reply   the answer under construction inside spark_server_callbacks::http_get, and only there.
//
// What this header refuses to know: HTTP, JSON, profiles, budgets, agent history, Python.
//
// Every function that can fail returns a spark_status; the text for the person who can act is in spark_last_error(),
// per thread, valid until the next failing call of that thread. An `out` is written only on SPARK_STATUS_OK.
// Functions may be called from any thread unless they say otherwise. No C++ exception crosses this boundary.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The part between the markers is plain C99 that cffi parses: no includes, conditionals, macros with arguments.
/* cffi:begin */

#define SPARK_API_VERSION 4

enum spark_status {
    SPARK_STATUS_OK               = 0,
    SPARK_STATUS_INVALID_ARGUMENT = 1, // a value is out of range; nothing changed
    SPARK_STATUS_NOT_FOUND        = 2, // a file does not exist or may not be read; nothing changed
    SPARK_STATUS_BAD_FORMAT       = 3, // a file is not the GGUF it claims to be; nothing changed
    SPARK_STATUS_NO_EXPERTS       = 4, // the model has no routed experts (it is dense); nothing changed
    SPARK_STATUS_IO               = 5, // the operating system refused a read; the message has its reason
    SPARK_STATUS_OUT_OF_MEMORY    = 6, // memory or address space was refused; the message has the size
    SPARK_STATUS_BAD_STATE        = 7, // the call does not fit the life cycle (e.g. a plan after loading); nothing changed
    SPARK_STATUS_INTERNAL         = 8  // a bug in this library
};

// Structures whose size the caller checks at load, see spark_sizeof.
enum spark_struct {
    SPARK_STRUCT_STORE_PARAMS     = 0,
    SPARK_STRUCT_LAYER_INFO       = 1,
    SPARK_STRUCT_LAYER_PLAN       = 2,
    SPARK_STRUCT_PLAN             = 3,
    SPARK_STRUCT_STATS            = 4,
    SPARK_STRUCT_SERVER_MODEL     = 5,
    SPARK_STRUCT_SERVER_CALLBACKS = 6,
    SPARK_STRUCT_DEVICE_INFO      = 7,
    SPARK_STRUCT_DRAFT_PARAMS     = 8,
    SPARK_STRUCT_SPECULATION_PARAMS = 9,
    SPARK_STRUCT_SAMPLING           = 10,
    SPARK_STRUCT_SPECULATION_STEP   = 11,
    SPARK_STRUCT_SPECULATION_STATS  = 12
};

// What chooses the expert that leaves a fast slot.
enum spark_policy {
    SPARK_POLICY_FREQUENCY = 0, // lowest use count with exponential decay; ties: least recently used. The default
    SPARK_POLICY_STATIC    = 1, // experts never change slots after loading
    SPARK_POLICY_CHAOS     = 2  // tests only: FREQUENCY, and a thread that promotes and evicts at random all the time
};

struct spark_store;
struct spark_prefill;
struct spark_speculation;
struct spark_http_reply;
struct llama_context;

struct spark_store_params {
    const char * model_path; // UTF-8; the first shard of a split GGUF; copied
    int32_t n_io_threads;    // threads that read missed experts, 1..64; 0: the default (8)
    bool    direct_io;       // read experts past the page cache where the file system allows; default true
    bool    lock_fast;       // lock fast slots in RAM as far as RLIMIT_MEMLOCK allows; default true
    const char * device;     // ggml's name of the device that holds the fast slots, with homes in pinned RAM ("CUDA0"); NULL or "": RAM
};

// One MoE layer, as the GGUF describes it.
struct spark_layer_info {
    int32_t  layer;        // block number in the model
    int32_t  n_expert;     // routed experts
    int32_t  n_tensors;    // expert tensors: 3 for gate, up, down; 2 for fused gate_up, down
    uint64_t expert_bytes; // bytes of one expert, over all its tensors
};

// Fast slots of one layer.
struct spark_layer_plan {
    int32_t layer;           // block number
    int32_t n_fast;          // fast slots, 0..n_expert; n_expert: all resident
    int32_t n_pinned;        // the first n_pinned of `initial` are never evicted, 0..n_initial
    int32_t n_initial;       // experts to load into fast slots before serving, 0..n_fast
    const int32_t * initial; // n_initial distinct expert ids, hottest first; copied
    const double  * hotness; // n_expert uses that the policy begins with, 0 to 1e15 each; NULL: none, or what was learned so far; copied
};

struct spark_plan {
    int32_t  n_layers;
    const struct spark_layer_plan * layers; // copied; a layer that is not named gets n_fast = 0
    int32_t  policy;                        // enum spark_policy
    uint64_t seed;                          // of the chaos policy
    int64_t  staging_bytes;                 // on a device: its memory for bringing experts ahead of their layer; -1: all it is good for
};

// A GPU that can hold fast slots.
struct spark_device_info {
    char name[32];         // ggml's name of it, for spark_store_params.device
    char description[128];
    char pci_bus_id[32];   // "0000:01:00.0"
};

// Counters since the model was loaded. Units: uses are (token, expert) selections, bytes are bytes.
struct spark_stats {
    int32_t  layer;          // block number; -1 for the sum over layers
    int32_t  n_expert;       // routed experts
    int32_t  n_fast;         // fast slots
    int32_t  n_resident;     // experts in fast slots now
    uint64_t uses;           // selections routed; uses = hits + misses
    uint64_t hits;           // selections whose expert was in a fast slot when the step reached the layer
    uint64_t misses;         // selections whose expert was not
    uint64_t misses_home;    // of these, how many were read from the home slot in place (no fast slot was free)
    uint64_t bytes_read;     // bytes read from home into fast slots since loading; initial experts are not counted
    uint64_t bytes_home;     // bytes of experts read in place from home slots, once per step and expert
    uint64_t bytes_ahead;    // on a device: bytes of experts copied ahead of their layer, used or not
    uint64_t reads_home;     // on a device: experts read in place from home slots, once per step and expert
    uint64_t reads_ahead;    // on a device: experts that were not in a fast slot and had been copied ahead, likewise
    uint64_t promotions;     // experts copied into a fast slot, at load or later
    uint64_t evictions;      // experts that left a fast slot
    uint64_t fast_bytes;     // bytes of the fast slots
    uint64_t locked_bytes;   // of these, locked in RAM
    uint64_t read_ns;        // time steps waited for reads, ns
    uint64_t steps;          // on a device: steps (micro-batches) computed, of all layers together; 0 for one layer
    uint64_t steps_replayed; // of these, how many replayed a recorded graph instead of being enqueued node by node
};

uint32_t     spark_api_version(void);
// Whether models loaded from now on read Q, K and V of a layer as one matrix for up to eight tokens, where they are of one type
// and lie next to each other (default: they do). Every row rounds as before.
void         spark_set_fused_qkv(bool enabled);
// Size of a structure in bytes as compiled, 0 for an unknown one.
size_t       spark_sizeof(int32_t which);
// Text of the last failure of this thread; "" when there was none. Never NULL.
const char * spark_last_error(void);

// Opens a GGUF (all shards) and lists its MoE layers; reads no tensor data.
// OK, INVALID_ARGUMENT, NOT_FOUND, BAD_FORMAT, NO_EXPERTS, OUT_OF_MEMORY.
int32_t spark_store_init(const struct spark_store_params * params, struct spark_store ** out);
// Frees the handle; NULL is allowed. Memory that a loaded model reads is released with that model.
void    spark_store_free(struct spark_store * store);

int32_t spark_store_n_layers(const struct spark_store * store);
// Layer by index 0..n_layers-1, in block order. OK, INVALID_ARGUMENT.
int32_t spark_store_get_layer_info(const struct spark_store * store, int32_t index, struct spark_layer_info * out);

// Sets slots and initial experts; before the model is loaded. Without a plan every expert is fast.
// OK, INVALID_ARGUMENT (nothing changed), BAD_STATE (a model is loaded already).
int32_t spark_store_set_plan(struct spark_store * store, const struct spark_plan * plan);

// The same while a model is loaded: after what it takes has been measured, or when other experts have become hot. Experts
// that are in fast slots and in the plan stay there. On a device running steps are waited for; in RAM none may run, so
// call it on the thread that computes. OK, INVALID_ARGUMENT and BAD_STATE (nothing changed; also on a device when the model
// was loaded with every expert resident), OUT_OF_MEMORY (device: every expert is read from home until the next call; RAM:
// some layers are as planned, the others as before).
int32_t spark_store_place(struct spark_store * store, const struct spark_plan * plan);
// The device of the store's fast slots, "" for RAM or no store; valid as long as the store.
const char * spark_store_get_device(const struct spark_store * store);
// GPUs by index 0.. in ggml's order. Takes no device memory. OK, INVALID_ARGUMENT (no more, or a build without CUDA).
int32_t spark_device_get_info(int32_t index, struct spark_device_info * out);
// Memory of a device in bytes, for all processes together; makes this process's context on it. OK, INVALID_ARGUMENT (no such device, or a build without CUDA).
int32_t spark_device_get_memory(const char * device, uint64_t * free_bytes, uint64_t * total_bytes);

// For llama_model_params.tensor_buft_overrides: an array of llama_model_tensor_buft_override ended by {NULL, NULL};
// it lives as long as the process. Load the model of model_path, and no other, through it.
const void * spark_store_get_overrides(struct spark_store * store);
// True from the moment llama.cpp has allocated the experts of a model until that model is freed.
bool    spark_store_is_loaded(const struct spark_store * store);

// Sum over layers. OK.
int32_t spark_store_get_stats(const struct spark_store * store, struct spark_stats * out);
// One layer by index. OK, INVALID_ARGUMENT.
int32_t spark_store_get_layer_stats(const struct spark_store * store, int32_t index, struct spark_stats * out);
// slots[n_expert]: the fast slot of each expert, or -1 when it is read from home. OK, INVALID_ARGUMENT, BAD_STATE.
int32_t spark_store_get_residency(const struct spark_store * store, int32_t index, int32_t * slots, int32_t n_expert);
// counts[n_expert]: uses of each expert since loading. OK, INVALID_ARGUMENT.
int32_t spark_store_get_counts(const struct spark_store * store, int32_t index, uint64_t * counts, int32_t n_expert);
// Puts the counters back to zero; residency stays.
int32_t spark_store_reset_stats(struct spark_store * store);
// Waits until the swap engine has nothing to do, at most timeout_ms. OK, BAD_STATE (still busy).
int32_t spark_store_wait_idle(struct spark_store * store, int32_t timeout_ms);

// Begins with an empty memory, which spark_prefill_free empties again. n_outputs: of a micro-batch that the context allows
// (llama_context_params.n_outputs_max, all of one sequence); 1 is right for every context, and then the last layer's experts are counted for
// one token of each micro-batch. OK, INVALID_ARGUMENT, INTERNAL.
int32_t spark_prefill_init(struct llama_context * context, int32_t n_outputs, struct spark_prefill ** out);
// NULL is allowed.
void    spark_prefill_free(struct spark_prefill * prefill);
// The next text, instead of what is left of the last: a conversation as llama-server would render it, messages being its JSON
// array in OpenAI's form, or plain text. At most n_max tokens of it, and what the context holds. *n_tokens: tokens to
// compute. A conversation that the model's template refuses is read as plain text, and *is_plain says so.
// OK, INVALID_ARGUMENT (no JSON, or no messages; nothing changed).
int32_t spark_prefill_begin_chat(struct spark_prefill * prefill, const char * messages, size_t n_messages, int32_t n_max, int32_t * n_tokens, bool * is_plain);
int32_t spark_prefill_begin_text(struct spark_prefill * prefill, const char * text, size_t n_text, int32_t n_max, int32_t * n_tokens);
// Computes the next micro-batch. *n_left: tokens still to compute. OK, INTERNAL (llama.cpp could not compute; the text is over).
int32_t spark_prefill_step(struct spark_prefill * prefill, int32_t * n_left);

// A draft model for a model that is loaded. That the pair belongs together (vocabulary, and layers that the target's architecture
// exposes) is the caller's to know, from both files' headers: llama.cpp answers some misfits by ending the process.
struct spark_speculation_params {
    struct llama_context * context; // the target's; its memory can be cut back (not recurrent)
    const char * draft_path;        // UTF-8; "": the next-token head in the target's own file
    const char * type;              // llama.cpp's name: draft-simple, draft-eagle3, draft-mtp, draft-dflash, draft-dspark
    int32_t n_draft;                // tokens that are drafted at a time, 1 or more; a draft with a block of fixed size may give fewer
    int32_t n_gpu_layers;           // of the draft; negative: all
    bool    exact_verify;           // round verified tokens as single ones, so that greedy text is the text without a draft; up to 63 drafted ones
    bool    measure_heads;          // see heads_ms; the draft's graph is computed in two parts. For drafts with a block: DFlash and DSpark
};

// Which tokens of spark_speculation_decode() get logits.
enum spark_speculation_logits {
    SPARK_SPECULATION_LOGITS_LAST   = 0,
    SPARK_SPECULATION_LOGITS_ALL    = 1,
    SPARK_SPECULATION_LOGITS_VERIFY = 2  // all, rounded as the parameters say
};

// How the target's tokens are chosen; llama.cpp's samplers in its order. temperature 0: the likeliest token.
struct spark_sampling {
    uint32_t seed;
    int32_t  top_k;              // 0: all
    int32_t  penalty_last_n;     // tokens that are penalised; 0: none
    float    temperature;
    float    top_p;              // 1: off
    float    min_p;              // 0: off
    float    penalty_repeat;     // 1: off
    float    penalty_frequency;  // 0: off
    float    penalty_presence;   // 0: off
    const char * grammar;        // GBNF; NULL or "": none
};

// One step: milliseconds since it was begun, by what they were spent on.
struct spark_speculation_step {
    int32_t n_drafted;
    int32_t n_accepted;  // of these, how many were kept
    double  draft_ms;    // the draft model with its heads
    double  heads_ms;    // of draft_ms: from the end of the backbone on, drafted tokens chosen included; negative: not measured
    double  verify_ms;   // the target's batch
    double  features_ms; // handing the target's activations to the draft
    double  sampling_ms;
    double  other_ms;    // the rest, the caller's own time between the calls included
};

// Sums over the steps in which a draft was verified.
struct spark_speculation_stats {
    uint64_t n_steps;
    uint64_t n_drafted;   // tokens
    uint64_t n_accepted;  // tokens
    uint64_t n_pauses;    // how often drafting rested for 256 tokens, because hardly anything was accepted
    bool     is_broken;   // the draft computes logits that are not numbers, and is not asked any more
    bool     is_exact;    // verified tokens are rounded as single ones: that was asked for, and every device of the target can
    int32_t  n_depths;    // for spark_speculation_get_depths: tokens of the longest draft
    double   draft_ms;
    double   heads_ms;    // negative: not measured
    double   verify_ms;
    double   features_ms;
    double   sampling_ms; // 0 for a caller that samples itself; its time is in other_ms
    double   other_ms;    // the caller's time between the calls included
};

// Loads the draft and empties nothing. OK, INVALID_ARGUMENT, BAD_FORMAT (the draft cannot be loaded), OUT_OF_MEMORY.
int32_t spark_speculation_init(const struct spark_speculation_params * params, struct spark_speculation ** out);
// NULL is allowed.
void    spark_speculation_free(struct spark_speculation * speculation);

// The context's sequence 0 begins anew with the prompt. *token: the first token after it, which is known and not yet computed, as
// the last token of a text always is. OK, INVALID_ARGUMENT (nothing changed), INTERNAL (llama.cpp could not compute; begin again).
int32_t spark_speculation_begin(struct spark_speculation * speculation, const int32_t * prompt, int32_t n_prompt, const struct spark_sampling * sampling, int32_t * token);
// tokens[n_max]: what may follow the text. None at the end of the context, and where drafting rests. OK, INVALID_ARGUMENT, BAD_STATE.
int32_t spark_speculation_draft(struct spark_speculation * speculation, int32_t n_max, int32_t * tokens, int32_t * n_tokens);
// tokens[n_drafted + 1]: what the target writes: the drafted tokens it agrees with and one more, at least one; an end of generation
// ends them. OK, INVALID_ARGUMENT (nothing changed), BAD_STATE (not begun, an open step, or the context is full), INTERNAL.
int32_t spark_speculation_verify(struct spark_speculation * speculation, const int32_t * drafted, int32_t n_drafted, int32_t * tokens, int32_t * n_tokens);
// Keeps the first n_keep of these, the sampler's state included, and ends the step; 0: as if it had not been. OK, INVALID_ARGUMENT
// and BAD_STATE (nothing changed), INTERNAL.
int32_t spark_speculation_accept(struct spark_speculation * speculation, int32_t n_keep, struct spark_speculation_step * out);

// The same for a caller with a sampler of its own; a text that spark_speculation_begin() began is over. Computes tokens at positions
// pos0.. of sequence 0, where pos0 is at most the number of tokens computed so far; what was there and behind is forgotten. logits: an
// enum spark_speculation_logits. OK, INVALID_ARGUMENT (nothing changed), INTERNAL.
int32_t spark_speculation_decode(struct spark_speculation * speculation, const int32_t * tokens, int32_t n_tokens, int32_t pos0, int32_t logits);
// tokens[n_max]: what may follow `last`, which will go to position `pos`. OK, INVALID_ARGUMENT, BAD_STATE (a text with a sampler is open).
int32_t spark_speculation_propose(struct spark_speculation * speculation, int32_t last, int32_t pos, int32_t n_max, int32_t * tokens, int32_t * n_tokens);
// How many of the tokens that were proposed and verified last were kept; before the next proposal. Nothing where none were verified.
// OK, INVALID_ARGUMENT.
int32_t spark_speculation_keep(struct spark_speculation * speculation, int32_t n_accepted);
// Something else has changed the memory of the context: its sequence 0 holds these tokens now, none being allowed. The draft knows
// nothing of them. OK, INVALID_ARGUMENT (the memory ends before them; nothing changed).
int32_t spark_speculation_adopt(struct spark_speculation * speculation, const int32_t * tokens, int32_t n_tokens);

// Tokens in the memory of the context, so without the last one of the text. 0 for NULL.
int32_t spark_speculation_n_past(const struct spark_speculation * speculation);
int32_t spark_speculation_get_stats(const struct spark_speculation * speculation, struct spark_speculation_stats * out);
// drafted_at[n]: drafts longer than each depth 0..n-1; accepted_at[n]: those of which more tokens than that were accepted. OK, INVALID_ARGUMENT.
int32_t spark_speculation_get_depths(const struct spark_speculation * speculation, uint64_t * drafted_at, uint64_t * accepted_at, int32_t n);

// What llama-server is about to load; valid during the callback, which may set n_ctx.
struct spark_server_model {
    const char * path;        // resolved model file (after a download, if any), UTF-8
    const char * draft_path;  // draft model or ""
    int32_t n_ctx;            // 0: from the model, or what --fit makes of it
    int32_t n_batch;
    int32_t n_ubatch;
    int32_t n_parallel;
    int32_t n_gpu_layers;     // -1: auto
    const char * device;      // the first GPU that the user named (--device), in ggml's spelling, or ""
    bool    use_mmap;
    bool    use_mlock;
    bool    has_overrides;    // the user passed -ot, --cpu-moe or --n-cpu-moe
};

// How drafting is done, whatever the kind of draft.
struct spark_draft_params {
    bool    exact_verify; // round verified tokens as single ones, so that greedy text is the text without a draft
    int32_t verify_width; // drafted tokens of a sequence verified at once; what is drafted, if that is less; 0: chosen by measurement
    // instead of a choice where the text depends on it, because verified tokens are not rounded as single ones; 0: chosen there too
    int32_t inexact_width;
};

// All are called with `user`; a NULL callback is skipped. None is called from the decode path.
struct spark_server_callbacks {
    void * user;
    // Before the weights are loaded, on the thread of spark_server_run; again after sleep. Sets *store to serve with
    // residency, or leaves it NULL to serve without. Non-zero: the reason has been printed, exit with status 1.
    int32_t (*model_loading)(void * user, struct spark_server_model * model, struct spark_store ** store);
    // Model, draft and contexts have been created, and with a store on a device a full micro-batch has been computed, so all
    // memory but the fast slots is in use; same thread, again after sleep. `context` is the model's own llama_context: what the
    // callback computes with it must be cleared from its memory again. Non-zero: as above.
    int32_t (*contexts_created)(void * user, struct llama_context * context);
    // The model is loaded and the server is about to listen; same thread.
    void    (*model_loaded)(void * user);
    // A request has ended (or was cancelled); on the inference thread, so it must only note the fact and return.
    void    (*request_finished)(void * user, int32_t id_slot, int32_t n_prompt, int32_t n_decoded, double prompt_ms, double decode_ms);
    // A GET on one of `routes`, on an HTTP thread. Non-zero: answered with status 500.
    int32_t (*http_get)(void * user, const char * path, struct spark_http_reply * reply);
    // The value of "spark" in /props, JSON, set through spark_http_reply_set; on an HTTP thread.
    int32_t (*props)(void * user, struct spark_http_reply * reply);
    // Serving has ended, before the model is freed; on the thread of spark_server_run.
    void    (*shutdown)(void * user);
    const char * const * routes; // paths for http_get, n_routes of them, e.g. "/spark/stats"
    int32_t n_routes;
    int32_t n_child_args;
    // Router mode: the program that starts a child instead of this process's executable (NULL: that executable), and
    // arguments added to those llama-server gives its children, n_child_args of them.
    const char * child_program;
    const char * const * child_args;
    struct spark_draft_params drafting;
};

// Sets the answer; copies. status: an HTTP status code.
void    spark_http_reply_set(struct spark_http_reply * reply, int32_t status, const char * content_type, const char * body, size_t n_body);

// Runs llama-server in this thread until it ends; argv as for the llama-server binary, argv[0] included.
// Installs llama-server's own handlers for SIGINT and SIGTERM. Once per process at a time.
// OK with *exit_code = what llama-server would have exited with; INVALID_ARGUMENT, BAD_STATE (already running).
int32_t spark_server_run(int32_t argc, const char * const * argv, const struct spark_server_callbacks * callbacks, int32_t * exit_code);
/* cffi:end */

#ifdef __cplusplus
}
#endif

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
