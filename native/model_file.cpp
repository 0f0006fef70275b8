#include "model_file.h"

#include "status.h"

#include "gguf.h"
#include "llama.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace spark {

namespace {

struct gguf_deleter { void operator()(gguf_context * ctx) const { gguf_free(ctx); } };
struct ggml_deleter { void operator()(ggml_context * ctx) const { ggml_free(ctx); } };

struct header {
    std::unique_ptr<gguf_context, gguf_deleter> gguf;
    std::unique_ptr<ggml_context, ggml_deleter> meta;
};

header read_header(const std::string & path) {
    ggml_context * meta = nullptr;
    gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ &meta };
    header result;
    result.gguf.reset(gguf_init_from_file(path.c_str(), params));
    result.meta.reset(meta);
    if (!result.gguf) {
        throw error(SPARK_STATUS_BAD_FORMAT, format("'%s' is not a readable GGUF file: its header is damaged or cut off; download it again", path.c_str()));
    }
    return result;
}

int64_t get_u16(const gguf_context * gguf, const char * key, int64_t otherwise) {
    const int64_t id = gguf_find_key(gguf, key);
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(gguf, id) : otherwise;
}

// Block number of an expert weight of `name`, or -1. `kind` receives what stands between "ffn_" and "_exps".
int32_t expert_layer_of(const std::string & name, std::string & kind) {
    int layer = -1;
    int used  = 0;
    if (sscanf(name.c_str(), "blk.%d.ffn_%n", &layer, &used) != 1 || used == 0 || layer < 0) {
        return -1;
    }
    for (const char * candidate : { "gate", "up", "down", "gate_up" }) {
        if (name.substr(used) == std::string(candidate) + "_exps.weight") {
            kind = candidate;
            return layer;
        }
    }
    return -1;
}

size_t direct_io_alignment(int fd) {
#if defined(__linux__) && defined(STATX_DIOALIGN)
    struct statx stx;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &stx) == 0 && (stx.stx_mask & STATX_DIOALIGN)) {
        return std::max<size_t>(stx.stx_dio_offset_align, stx.stx_dio_mem_align); // 0: not supported for this file
    }
#endif
    (void) fd;
    return 4096; // covers 512 and 4096 byte sectors
}

} // namespace

model_file::model_file(const std::string & path, bool direct_io) {
    try {
        open_shard(path, direct_io);
        header first = read_header(path);
        const int64_t n_split = get_u16(first.gguf.get(), "split.count", 1);
        if (n_split > 1) {
            const int64_t no = get_u16(first.gguf.get(), "split.no", 0);
            char prefix[4096];
            if (no != 0 || llama_split_prefix(prefix, sizeof(prefix), path.c_str(), (int32_t) no, (int32_t) n_split) <= 0) {
                throw error(SPARK_STATUS_BAD_FORMAT, format("'%s' is part %d of %d of a split model: give the first part (…-00001-of-%05d.gguf)",
                    path.c_str(), (int) no + 1, (int) n_split, (int) n_split));
            }
            for (int32_t i = 1; i < n_split; i++) {
                char shard_path[4096 + 64];
                llama_split_path(shard_path, sizeof(shard_path), prefix, i, (int32_t) n_split);
                open_shard(shard_path, direct_io);
            }
        }
        for (size_t i = 0; i < shards.size(); i++) {
            header h = i == 0 ? std::move(first) : read_header(shards[i].path);
            add_tensors(shards[i].path, (int32_t) i, h.gguf.get(), h.meta.get());
        }
        if (layers.empty()) {
            throw error(SPARK_STATUS_NO_EXPERTS, format("'%s' has no routed experts: it is a dense model", path.c_str()));
        }
        for (expert_layer & layer : layers) {
            layer.is_prediction = std::find(prediction_blocks.begin(), prediction_blocks.end(), layer.layer) != prediction_blocks.end();
        }
        std::sort(layers.begin(), layers.end(), [](const expert_layer & a, const expert_layer & b) { return a.layer < b.layer; });
        for (expert_layer & layer : layers) {
            // the matrix that is read last ends the use of a layer's slots
            std::stable_sort(layer.tensors.begin(), layer.tensors.end(), [](const expert_tensor & a, const expert_tensor & b) { return a.is_down < b.is_down; });
        }
    } catch (...) {
        close_all();
        throw;
    }
}

model_file::~model_file() {
    close_all();
}

void model_file::close_all() {
    for (shard & s : shards) {
        if (s.fd >= 0)        { close(s.fd); }
        if (s.fd_direct >= 0) { close(s.fd_direct); }
    }
    shards.clear();
}

void model_file::open_shard(const std::string & path, bool direct_io) {
    shard s;
    s.path = path;
    s.fd   = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (s.fd < 0) {
        throw error(SPARK_STATUS_NOT_FOUND, format("cannot open '%s': %s", path.c_str(), strerror(errno)));
    }
    shards.push_back(s);
    shard & added = shards.back();
    struct stat st;
    if (fstat(added.fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        throw error(SPARK_STATUS_NOT_FOUND, format("'%s' is not a regular file", path.c_str()));
    }
    added.size = (size_t) st.st_size;
#if defined(O_DIRECT)
    if (direct_io) {
        added.dio_align = direct_io_alignment(added.fd);
        if (added.dio_align > 0) {
            added.fd_direct = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        }
    }
#else
    (void) direct_io;
#endif
}

void model_file::add_tensors(const std::string & path, int32_t shard_index, const gguf_context * gguf, ggml_context * meta) {
    const size_t data_offset = gguf_get_data_offset(gguf);
    const size_t file_size   = shards[shard_index].size;

    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); i++) {
        const std::string name = gguf_get_tensor_name(gguf, i);
        int32_t prediction_block;
        if (name.find(".nextn.") != std::string::npos && sscanf(name.c_str(), "blk.%d.", &prediction_block) == 1) {
            prediction_blocks.push_back(prediction_block);
        }
        std::string kind;
        const int32_t block = expert_layer_of(name, kind);
        if (block < 0) {
            continue;
        }
        const ggml_tensor * t = ggml_get_tensor(meta, name.c_str());
        if (!t || t->ne[0] < 1 || t->ne[1] < 1 || t->nb[2] == 0 || t->ne[2] < 1 || t->ne[2] > INT32_MAX / 4 || t->ne[3] != 1) {
            throw error(SPARK_STATUS_BAD_FORMAT, format("'%s': tensor '%s' has an impossible shape", path.c_str(), name.c_str()));
        }
        expert_tensor tensor;
        tensor.name     = name;
        tensor.type     = t->type;
        tensor.ne0      = t->ne[0];
        tensor.ne1      = t->ne[1];
        tensor.n_expert = (int32_t) t->ne[2];
        tensor.stride   = t->nb[2];
        tensor.shard    = shard_index;
        tensor.offset   = data_offset + gguf_get_tensor_offset(gguf, i);
        tensor.is_down  = kind == "down";
        const size_t size = ggml_nbytes(t);
        if (tensor.offset > file_size || size > file_size - tensor.offset) {
            throw error(SPARK_STATUS_BAD_FORMAT, format("'%s' is cut off: tensor '%s' ends at byte %zu, the file at %zu; download it again",
                path.c_str(), name.c_str(), tensor.offset + size, file_size));
        }

        auto it = std::find_if(layers.begin(), layers.end(), [&](const expert_layer & l) { return l.layer == block; });
        if (it == layers.end()) {
            layers.push_back({ block, tensor.n_expert, 0, {}, false });
            it = layers.end() - 1;
        }
        if (it->n_expert != tensor.n_expert) {
            throw error(SPARK_STATUS_BAD_FORMAT, format("'%s': tensor '%s' has %d experts, others of block %d have %d",
                path.c_str(), name.c_str(), tensor.n_expert, block, it->n_expert));
        }
        it->expert_bytes += tensor.stride;
        it->tensors.push_back(std::move(tensor));
    }
}

} // namespace spark
