#include "stack_memory.h"

#include "status.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 // Linux 5.14
#endif
#ifndef MLOCK_ONFAULT
#define MLOCK_ONFAULT 1
#endif
#ifndef PR_SET_VMA
#define PR_SET_VMA           0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

namespace spark {

namespace {

constexpr size_t WILLNEED_BYTES = 128 * 1024;

class stack_memory_cpu : public stack_memory {
public:
    stack_memory_cpu(const stack_layout & layout, bool lock_fast) : layout(layout), page(sysconf(_SC_PAGESIZE)), lock_fast(lock_fast) {
        slots = layout.home_slot + layout.n_expert;

        reserved_size = (size_t) slots * layout.stride + 2 * page;
        reserved = mmap(nullptr, reserved_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (reserved == MAP_FAILED) {
            throw error(SPARK_STATUS_OUT_OF_MEMORY, format("cannot reserve %.1f MiB of address space for an expert stack: %s",
                reserved_size / 1048576.0, strerror(errno)));
        }
        // Homes lie in memory as they lie in the file, so slot 0 starts where that puts it within a page.
        const size_t home_shift = ((size_t) layout.home_slot * layout.stride) % page;
        start = (char *) reserved + (layout.home_offset % page + page - home_shift) % page;

        try {
            map_home();
            set_fast(layout.n_fast);
        } catch (...) {
            munmap(reserved, reserved_size);
            throw;
        }
    }

    ~stack_memory_cpu() override {
        munmap(reserved, reserved_size);
    }

    char *  base()         const override { return start; }
    int32_t n_slots()      const override { return slots; }
    size_t  fast_bytes()   const override { return fast_size; }
    size_t  locked_bytes() const override { return locked_size; }

    void prefetch_home(int32_t expert) override {
        char * begin = page_floor(home(expert));
        const size_t size = page_ceil(home(expert) + layout.stride) - begin;
        // One call reads no more than the device's read-ahead, so ask in pieces.
        for (size_t i = 0; i < size; i += WILLNEED_BYTES) {
            madvise(begin + i, std::min(size - i, WILLNEED_BYTES), MADV_WILLNEED);
        }
        // Waits for the pages and maps them, so that the kernel that reads them takes no faults. Older systems fault.
        madvise(begin, size, MADV_POPULATE_READ);
    }

    // All at once, not expert by expert: a fault also maps neighbours that happen to be in the page cache, and the cache
    // keeps what it can only drop in part (large folios).
    void drop_homes() override {
        char * begin = page_floor(home(0));
        const size_t size = page_ceil(home(layout.n_expert)) - begin;
        madvise(begin, size, MADV_DONTNEED);
        posix_fadvise(layout.home_fd, (off_t) (layout.home_offset / page * page), (off_t) size, POSIX_FADV_DONTNEED);
    }

    void set_fast(int32_t n) override {
        const size_t size = n > 0 ? page_ceil(start + (size_t) n * layout.stride) - page_floor(start) : 0;
        if (size > fast_size) {
            add_fast(fast_size, size);
        } else if (size < fast_size) {
            remove_fast(size, fast_size);
        }
        fast_size = size;
    }

private:
    char * home(int32_t expert) const { return start + (size_t) (layout.home_slot + expert) * layout.stride; }
    char * page_floor(char * p) const { return (char *) ((uintptr_t) p / page * page); }
    char * page_ceil (char * p) const { return (char *) (((uintptr_t) p + page - 1) / page * page); }

    void map_home() {
        char * begin = page_floor(home(0));
        const size_t size   = page_ceil(home(layout.n_expert)) - begin;
        const size_t offset = layout.home_offset / page * page;
        if (mmap(begin, size, PROT_READ, MAP_SHARED | MAP_FIXED, layout.home_fd, (off_t) offset) == MAP_FAILED) {
            throw error(SPARK_STATUS_IO, format("cannot map %.1f MiB of the model file: %s", size / 1048576.0, strerror(errno)));
        }
        madvise(begin, size, MADV_RANDOM); // a fault must not read megabytes of experts nobody selected
    }

    // Pages of fast slots from byte `from` on, which becomes the end of those before.
    void add_fast(size_t from, size_t to) {
        char * begin = page_floor(start) + from;
        const size_t size = to - from;
        if (mmap(begin, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
            throw error(SPARK_STATUS_OUT_OF_MEMORY, format("cannot allocate %.1f MiB for fast expert slots: %s", size / 1048576.0, strerror(errno)));
        }
        prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, begin, size, "spark-fast"); // for /proc/PID/smaps; older kernels refuse
        madvise(begin, size, MADV_HUGEPAGE);
        madvise(begin, size, MADV_DONTDUMP); // a core dump need not hold the model
        if (lock_fast && locked_size == from && mlock2(begin, size, MLOCK_ONFAULT) == 0) {
            locked_size = to;
        }
    }

    void remove_fast(size_t from, size_t to) {
        char * begin = page_floor(start) + from;
        if (mmap(begin, to - from, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
            throw error(SPARK_STATUS_OUT_OF_MEMORY, format("cannot give back %.1f MiB of fast expert slots: %s", (to - from) / 1048576.0, strerror(errno)));
        }
        locked_size = std::min(locked_size, from);
    }

    const stack_layout layout;
    const size_t page;
    const bool   lock_fast;

    void *  reserved      = nullptr;
    size_t  reserved_size = 0;
    char *  start         = nullptr;
    int32_t slots         = 0;
    size_t  fast_size     = 0; // bytes from the page of slot 0 on
    size_t  locked_size   = 0; // of these
};

} // namespace

static constexpr int32_t DEVICE_SLOTS = 20;

int32_t stack_home_slot(size_t stride, int32_t n_expert, size_t page, size_t largest_stride) {
    if (page > 0) {
        // staging and ring slots go between, each in pages of its own and with its padding (stack_memory_cuda.h)
        const size_t bytes = (n_expert + DEVICE_SLOTS) * std::max(stride, largest_stride) + 8 * page;
        return (int32_t) ((bytes + stride - 1) / stride);
    }
    page = sysconf(_SC_PAGESIZE);
    return n_expert + (int32_t) ((2 * page + stride - 1) / stride);
}

std::unique_ptr<stack_memory> make_stack_memory_cpu(const stack_layout & layout, bool lock_fast) {
    return std::make_unique<stack_memory_cpu>(layout, lock_fast);
}

} // namespace spark
