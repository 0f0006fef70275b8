#include "route_cuda.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define GRID_CONSTANT // the compiler copies the parameter to local memory there
#else
#define GRID_CONSTANT __grid_constant__
#endif

namespace spark {

// A step announces itself before it reads a table: the swap engine changes the table first and looks for running steps
// then, so one of the two sees the other.
static __device__ void begin_step(context_counters * context) {
    if (context && threadIdx.x == 0) {
        atomicAdd(&context->started, 1u);
        __threadfence();
    }
}

static __device__ int32_t read_slot(const int32_t * table, int32_t expert) {
    return __ldcg(table + expert); // from L2: the copy engine writes there while steps run
}

// The ring slot of an expert, or -1.
static __device__ int32_t find_in_ring(const ring_state * ring, int32_t expert) {
    const int32_t n = ring->n_experts;
    for (int32_t i = 0; i < n; i++) {
        if (ring->expert[i] == expert) {
            return ring->first_slot + i;
        }
    }
    return -1;
}

// One token: a warp, no shared memory. Every selected expert is distinct.
static __global__ void route_one(const route_params p) {
    begin_step(p.context);
    __syncwarp();
    const bool is_used = (int32_t) threadIdx.x < p.n_used;
    bool is_miss = false, is_home = false;
    if (is_used) {
        const int32_t expert = *(const int32_t *) (p.ids + threadIdx.x * p.nb0);
        int32_t slot = read_slot(p.table, expert);
        is_home = is_miss = slot >= p.home_slot;
        if (is_miss && p.ring) {
            const int32_t ringed = find_in_ring(p.ring, expert);
            if (ringed >= 0) {
                slot    = ringed;
                is_home = false;
            }
        }
        p.slots[threadIdx.x] = slot;
        atomicAdd(p.counts + expert, 1u);
    }
    const uint32_t n_miss = __popc(__ballot_sync(0xffffffff, is_miss));
    const uint32_t n_home = __popc(__ballot_sync(0xffffffff, is_home));
    if (threadIdx.x == 0) {
        atomicAdd(&p.layer->uses, (uint32_t) p.n_used);
        if (n_miss > 0) {
            atomicAdd(&p.layer->misses, n_miss);
            atomicAdd(&p.layer->homes,  n_home);
            atomicAdd(&p.layer->staged, n_miss - n_home);
        }
    }
}

// Any number of tokens: one block. staged: [n_expert] or NULL.
static __device__ void route_block(const route_params & p, const int16_t * staged) {
    extern __shared__ uint32_t uses[]; // [n_expert]
    __shared__ layer_counters sum;
    begin_step(p.context);
    for (int32_t e = threadIdx.x; e < p.n_expert; e += blockDim.x) {
        uses[e] = 0;
    }
    if (threadIdx.x == 0) {
        sum = {};
    }
    __syncthreads();

    const int64_t n = (int64_t) p.n_used * p.n_tokens;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        const int64_t token = i / p.n_used;
        const int32_t expert = *(const int32_t *) (p.ids + token * p.nb1 + (i - token * p.n_used) * p.nb0);
        atomicAdd(uses + expert, 1u);
    }
    __syncthreads();

    // One look at the table for each expert, so that all tokens of the step read it from the same slot.
    for (int32_t e = threadIdx.x; e < p.n_expert; e += blockDim.x) {
        const uint32_t n_uses = uses[e];
        int32_t slot = read_slot(p.table, e);
        if (n_uses > 0) {
            atomicAdd(p.counts + e, n_uses);
            atomicAdd(&sum.uses, n_uses);
            if (slot >= p.home_slot) {
                atomicAdd(&sum.misses, n_uses);
                const int32_t ahead = staged ? staged[e] : p.ring ? find_in_ring(p.ring, e) : -1;
                if (ahead >= 0) {
                    slot = ahead;
                    atomicAdd(&sum.staged, 1u);
                } else {
                    atomicAdd(&sum.homes, 1u);
                }
            }
        }
        uses[e] = (uint32_t) slot;
    }
    __syncthreads();

    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
        const int64_t token = i / p.n_used;
        const int32_t expert = *(const int32_t *) (p.ids + token * p.nb1 + (i - token * p.n_used) * p.nb0);
        p.slots[i] = (int32_t) uses[expert];
    }
    if (threadIdx.x == 0) {
        atomicAdd(&p.layer->uses,   sum.uses);
        atomicAdd(&p.layer->misses, sum.misses);
        atomicAdd(&p.layer->homes,  sum.homes);
        atomicAdd(&p.layer->staged, sum.staged);
    }
}

static __global__ void route_many(const route_params p) {
    route_block(p, nullptr);
}

static __global__ void route_staged(const route_params p, const GRID_CONSTANT staged_slots staged) {
    route_block(p, staged.slot);
}

static __device__ float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset);
    }
    return x;
}

constexpr int PREDICT_THREADS = 256;
constexpr int PREDICT_TOKENS  = 4;

// A warp for each expert's score; the last block ranks them and names the experts to bring.
static __global__ void predict(const predict_params p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int expert = blockIdx.x * (PREDICT_THREADS / 32) + warp;
    if (expert < p.n_expert) {
        float sum[PREDICT_TOKENS] = {};
        const float * row = p.router + (int64_t) expert * p.n_embd;
        for (int i = lane; i < p.n_embd; i += 32) {
            const float w = row[i];
            for (int t = 0; t < PREDICT_TOKENS; t++) {
                if (t < p.n_tokens) {
                    sum[t] += w * ((const float *) (p.input + t * p.nb1))[i];
                }
            }
        }
        for (int t = 0; t < PREDICT_TOKENS; t++) {
            if (t < p.n_tokens) {
                const float logit = warp_sum(sum[t]);
                if (lane == 0) {
                    const float score = p.is_sigmoid && p.bias ? 1.0f / (1.0f + expf(-logit)) : logit;
                    p.scores[t * p.n_expert + expert] = score + (p.bias ? p.bias[expert] : 0.0f);
                }
            }
        }
    }
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(p.arrived, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    __threadfence();
    __shared__ int n_wanted;
    if (threadIdx.x == 0) {
        n_wanted   = 0;
        *p.arrived = 0;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.n_expert; e += blockDim.x) {
        bool is_wanted = false;
        if (read_slot(p.table, e) >= p.ring->home_slot) {
            for (int t = 0; t < p.n_tokens && !is_wanted; t++) {
                const float * scores = p.scores + t * p.n_expert;
                const float mine = __ldcg(scores + e);
                int rank = 0;
                for (int other = 0; other < p.n_expert && rank < p.n_used; other++) {
                    rank += __ldcg(scores + other) > mine;
                }
                is_wanted = rank < p.n_used;
            }
        }
        if (is_wanted) {
            const int place = atomicAdd(&n_wanted, 1);
            if (place < p.ring->n_slots) {
                p.ring->expert[place] = e;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        p.ring->n_experts = min(n_wanted, p.ring->n_slots);
        atomicAdd(&p.counters->copied, (uint32_t) p.ring->n_experts);
    }
}

constexpr int COPY_BLOCKS  = 32; // enough loads in flight for PCIe, few enough to leave the device to the step
constexpr int COPY_THREADS = 256;
constexpr int COPY_UNROLL  = 4;  // loads of 16 bytes that a thread has in flight

// Each warp takes pieces of 2 KiB from all tensors of all experts; warps do not wait for each other, so that the bus never
// runs dry between two tensors.
static __global__ void copy_to_ring(const ring_state * ring) {
    constexpr int PIECE = 32 * COPY_UNROLL; // in units of 16 bytes
    const int n_experts = ring->n_experts, n_tensors = ring->n_tensors;
    if (n_experts == 0) {
        return;
    }
    const int lane = threadIdx.x % 32, n_warps = COPY_BLOCKS * COPY_THREADS / 32;
    int piece = (blockIdx.x * COPY_THREADS + threadIdx.x) / 32; // from the first piece of (expert, tensor) on
    for (int e = 0; e < n_experts; e++) {
        for (int t = 0; t < n_tensors; t++) {
            const size_t  stride = ring->stride[t];
            const int     size   = (int) (stride / sizeof(uint4));
            const int     n      = (size + PIECE - 1) / PIECE;
            const uint4 * source = (const uint4 *) (ring->base[t] + (int64_t) (ring->home_slot + ring->expert[e]) * stride);
            uint4       * target = (uint4 *)       (ring->base[t] + (int64_t) (ring->first_slot + e) * stride);
            for (; piece < n; piece += n_warps) {
                const int begin = piece * PIECE + lane;
                uint4 values[COPY_UNROLL];
                #pragma unroll
                for (int u = 0; u < COPY_UNROLL; u++) {
                    if (begin + u * 32 < size) {
                        values[u] = __ldcs(source + begin + u * 32);
                    }
                }
                #pragma unroll
                for (int u = 0; u < COPY_UNROLL; u++) {
                    if (begin + u * 32 < size) {
                        target[begin + u * 32] = values[u];
                    }
                }
            }
            piece -= n; // the same warp goes on in the next tensor
        }
    }
}

static __global__ void finish_step(context_counters * context) {
    context->finished = context->started;
}

void launch_route(const route_params & params, const staged_slots * staged, cudaStream_t stream) {
    if (params.n_tokens == 1 && params.n_used <= 32) {
        route_one<<<1, 32, 0, stream>>>(params);
        return;
    }
    const size_t  shared  = params.n_expert * sizeof(uint32_t);
    const int64_t n       = (int64_t) params.n_used * params.n_tokens;
    const int     threads = n <= 256 ? 256 : 1024;
    if (staged) {
        route_staged<<<1, threads, shared, stream>>>(params, *staged);
    } else {
        route_many<<<1, threads, shared, stream>>>(params);
    }
}

void launch_prefetch(const predict_params & params, cudaStream_t stream) {
    const int per_block = PREDICT_THREADS / 32;
    predict<<<(params.n_expert + per_block - 1) / per_block, PREDICT_THREADS, 0, stream>>>(params);
    copy_to_ring<<<COPY_BLOCKS, COPY_THREADS, 0, stream>>>(params.ring);
}

void launch_finish(context_counters * context, cudaStream_t stream) {
    finish_step<<<1, 1, 0, stream>>>(context);
}

} // namespace spark
