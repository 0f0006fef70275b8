// Reads of experts: aligned or not, direct or not, cut off, refused, many at once.
#include "check.h"
#include "expert_reader.h"
#include "model_file.h"
#include "tiny_gguf.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

using spark::expert_reader;
using spark::model_file;
using spark::read_expert;
using spark::read_job;

static test::temporary_folder folder;
static const std::vector<test::tensor_description> TENSORS = test::moe_tensors(2, 6);

static std::string model_path() {
    const std::string path = folder.file("model.gguf");
    test::write_gguf(path, TENSORS);
    return path;
}

// Memory that ends at a page that may not be touched: a read past its destination crashes.
struct guarded {
    explicit guarded(size_t size) : page(sysconf(_SC_PAGESIZE)) {
        mapped = (size + page - 1) / page * page + 2 * page;
        base   = (char *) mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED || mprotect(base + mapped - page, page, PROT_NONE) != 0) { throw std::runtime_error("no guarded memory"); }
    }
    ~guarded() { munmap(base, mapped); }
    char * ending_at_guard(size_t size) const { return base + mapped - page - size; }
    char * at(size_t offset) const { return base + offset; }

    const size_t page;
    char * base;
    size_t mapped;
};

static void every_expert_at_every_alignment() {
    const std::string path = model_path();
    for (bool direct : { false, true }) {
        const model_file file(path, direct);
        for (const auto & layer : file.layers) {
            for (const auto & tensor : layer.tensors) {
                const auto & described = test::find(TENSORS, tensor.name);
                CHECK_EQ(tensor.stride, test::expert_stride(described));
                for (int32_t e = 0; e < tensor.n_expert; e++) {
                    guarded memory(tensor.stride + 8192);
                    const size_t offset = tensor.offset + (size_t) e * tensor.stride;
                    // as the expert lies in the file (reads go straight to the slot), shifted by less than a block, and at the guard
                    for (char * dst : { memory.at(offset % 4096), memory.at(offset % 4096 + 32), memory.ending_at_guard(tensor.stride) }) {
                        memset(memory.base, 0x7e, memory.mapped - memory.page);
                        CHECK_EQ(read_expert(file, { tensor.shard, offset, tensor.stride, dst }), 0);
                        CHECK(test::holds_expert(described, e, dst));
                        CHECK(dst == memory.base || dst[-1] == 0x7e);
                        CHECK(dst + tensor.stride == memory.base + memory.mapped - memory.page || dst[tensor.stride] == 0x7e);
                    }
                }
            }
        }
    }
}

static void a_file_that_shrank_is_an_error() {
    const std::string path = folder.file("shrinks.gguf");
    test::write_gguf(path, TENSORS);
    for (bool direct : { false, true }) {
        test::write_gguf(path, TENSORS);
        const model_file file(path, direct);
        const auto & tensor = file.layers.back().tensors.back();
        const size_t offset = tensor.offset + (size_t) (tensor.n_expert - 1) * tensor.stride;
        CHECK_EQ(truncate(path.c_str(), (off_t) (offset + tensor.stride / 2)), 0);
        std::vector<char> memory(tensor.stride);
        CHECK_EQ(read_expert(file, { tensor.shard, offset, tensor.stride, memory.data() }), -1);
        CHECK_EQ(truncate(path.c_str(), (off_t) offset), 0);
        CHECK_EQ(read_expert(file, { tensor.shard, offset, tensor.stride, memory.data() }), -1);
    }
}

static void a_refused_read_has_its_reason() {
    const std::string path = model_path();
    model_file file(path, true);
    close(file.shards[0].fd);
    if (file.shards[0].fd_direct >= 0) { close(file.shards[0].fd_direct); }
    file.shards[0].fd = file.shards[0].fd_direct = -1; // as when the descriptor is gone
    char byte;
    CHECK_EQ(read_expert(file, { 0, 0, 1, &byte }), EBADF);

    std::vector<read_job> jobs(5, read_job { 0, 0, 1, &byte });
    expert_reader reader(file, 2);
    reader.read(jobs);
    for (const read_job & job : jobs) { CHECK_EQ(job.error, EBADF); }
}

static void a_bad_destination_is_an_error_not_a_crash() {
    const model_file file(model_path(), false);
    const auto & tensor = file.layers[0].tensors[0];
    guarded memory(4096);
    CHECK_EQ(read_expert(file, { tensor.shard, tensor.offset, tensor.stride, memory.base + memory.mapped - memory.page }), EFAULT);
}

static void many_jobs_from_many_threads() {
    const model_file file(model_path(), true);
    for (int n_threads : { 1, 8 }) {
        expert_reader reader(file, n_threads);
        std::vector<std::thread> callers;
        std::atomic<int> wrong { 0 };
        for (int c = 0; c < 4; c++) {
            callers.emplace_back([&, c] {
                for (int round = 0; round < 20; round++) {
                    std::vector<read_job> jobs;
                    std::vector<std::vector<char>> memory;
                    std::vector<std::pair<const spark::expert_tensor *, int32_t>> what;
                    for (const auto & tensor : file.layers[c % 2].tensors) {
                        for (int32_t e = 0; e < tensor.n_expert; e++) {
                            memory.emplace_back(tensor.stride);
                            jobs.push_back({ tensor.shard, tensor.offset + (size_t) e * tensor.stride, tensor.stride, memory.back().data() });
                            what.push_back({ &tensor, e });
                        }
                    }
                    reader.read(jobs);
                    for (size_t i = 0; i < jobs.size(); i++) {
                        if (jobs[i].error != 0 || !test::holds_expert(test::find(TENSORS, what[i].first->name), what[i].second, jobs[i].dst)) { wrong++; }
                    }
                }
            });
        }
        for (auto & t : callers) { t.join(); }
        CHECK_EQ(wrong.load(), 0);
    }
}

static void run_calls_every_index_once() {
    const model_file file(model_path(), false);
    expert_reader reader(file, 4);
    for (size_t n : { (size_t) 0, (size_t) 1, (size_t) 2, (size_t) 3, (size_t) 100, (size_t) 5000 }) {
        std::vector<std::atomic<int>> calls(n);
        reader.run(n, [&](size_t i) { calls[i]++; });
        for (auto & c : calls) { CHECK_EQ(c.load(), 1); }
    }
    // from inside a call: the outer caller's work must not wait for the inner one for ever
    std::atomic<int> inner { 0 };
    reader.run(4, [&](size_t) { reader.run(4, [&](size_t) { inner++; }); });
    CHECK_EQ(inner.load(), 16);
}

int main() {
    RUN(every_expert_at_every_alignment);
    RUN(a_file_that_shrank_is_an_error);
    RUN(a_refused_read_has_its_reason);
    RUN(a_bad_destination_is_an_error_not_a_crash);
    RUN(many_jobs_from_many_threads);
    RUN(run_calls_every_index_once);
    return test::failures();
}
