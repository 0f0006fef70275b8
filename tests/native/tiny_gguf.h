// Writes small GGUF files whose expert bytes say whose they are, so that a test can tell which expert lies in a slot.
#pragma once

#include "ggml.h"
#include "gguf.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace test {

struct temporary_folder {
    std::string path;

    temporary_folder() {
        const char * parent = getenv("TMPDIR");
        std::string pattern = std::string(parent ? parent : "/tmp") + "/spark-test-XXXXXX";
        if (!mkdtemp(pattern.data())) { throw std::runtime_error("mkdtemp failed"); }
        path = pattern;
    }
    ~temporary_folder() {
        const std::string command = "rm -rf '" + path + "'";
        if (system(command.c_str()) != 0) { fprintf(stderr, "cannot remove %s\n", path.c_str()); }
    }
    std::string file(const std::string & name) const { return path + "/" + name; }
};

struct tensor_description {
    std::string name;
    ggml_type   type;
    std::vector<int64_t> ne;
    std::vector<uint8_t> bytes = {}; // of all experts; moe_tensors fills it
};

inline size_t expert_stride(const tensor_description & t) {
    return ggml_row_size(t.type, t.ne[0]) * (size_t) t.ne[1];
}

// Different for every tensor, expert and position. No byte is above 0x3f: finite as F32, F16, Q8_0.
inline std::vector<uint8_t> tensor_bytes(const tensor_description & t) {
    size_t rows = 1;
    for (size_t d = 1; d < t.ne.size(); d++) { rows *= (size_t) t.ne[d]; }
    std::vector<uint8_t> bytes(ggml_row_size(t.type, t.ne[0]) * rows);
    uint64_t state = 1469598103934665603u;
    for (char c : t.name) { state = (state ^ (uint8_t) c) * 1099511628211u; }
    for (uint8_t & byte : bytes) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        byte  = (uint8_t) (state >> 58);
    }
    return bytes;
}

// True when `data` holds expert `expert` of `t`.
inline bool holds_expert(const tensor_description & t, int32_t expert, const char * data) {
    return memcmp(data, t.bytes.data() + (size_t) expert * expert_stride(t), expert_stride(t)) == 0;
}

inline void write_gguf(const std::string & path, const std::vector<tensor_description> & tensors, int n_split = 1, int split_no = 0) {
    ggml_init_params params = { (tensors.size() + 1) * ggml_tensor_overhead(), nullptr, true };
    std::unique_ptr<ggml_context, void (*)(ggml_context *)> meta(ggml_init(params), ggml_free);
    std::unique_ptr<gguf_context, void (*)(gguf_context *)> gguf(gguf_init_empty(), gguf_free);
    gguf_set_val_str(gguf.get(), "general.architecture", "qwen3moe");
    if (n_split > 1) {
        gguf_set_val_u16(gguf.get(), "split.no", (uint16_t) split_no);
        gguf_set_val_u16(gguf.get(), "split.count", (uint16_t) n_split);
    }
    std::vector<std::vector<uint8_t>> data;
    for (const tensor_description & t : tensors) {
        ggml_tensor * tensor = ggml_new_tensor(meta.get(), t.type, (int) t.ne.size(), t.ne.data());
        ggml_set_name(tensor, t.name.c_str());
        data.push_back(t.bytes.empty() ? tensor_bytes(t) : t.bytes);
        data.back().reserve(1); // an address, even for a tensor without bytes
        tensor->data = data.back().data();
        gguf_add_tensor(gguf.get(), tensor);
    }
    if (!gguf_write_to_file(gguf.get(), path.c_str(), false)) { throw std::runtime_error("cannot write " + path); }
}

// `n_layers` layers of three expert tensors, with a dense tensor between them. The strides are no multiples of a page.
inline std::vector<tensor_description> moe_tensors(int n_layers, int64_t n_expert, int64_t n_embd = 96, int64_t n_ff = 160) {
    std::vector<tensor_description> all;
    for (int il = 0; il < n_layers; il++) {
        const std::string b = "blk." + std::to_string(il) + ".";
        all.push_back({ b + "attn_norm.weight",     GGML_TYPE_F32,  { n_embd } });
        all.push_back({ b + "ffn_down_exps.weight", GGML_TYPE_F16,  { n_ff, n_embd, n_expert } });
        all.push_back({ b + "ffn_gate_exps.weight", GGML_TYPE_Q8_0, { n_embd, n_ff, n_expert } });
        all.push_back({ b + "ffn_up_exps.weight",   GGML_TYPE_Q8_0, { n_embd, n_ff, n_expert } });
    }
    for (tensor_description & t : all) { t.bytes = tensor_bytes(t); }
    return all;
}

inline const tensor_description & find(const std::vector<tensor_description> & all, const std::string & name) {
    for (const tensor_description & t : all) {
        if (t.name == name) { return t; }
    }
    throw std::runtime_error("no tensor " + name);
}

inline std::vector<char> read_file(const std::string & path) {
    std::ifstream in(path, std::ios::binary);
    return std::vector<char>(std::istreambuf_iterator<char>(in), {});
}

inline void write_file(const std::string & path, const std::vector<char> & bytes) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), (std::streamsize) bytes.size());
    if (!out.flush()) { throw std::runtime_error("cannot write " + path); }
}

} // namespace test
