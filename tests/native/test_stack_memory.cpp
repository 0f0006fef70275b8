// One address range: fast slots that can be written, homes that are the file, at the same stride, whatever the offsets.
#include "check.h"
#include "stack_memory.h"
#include "tiny_gguf.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <vector>

using spark::make_stack_memory_cpu;
using spark::stack_home_slot;
using spark::stack_layout;

static test::temporary_folder folder;

// A file of `size` bytes with a pattern that does not repeat with the page.
static int open_pattern(size_t size) {
    const std::string path = folder.file("pattern");
    std::vector<char> bytes(size);
    for (size_t i = 0; i < size; i++) { bytes[i] = (char) (i * 2654435761u >> 13); }
    test::write_file(path, bytes);
    return open(path.c_str(), O_RDONLY);
}

static char pattern(size_t i) { return (char) (i * 2654435761u >> 13); }

static void homes_are_the_file_at_any_offset() {
    const size_t page = sysconf(_SC_PAGESIZE);
    const int fd = open_pattern(1 << 20);
    for (size_t stride : { (size_t) 32, (size_t) 34, page - 2, page, page + 18, 3 * page, (size_t) 53760 }) {
        for (size_t offset : { (size_t) 0, (size_t) 32, page - 32, page, page + 1, 5 * page + 4064 }) {
            const int32_t n_expert = 7;
            const int32_t home = stack_home_slot(stride, n_expert) + 3; // as when another tensor of the layer is smaller
            auto memory = make_stack_memory_cpu({ stride, n_expert, 3, home, fd, offset }, false);
            CHECK_EQ(memory->n_slots(), home + n_expert);
            for (int32_t e = 0; e < n_expert; e++) {
                const char * at = memory->base() + (size_t) (home + e) * stride;
                bool same = true;
                for (size_t i = 0; i < stride; i++) { same = same && at[i] == pattern(offset + e * stride + i); }
                CHECK(same);
            }
            // all fast slots can be written, and homes do not notice
            memset(memory->base(), 0x5a, 3 * stride);
            CHECK(memory->base()[3 * stride - 1] == 0x5a);
            CHECK(memory->base()[(size_t) home * stride] == pattern(offset));
        }
    }
    close(fd);
}

static void dropped_homes_come_back() {
    const int fd = open_pattern(1 << 20);
    const size_t stride = 10000;
    const int32_t home = stack_home_slot(stride, 20);
    auto memory = make_stack_memory_cpu({ stride, 20, 0, home, fd, 480 }, false);
    for (int32_t e : { 0, 7, 19 }) {
        memory->prefetch_home(e);
        memory->drop_homes();
        const char * at = memory->base() + (size_t) (home + e) * stride;
        bool same = true;
        for (size_t i = 0; i < stride; i++) { same = same && at[i] == pattern(480 + e * stride + i); }
        CHECK(same);
        memory->drop_homes();
        CHECK(at[stride / 2] == pattern(480 + e * stride + stride / 2));
    }
    close(fd);
}

static void no_fast_slots_need_no_memory() {
    const int fd = open_pattern(1 << 16);
    auto memory = make_stack_memory_cpu({ 4096, 4, 0, stack_home_slot(4096, 4), fd, 0 }, true);
    CHECK_EQ(memory->fast_bytes(), (size_t) 0);
    CHECK_EQ(memory->locked_bytes(), (size_t) 0);
    close(fd);
}

static void a_refused_lock_is_no_failure() {
    rlimit old_limit;
    CHECK_EQ(getrlimit(RLIMIT_MEMLOCK, &old_limit), 0);
    const rlimit none = { 0, old_limit.rlim_max };
    CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, &none), 0);
    const int fd = open_pattern(1 << 16);
    auto memory = make_stack_memory_cpu({ 4096, 4, 4, stack_home_slot(4096, 4), fd, 0 }, true);
    CHECK(memory->fast_bytes() >= 4 * 4096);
    CHECK(memory->locked_bytes() == 0 || geteuid() == 0); // root may lock past the limit
    memset(memory->base(), 1, 4 * 4096);
    close(fd);
    CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, &old_limit), 0);
}

static void impossible_sizes_are_refused() {
    const int fd = open_pattern(1 << 16);
    const size_t huge = (size_t) 1 << 45; // times 16 slots: more than an address space
    CHECK_THROWS(make_stack_memory_cpu({ huge, 4, 1, stack_home_slot(huge, 4), fd, 0 }, false), SPARK_STATUS_OUT_OF_MEMORY, "address space");
    close(fd);
    CHECK_THROWS(make_stack_memory_cpu({ 4096, 4, 1, stack_home_slot(4096, 4), -1, 0 }, false), SPARK_STATUS_IO, "map");
}

static void the_slot_count_does_not_depend_on_fast_slots() {
    const int fd = open_pattern(1 << 16);
    const int32_t home = stack_home_slot(4096, 8);
    for (int32_t n_fast = 0; n_fast <= 8; n_fast++) {
        auto memory = make_stack_memory_cpu({ 4096, 8, n_fast, home, fd, 0 }, false);
        CHECK_EQ(memory->n_slots(), home + 8);
    }
    close(fd);
}

int main() {
    RUN(homes_are_the_file_at_any_offset);
    RUN(dropped_homes_come_back);
    RUN(no_fast_slots_need_no_memory);
    RUN(a_refused_lock_is_no_failure);
    RUN(impossible_sizes_are_refused);
    RUN(the_slot_count_does_not_depend_on_fast_slots);
    return test::failures();
}
