// The C API over expert_store. Checks arguments, turns exceptions into statuses, owns nothing but the handle.
#include "spark_moe.h"

#include "buffer_type.h"
#include "expert_store.h"
#include "status.h"

#include "llama.h"
#include "src/llama-ext.h"

#include <algorithm>

struct spark_store {
    std::shared_ptr<spark::expert_store> core;
    const llama_model_tensor_buft_override * overrides = nullptr;
};

namespace {

using spark::error;
using spark::format;

void require(bool condition, const char * text) {
    if (!condition) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, text);
    }
}

spark::layer_state & layer_at(const spark_store * store, int32_t index) {
    require(store, "store is NULL");
    const auto & layers = store->core->layers;
    if (index < 0 || (size_t) index >= layers.size()) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("layer index %d; the model has %zu layers with experts", index, layers.size()));
    }
    return *layers[index];
}

void require_n_expert(const spark::layer_state & layer, const void * out, int32_t n_expert) {
    require(out, "out is NULL");
    if (n_expert != layer.file.n_expert) {
        throw error(SPARK_STATUS_INVALID_ARGUMENT, format("room for %d experts; block %d has %d", n_expert, layer.file.layer, layer.file.n_expert));
    }
}

} // namespace

void spark_set_fused_qkv(bool enabled) {
    llama_set_qkv_views(enabled);
}

uint32_t spark_api_version(void) {
    return SPARK_API_VERSION;
}

size_t spark_sizeof(int32_t which) {
    switch (which) {
        case SPARK_STRUCT_STORE_PARAMS:     return sizeof(spark_store_params);
        case SPARK_STRUCT_LAYER_INFO:       return sizeof(spark_layer_info);
        case SPARK_STRUCT_LAYER_PLAN:       return sizeof(spark_layer_plan);
        case SPARK_STRUCT_PLAN:             return sizeof(spark_plan);
        case SPARK_STRUCT_STATS:            return sizeof(spark_stats);
        case SPARK_STRUCT_SERVER_MODEL:     return sizeof(spark_server_model);
        case SPARK_STRUCT_SERVER_CALLBACKS: return sizeof(spark_server_callbacks);
        case SPARK_STRUCT_DEVICE_INFO:      return sizeof(spark_device_info);
        case SPARK_STRUCT_DRAFT_PARAMS:     return sizeof(spark_draft_params);
        case SPARK_STRUCT_SPECULATION_PARAMS: return sizeof(spark_speculation_params);
        case SPARK_STRUCT_SAMPLING:           return sizeof(spark_sampling);
        case SPARK_STRUCT_SPECULATION_STEP:   return sizeof(spark_speculation_step);
        case SPARK_STRUCT_SPECULATION_STATS:  return sizeof(spark_speculation_stats);
        default:                            return 0;
    }
}

const char * spark_last_error(void) {
    return spark::last_error();
}

int32_t spark_store_init(const spark_store_params * params, spark_store ** out) {
    return spark::guard([&] {
        require(params && out, "params or out is NULL");
        require(params->model_path && params->model_path[0], "model_path is empty");
        if (params->n_io_threads < 0 || params->n_io_threads > 64) {
            throw error(SPARK_STATUS_INVALID_ARGUMENT, format("n_io_threads is %d; 1 to 64, or 0 for the default", params->n_io_threads));
        }
        spark::store_options options;
        options.path      = params->model_path;
        options.direct_io = params->direct_io;
        options.lock_fast = params->lock_fast;
        options.device    = params->device ? params->device : "";
        if (params->n_io_threads > 0) {
            options.n_io_threads = params->n_io_threads;
        }
        auto store = std::make_unique<spark_store>();
        store->core      = std::make_shared<spark::expert_store>(options);
        store->overrides = spark::make_overrides(store->core);
        *out = store.release();
    });
}

void spark_store_free(spark_store * store) {
    delete store;
}

int32_t spark_store_n_layers(const spark_store * store) {
    return store ? (int32_t) store->core->layers.size() : 0;
}

int32_t spark_store_get_layer_info(const spark_store * store, int32_t index, spark_layer_info * out) {
    return spark::guard([&] {
        const spark::expert_layer & layer = layer_at(store, index).file;
        require(out, "out is NULL");
        *out = { layer.layer, layer.n_expert, (int32_t) layer.tensors.size(), layer.expert_bytes };
    });
}

int32_t spark_store_set_plan(spark_store * store, const spark_plan * plan) {
    return spark::guard([&] {
        require(store && plan, "store or plan is NULL");
        store->core->set_plan(*plan);
    });
}

int32_t spark_store_place(spark_store * store, const spark_plan * plan) {
    return spark::guard([&] {
        require(store && plan, "store or plan is NULL");
        store->core->place(*plan);
    });
}

const char * spark_store_get_device(const spark_store * store) {
    return store ? store->core->options.device.c_str() : "";
}

int32_t spark_device_get_info(int32_t index, spark_device_info * out) {
    return spark::guard([&] {
        require(out, "out is NULL");
        *out = spark::read_device_info(index);
    });
}

int32_t spark_device_get_memory(const char * device, uint64_t * free_bytes, uint64_t * total_bytes) {
    return spark::guard([&] {
        require(device && free_bytes && total_bytes, "device or an out is NULL");
        const spark::device_memory memory = spark::read_device_memory(device);
        *free_bytes  = memory.free;
        *total_bytes = memory.total;
    });
}

const void * spark_store_get_overrides(spark_store * store) {
    return store ? store->overrides : nullptr;
}

bool spark_store_is_loaded(const spark_store * store) {
    return store && store->core->is_loaded();
}

int32_t spark_store_get_stats(const spark_store * store, spark_stats * out) {
    return spark::guard([&] {
        require(store && out, "store or out is NULL");
        store->core->update_stats();
        spark_stats total = {};
        total.layer = -1;
        for (size_t i = 0; i < store->core->layers.size(); i++) {
            const spark_stats s = store->core->layer_stats((int32_t) i);
            total.n_expert     += s.n_expert;
            total.n_fast       += s.n_fast;
            total.n_resident   += s.n_resident;
            total.fast_bytes   += s.fast_bytes;
            total.locked_bytes += s.locked_bytes;
            total.uses         += s.uses;
            total.hits         += s.hits;
            total.misses       += s.misses;
            total.misses_home  += s.misses_home;
            total.bytes_read   += s.bytes_read;
            total.bytes_home   += s.bytes_home;
            total.bytes_ahead  += s.bytes_ahead;
            total.reads_home   += s.reads_home;
            total.reads_ahead  += s.reads_ahead;
            total.promotions   += s.promotions;
            total.evictions    += s.evictions;
            total.read_ns      += s.read_ns;
        }
        const auto steps = store->core->step_counts();
        total.steps          = steps.steps;
        total.steps_replayed = steps.replayed;
        *out = total;
    });
}

int32_t spark_store_get_layer_stats(const spark_store * store, int32_t index, spark_stats * out) {
    return spark::guard([&] {
        layer_at(store, index);
        require(out, "out is NULL");
        store->core->update_stats();
        *out = store->core->layer_stats(index);
    });
}

int32_t spark_store_get_residency(const spark_store * store, int32_t index, int32_t * slots, int32_t n_expert) {
    return spark::guard([&] {
        const spark::layer_state & layer = layer_at(store, index);
        require_n_expert(layer, slots, n_expert);
        std::lock_guard<std::mutex> lock(layer.mutex);
        if (layer.slot_of.empty()) {
            throw error(SPARK_STATUS_BAD_STATE, "no model has been loaded through this store yet");
        }
        std::copy(layer.slot_of.begin(), layer.slot_of.end(), slots);
    });
}

int32_t spark_store_get_counts(const spark_store * store, int32_t index, uint64_t * counts, int32_t n_expert) {
    return spark::guard([&] {
        const spark::layer_state & layer = layer_at(store, index);
        require_n_expert(layer, counts, n_expert);
        store->core->update_stats();
        std::lock_guard<std::mutex> lock(layer.mutex);
        std::copy(layer.stats.uses.begin(), layer.stats.uses.end(), counts);
    });
}

int32_t spark_store_reset_stats(spark_store * store) {
    return spark::guard([&] {
        require(store, "store is NULL");
        store->core->update_stats();
        for (auto & layer : store->core->layers) {
            std::lock_guard<std::mutex> lock(layer->mutex);
            layer->stats.reset();
        }
    });
}

int32_t spark_store_wait_idle(spark_store * store, int32_t timeout_ms) {
    return spark::guard([&] {
        require(store, "store is NULL");
        if (!store->core->wait_idle(timeout_ms)) {
            throw error(SPARK_STATUS_BAD_STATE, format("the swap engine is still busy after %d ms", timeout_ms));
        }
    });
}
