// patches/0110: with "ggml_backend_set_rows_alone" a row of a product or of attention has the same bits alone and among
// others. Every weight type, in plain and in repacked buffers, on one thread and on three; attention also when the batch
// sees a longer cache than the row alone would.
#include "check.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace {

constexpr int MAX_ROWS = 16;
constexpr int WIDTHS[] = { 2, 3, 4, 5, 7, 8, 9, 13, 16 };
constexpr ggml_type WEIGHT_TYPES[] = {
    GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K,
    GGML_TYPE_Q3_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_IQ3_S, GGML_TYPE_MXFP4,
};

struct free_context { void operator()(ggml_context * c) const { ggml_free(c); } };
struct free_buffer  { void operator()(ggml_backend_buffer_t b) const { ggml_backend_buffer_free(b); } };
struct free_backend { void operator()(ggml_backend_t b) const { ggml_backend_free(b); } };
using context_ptr = std::unique_ptr<ggml_context, free_context>;
using buffer_ptr  = std::unique_ptr<ggml_backend_buffer, free_buffer>;

context_ptr new_context() { return context_ptr(ggml_init({ ggml_tensor_overhead()*64 + ggml_graph_overhead(), nullptr, true })); }

std::vector<float> noise(size_t n, float deviation) {
    static std::mt19937 random(1);
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> values(n);
    for (float & v : values) {
        v = normal(random);
    }
    return values;
}

// The CPU backend with its switch.
struct cpu {
    std::unique_ptr<ggml_backend, free_backend> backend { ggml_backend_cpu_init() };
    ggml_backend_dev_t device = ggml_backend_get_device(backend.get());
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);

    void set_rows_alone(int n) const {
        const auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_rows_alone");
        CHECK(set != nullptr);
        set(backend.get(), n);
    }

    std::vector<ggml_backend_buffer_type_t> weight_buffers() const {
        std::vector<ggml_backend_buffer_type_t> types = { ggml_backend_cpu_buffer_type() };
        const auto get = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts");
        for (ggml_backend_buffer_type_t * extra = get ? get(device) : nullptr; extra && *extra; extra++) {
            types.push_back(*extra);
        }
        return types;
    }
};

struct weight {
    context_ptr   context = new_context();
    ggml_tensor * tensor;
    buffer_ptr    buffer;

    weight(ggml_type type, std::vector<int64_t> shape, ggml_backend_buffer_type_t buffer_type)
        : tensor(ggml_new_tensor(context.get(), type, (int) shape.size(), shape.data())), buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), buffer_type)) {
        const std::vector<float> values = noise(ggml_nelements(tensor), 0.05f);
        std::vector<char> data(ggml_nbytes(tensor));
        ggml_quantize_chunk(type, values.data(), data.data(), 0, ggml_nrows(tensor), tensor->ne[0], std::vector<float>(tensor->ne[0], 1.0f).data());
        ggml_backend_tensor_set(tensor, data.data(), 0, data.size());
    }
};

using inputs = std::vector<std::pair<ggml_tensor *, const void *>>;
using build  = std::function<ggml_tensor * (ggml_context *, inputs &)>;

std::vector<float> compute(const cpu & cpu, const build & make) {
    const context_ptr context = new_context();
    inputs in;
    ggml_tensor * out = make(context.get(), in);
    ggml_cgraph * graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, out);
    const buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(context.get(), cpu.backend.get()));
    for (const auto & [tensor, data] : in) {
        ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
    }
    CHECK(ggml_backend_graph_compute(cpu.backend.get(), graph) == GGML_STATUS_SUCCESS);
    std::vector<float> values(ggml_nelements(out));
    ggml_backend_tensor_get(out, values.data(), 0, values.size()*sizeof(float));
    return values;
}

float largest_difference(const std::vector<float> & a, const std::vector<float> & b) {
    float largest = 0;
    for (size_t i = 0; i < a.size(); i++) {
        largest = std::max(largest, std::isfinite(a[i] - b[i]) ? std::fabs(a[i] - b[i]) : INFINITY);
    }
    return largest;
}

// Rows that differ from the row computed alone; rows(first, n, is_batch) computes n of them.
int differing(const std::function<std::vector<float>(int first, int n, bool is_batch)> & rows) {
    std::vector<std::vector<float>> alone;
    for (int i = 0; i < MAX_ROWS; i++) {
        alone.push_back(rows(i, 1, false));
    }
    int count = 0;
    for (int n : WIDTHS) {
        const std::vector<float> batch = rows(0, n, true);
        for (int i = 0; i < n; i++) {
            count += memcmp(batch.data() + i*alone[i].size(), alone[i].data(), alone[i].size()*sizeof(float)) != 0;
        }
    }
    return count;
}

int differing_products(const cpu & cpu, const weight & w) {
    const int64_t n_in = w.tensor->ne[0], n_expert = w.tensor->ne[2];
    const std::vector<float> x = noise((size_t) n_in*MAX_ROWS, 1);
    std::vector<int32_t> ids;
    for (int i = 0; i < MAX_ROWS; i++) { // most rows share an expert, so that it gets many of them
        ids.insert(ids.end(), { i % 7 == 0 ? 1 : 0, 2 + i % (int) std::max<int64_t>(1, n_expert - 2) });
    }
    return differing([&](int first, int n, bool) {
        return compute(cpu, [&](ggml_context * c, inputs & in) {
            ggml_tensor * rows = n_expert > 1 ? ggml_new_tensor_3d(c, GGML_TYPE_F32, n_in, 1, n) : ggml_new_tensor_2d(c, GGML_TYPE_F32, n_in, n);
            in.emplace_back(rows, x.data() + first*n_in);
            if (n_expert == 1) {
                return ggml_mul_mat(c, w.tensor, rows);
            }
            ggml_tensor * selected = ggml_new_tensor_2d(c, GGML_TYPE_I32, 2, n);
            in.emplace_back(selected, ids.data() + first*2);
            return ggml_mul_mat_id(c, w.tensor, rows, selected);
        });
    });
}

// The cache has n_kv cells when a row is alone and 256 more in a batch; row i sees the first n_kv - 20 + i of them.
int differing_attention(const cpu & cpu, ggml_type type, int n_kv) {
    constexpr int HEAD = 64, N_HEAD = 6, N_HEAD_KV = 2;
    const weight k(type, { HEAD, n_kv + 256, N_HEAD_KV }, ggml_backend_cpu_buffer_type()), v(type, { HEAD, n_kv + 256, N_HEAD_KV }, ggml_backend_cpu_buffer_type());
    const std::vector<float> q = noise((size_t) HEAD*N_HEAD*MAX_ROWS, 3);
    const auto attend = [&](int first, int n, bool is_batch) {
        const int n_cells = is_batch ? n_kv + 256 : n_kv;
        std::vector<ggml_fp16_t> seen((size_t) n_cells*n);
        for (int i = 0; i < n; i++) {
            for (int j = 0; j < n_cells; j++) {
                seen[(size_t) i*n_cells + j] = ggml_fp32_to_fp16(j < n_kv - 20 + first + i ? 0.0f : -INFINITY);
            }
        }
        return compute(cpu, [&](ggml_context * c, inputs & in) {
            ggml_tensor * rows = ggml_new_tensor_3d(c, GGML_TYPE_F32, HEAD, N_HEAD, n);
            ggml_tensor * mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, n_cells, n);
            in.emplace_back(rows, q.data() + (size_t) first*HEAD*N_HEAD);
            in.emplace_back(mask, seen.data());
            const auto cells = [&](ggml_tensor * t) { return ggml_view_3d(c, t, HEAD, n_cells, N_HEAD_KV, t->nb[1], t->nb[2], 0); };
            return ggml_flash_attn_ext(c, ggml_permute(c, rows, 0, 2, 1, 3), cells(k.tensor), cells(v.tensor), mask, 0.125f, 0, 0);
        });
    };
    const std::vector<float> split = attend(0, MAX_ROWS, true);
    cpu.set_rows_alone(0); // attention that is not split over threads; values are about 0.01, and sums are rounded to F16
    CHECK(largest_difference(split, attend(0, MAX_ROWS, true)) < 2e-4f);
    cpu.set_rows_alone(64);
    return differing(attend);
}

bool is_supported(const cpu & cpu, const weight & w, bool is_plain) {
    const context_ptr c = new_context();
    ggml_tensor * rows = ggml_new_tensor_3d(c.get(), GGML_TYPE_F32, w.tensor->ne[0], 1, 4);
    ggml_tensor * ids = ggml_new_tensor_2d(c.get(), GGML_TYPE_I32, 2, 4);
    ggml_tensor * op = w.tensor->ne[2] > 1 ? ggml_mul_mat_id(c.get(), w.tensor, rows, ids) : ggml_mul_mat(c.get(), w.tensor, ggml_reshape_2d(c.get(), rows, w.tensor->ne[0], 4));
    return is_plain || (w.tensor->extra && ggml_backend_dev_supports_op(cpu.device, op));
}

void products_of_small_batches() {
    const cpu cpu;
    int differed_without = 0;
    for (int n_threads : { 1, 3 }) {
        ggml_backend_cpu_set_n_threads(cpu.backend.get(), n_threads);
        for (ggml_backend_buffer_type_t buffer_type : cpu.weight_buffers()) {
            for (ggml_type type : WEIGHT_TYPES) {
                for (std::vector<int64_t> shape : { std::vector<int64_t>{ 512, 96 }, std::vector<int64_t>{ 256, 64, 5 } }) {
                    const context_ptr probe = new_context();
                    ggml_tensor * t = ggml_new_tensor(probe.get(), type, (int) shape.size(), shape.data());
                    const buffer_ptr in(ggml_backend_alloc_ctx_tensors_from_buft(probe.get(), buffer_type));
                    if (buffer_type != ggml_backend_cpu_buffer_type() && !t->extra) {
                        continue; // this buffer type has no kernels for the weight
                    }
                    const weight w(type, shape, buffer_type);
                    if (!is_supported(cpu, w, buffer_type == ggml_backend_cpu_buffer_type())) {
                        continue;
                    }
                    cpu.set_rows_alone(0);
                    differed_without += differing_products(cpu, w);
                    cpu.set_rows_alone(64);
                    const int n = differing_products(cpu, w);
                    if (n > 0) {
                        test::fail(__FILE__, __LINE__, std::to_string(n) + " rows of " + ggml_op_name(shape.size() > 2 ? GGML_OP_MUL_MAT_ID : GGML_OP_MUL_MAT) + " " + ggml_type_name(type) + " in "
                            + ggml_backend_buft_name(buffer_type) + " differ on " + std::to_string(n_threads) + " threads");
                    }
                }
            }
        }
    }
    printf("%d rows differ when nothing asks for equal ones\n", differed_without);
}

void attention_of_small_batches() {
    const cpu cpu;
    cpu.set_rows_alone(64);
    for (int n_threads : { 1, 2, 3 }) {
        ggml_backend_cpu_set_n_threads(cpu.backend.get(), n_threads);
        for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
            for (int n_kv : { 256, 512, 1024 }) {
                const int n = differing_attention(cpu, type, n_kv);
                if (n > 0) {
                    test::fail(__FILE__, __LINE__, std::to_string(n) + " rows of attention over " + std::to_string(n_kv) + " cells of " + ggml_type_name(type) + " differ on "
                        + std::to_string(n_threads) + " threads");
                }
            }
        }
    }
}

} // namespace

int main() {
    RUN(products_of_small_batches);
    RUN(attention_of_small_batches);
    return test::failures();
}
