// What the disk gives to expert-sized reads: parallel pread past the page cache against page faults of a mapping.
//
// Method: random, aligned, non-repeating pieces of one file; before each case the file's cached pages are dropped. Each line of output: mode, piece in bytes, threads, MB/s, pieces.
//   cc -O2 -pthread disk_probe.c -o disk_probe && ./disk_probe FILE [seconds per case]
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum mode { DIRECT, BUFFERED, MAPPED, N_MODES };
static const char * const mode_names[] = { "direct", "buffered", "mapped" };

struct run {
    enum mode mode;
    int fd;
    size_t piece, n_pieces;
    const uint32_t * order; // piece indices, shuffled
    const char * mapping;
    double seconds;
    double begin;
    size_t next;  // atomic
    size_t done;  // atomic, bytes
    int error;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void * work(void * arg) {
    struct run * r = arg;
    char * buffer = NULL;
    if (posix_memalign((void **) &buffer, 4096, r->piece) != 0) { r->error = ENOMEM; return NULL; }
    volatile uint64_t sum = 0;
    while (now() - r->begin < r->seconds) {
        const size_t i = __atomic_fetch_add(&r->next, 1, __ATOMIC_RELAXED);
        if (i >= r->n_pieces) { break; }
        const off_t offset = (off_t) r->order[i] * (off_t) r->piece;
        if (r->mode == MAPPED) {
            for (size_t p = 0; p < r->piece; p += 4096) { sum += (uint64_t) r->mapping[offset + p]; }
        } else {
            for (size_t got = 0; got < r->piece;) {
                const ssize_t n = pread(r->fd, buffer + got, r->piece - got, offset + got);
                if (n <= 0) { r->error = n < 0 ? errno : EIO; free(buffer); return NULL; }
                got += n;
            }
        }
        __atomic_fetch_add(&r->done, r->piece, __ATOMIC_RELAXED);
    }
    free(buffer);
    return NULL;
}

int main(int argc, char ** argv) {
    if (argc < 2) { fprintf(stderr, "usage: disk_probe FILE [seconds per case]\n"); return 2; }
    const double seconds = argc > 2 ? atof(argv[2]) : 3;
    static const size_t pieces[] = { 320 * 1024, 640 * 1024, 1024 * 1024, 1792 * 1024 };
    static const int threads[] = { 1, 4, 8, 16 };
    for (size_t p = 0; p < sizeof(pieces) / sizeof(*pieces); p++) {
        for (int m = 0; m < N_MODES; m++) {
            for (size_t t = 0; t < sizeof(threads) / sizeof(*threads); t++) {
                struct run r = { .mode = m, .piece = pieces[p], .seconds = seconds };
                r.fd = open(argv[1], O_RDONLY | (m == DIRECT ? O_DIRECT : 0));
                struct stat st;
                if (r.fd < 0 || fstat(r.fd, &st) != 0) { fprintf(stderr, "%s: %s\n", argv[1], strerror(errno)); return 1; }
                posix_fadvise(r.fd, 0, 0, POSIX_FADV_DONTNEED);
                // a mapping as llama.cpp makes it (sequential: larger read-ahead); reads of whole experts need none
                posix_fadvise(r.fd, 0, 0, m == MAPPED ? POSIX_FADV_SEQUENTIAL : POSIX_FADV_RANDOM);
                r.n_pieces = st.st_size / r.piece;
                uint32_t * order = malloc(r.n_pieces * sizeof(*order));
                for (size_t i = 0; i < r.n_pieces; i++) { order[i] = i; }
                srand(p * 100 + m * 10 + t);
                for (size_t i = r.n_pieces - 1; i > 0; i--) {
                    const size_t j = ((size_t) rand() << 15 ^ rand()) % (i + 1);
                    const uint32_t x = order[i]; order[i] = order[j]; order[j] = x;
                }
                r.order = order;
                if (m == MAPPED) {
                    r.mapping = mmap(NULL, st.st_size, PROT_READ, MAP_SHARED, r.fd, 0);
                    if (r.mapping == MAP_FAILED) { perror("mmap"); return 1; }
                }
                r.begin = now();
                pthread_t ids[16];
                for (int i = 0; i < threads[t]; i++) { pthread_create(&ids[i], NULL, work, &r); }
                for (int i = 0; i < threads[t]; i++) { pthread_join(ids[i], NULL); }
                const double took = now() - r.begin;
                if (r.error) { fprintf(stderr, "%s %s: %s\n", argv[1], mode_names[m], strerror(r.error)); return 1; }
                printf("%s %zu %d %.1f %zu\n", mode_names[m], r.piece, threads[t], r.done / took / 1e6, r.done / r.piece);
                fflush(stdout);
                if (m == MAPPED) { munmap((void *) r.mapping, st.st_size); }
                free(order);
                close(r.fd);
            }
        }
    }
    return 0;
}
