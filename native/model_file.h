// What a GGUF (all its shards) says about its routed experts, and the open files to read them from. Reads headers only.
#pragma once

#include "ggml.h"
#include "gguf.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace spark {

// One expert tensor of one layer: n_expert matrices of [ne0, ne1], `stride` bytes apart.
struct expert_tensor {
    std::string name;     // e.g. "blk.3.ffn_up_exps.weight"
    ggml_type   type;
    int64_t     ne0;
    int64_t     ne1;
    int32_t     n_expert;
    size_t      stride;   // bytes of one expert
    int32_t     shard;    // index into model_file::shards
    size_t      offset;   // of expert 0 in that file, bytes
    bool        is_down;  // the last matrix of the layer
};

struct expert_layer {
    int32_t layer;        // block number
    int32_t n_expert;
    size_t  expert_bytes; // one expert, over all tensors
    std::vector<expert_tensor> tensors;
    bool is_prediction = false; // multi-token prediction: a graph of its own runs it, not the model's
};

class model_file {
public:
    // Throws error: NOT_FOUND, BAD_FORMAT, NO_EXPERTS.
    model_file(const std::string & path, bool direct_io);
    ~model_file();
    model_file(const model_file &) = delete;
    model_file & operator=(const model_file &) = delete;

    struct shard {
        std::string path;
        size_t size      = 0;
        int    fd        = -1; // buffered
        int    fd_direct = -1; // O_DIRECT, or -1 where it is not wanted or not possible
        size_t dio_align = 0;  // bytes that offsets, sizes and addresses of direct reads are multiples of
    };

    std::vector<shard>        shards;
    std::vector<expert_layer> layers; // in block order

private:
    void open_shard(const std::string & path, bool direct_io);
    void add_tensors(const std::string & path, int32_t shard_index, const gguf_context * gguf, ggml_context * meta);
    void close_all();

    std::vector<int32_t> prediction_blocks; // blocks with tensors of multi-token prediction
};

} // namespace spark
