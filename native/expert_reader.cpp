#include "expert_reader.h"

#include "model_file.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace spark {

namespace {

struct free_deleter { void operator()(void * p) const { free(p); } };
using aligned_buffer = std::unique_ptr<char, free_deleter>;

aligned_buffer make_aligned(size_t alignment, size_t size) {
    void * p = nullptr;
    return aligned_buffer(posix_memalign(&p, alignment, size) == 0 ? (char *) p : nullptr);
}

// Edge blocks and unaligned experts go through this; kept per thread so that a read allocates nothing.
char * scratch(size_t alignment, size_t size) {
    thread_local aligned_buffer buffer;
    thread_local size_t capacity = 0;
    if (size > capacity) {
        buffer   = make_aligned(std::max<size_t>(alignment, 4096), size);
        capacity = buffer ? size : 0;
    }
    return buffer.get();
}

int read_buffered(const model_file::shard & shard, const read_job & job) {
    size_t done = 0;
    while (done < job.size) {
        const ssize_t n = pread(shard.fd, job.dst + done, job.size - done, (off_t) (job.offset + done));
        if (n < 0 && errno == EINTR) { continue; }
        if (n < 0)  { return errno; }
        if (n == 0) { return -1; }
        done += (size_t) n;
    }
    if (job.through_cache) {
        return 0;
    }
    // what is in a slot need not be in the page cache as well
    posix_fadvise(shard.fd, (off_t) job.offset, (off_t) job.size, POSIX_FADV_DONTNEED);
    return 0;
}

// Direct reads move whole blocks. When the slot lies in memory as the expert lies in the file, the middle goes straight
// into the slot and only the two edge blocks go through a buffer, all in one preadv; otherwise everything does.
int read_direct(const model_file::shard & shard, const read_job & job) {
    const size_t align  = shard.dio_align;
    const size_t begin  = job.offset / align * align;                            // of the first block
    const size_t end    = (job.offset + job.size + align - 1) / align * align;   // after the last block
    const size_t needed = job.offset + job.size - begin;                         // bytes from `begin` to the expert's end

    const size_t middle_begin = (job.offset + align - 1) / align * align;
    const size_t middle_end   = (job.offset + job.size) / align * align;
    const bool   in_place     = (uintptr_t) job.dst % align == job.offset % align && middle_end > middle_begin;

    if (!in_place) {
        char * buffer = scratch(align, end - begin);
        if (!buffer) { return ENOMEM; }
        size_t done = 0;
        while (done < needed) {
            const ssize_t n = pread(shard.fd_direct, buffer + done, end - begin - done, (off_t) (begin + done));
            if (n < 0 && errno == EINTR) { continue; }
            if (n < 0)  { return errno; }
            if (n == 0) { return -1; }
            done += (size_t) n;
            if (done % align != 0) { break; } // a short read within a block: the end of the file
        }
        if (done < needed) { return -1; }
        memcpy(job.dst, buffer + (job.offset - begin), job.size);
        return 0;
    }

    char * edges = scratch(align, 2 * align);
    if (!edges) { return ENOMEM; }
    iovec iov[3];
    int   n_iov = 0;
    const size_t head = middle_begin - job.offset; // bytes of the expert in the first, partial block
    const size_t tail = job.offset + job.size - middle_end;
    if (head > 0) { iov[n_iov++] = { edges, align }; }
    iov[n_iov++] = { job.dst + head, middle_end - middle_begin };
    if (tail > 0) { iov[n_iov++] = { edges + align, align }; }

    ssize_t n;
    do {
        n = preadv(shard.fd_direct, iov, n_iov, (off_t) begin);
    } while (n < 0 && errno == EINTR);
    if (n < 0) { return errno; }
    if ((size_t) n < needed) {
        return read_buffered(shard, job); // interrupted or at the end of the file: the plain way sorts it out
    }
    memcpy(job.dst, edges + align - head, head);
    memcpy(job.dst + job.size - tail, edges + align, tail);
    return 0;
}

} // namespace

int read_expert(const model_file & file, const read_job & job) {
    const model_file::shard & shard = file.shards[job.shard];
    if (shard.fd_direct >= 0 && !job.through_cache) {
        const int e = read_direct(shard, job);
        if (e == 0) {
            return 0;
        }
        // a file system may accept the flag and refuse the read (EINVAL), so try without before giving up
    }
    return read_buffered(shard, job);
}

expert_reader::expert_reader(const model_file & file, int32_t n_threads) : file(file) {
    for (int32_t i = 0; i < n_threads; i++) {
        threads.emplace_back([this] { work(); });
    }
}

expert_reader::~expert_reader() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    has_work.notify_all();
    for (std::thread & t : threads) {
        t.join();
    }
}

void expert_reader::read(std::vector<read_job> & jobs) {
    run(jobs.size(), [&](size_t i) { jobs[i].error = read_expert(file, jobs[i]); });
}

void expert_reader::run(size_t n, const std::function<void(size_t)> & fn) {
    if (n == 0) {
        return;
    }
    if (n == 1) {
        fn(0);
        return;
    }
    batch b { &fn, n };
    std::unique_lock<std::mutex> lock(mutex);
    batches.push_back(&b);
    has_work.notify_all();
    while (run_one(lock, b)) {}
    has_finished.wait(lock, [&] { return b.running == 0; });
}

// Takes and runs one index of `b`; false when none is left to take.
bool expert_reader::run_one(std::unique_lock<std::mutex> & lock, batch & b) {
    if (b.next == b.n) {
        return false;
    }
    const size_t i = b.next++;
    b.running++;
    if (b.next == b.n) {
        batches.erase(std::find(batches.begin(), batches.end(), &b));
    }
    lock.unlock();
    (*b.fn)(i);
    lock.lock();
    if (--b.running == 0 && b.next == b.n) {
        has_finished.notify_all();
    }
    return true;
}

void expert_reader::work() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        has_work.wait(lock, [&] { return stopping || !batches.empty(); });
        if (stopping) {
            return;
        }
        run_one(lock, *batches.front());
    }
}

} // namespace spark
