// Reads experts from the model file into fast slots: several at once, past the page cache where the file system allows.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace spark {

class model_file;

// One matrix of one expert.
struct read_job {
    int32_t shard;
    size_t  offset; // in the shard, bytes
    size_t  size;   // bytes
    char *  dst;
    bool    through_cache = false; // through the page cache, and left there
    int     error = 0; // errno of a failed read, or -1 for an unexpected end of the file; set by expert_reader
};

class expert_reader {
public:
    expert_reader(const model_file & file, int32_t n_threads);
    ~expert_reader();
    expert_reader(const expert_reader &) = delete;
    expert_reader & operator=(const expert_reader &) = delete;

    // Reads all jobs and returns when they are done; each job's `error` says how it went. Any thread; the calling
    // thread reads too, so it makes progress even when all others are busy.
    void read(std::vector<read_job> & jobs);

    // Runs fn(0..n-1) on the same threads and returns when all calls have returned.
    void run(size_t n, const std::function<void(size_t)> & fn);

private:
    struct batch {
        const std::function<void(size_t)> * fn;
        size_t n;
        size_t next    = 0; // first index nobody has taken
        size_t running = 0;
    };

    void work();
    bool run_one(std::unique_lock<std::mutex> & lock, batch & b);

    const model_file & file;

    std::mutex              mutex;
    std::condition_variable has_work;
    std::condition_variable has_finished;
    std::deque<batch *>     batches; // those with indices nobody has taken
    bool                    stopping = false;
    std::vector<std::thread> threads;
};

// One read in the calling thread; 0, errno, or -1 for an unexpected end of the file. For tests and the reader.
int read_expert(const model_file & file, const read_job & job);

} // namespace spark
