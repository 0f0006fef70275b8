// Errors of the CUDA runtime and driver as exceptions, and owners of what they hand out.
#pragma once

#include "status.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

namespace spark {

inline void check(cudaError_t status, const char * what) {
    if (status != cudaSuccess) {
        (void) cudaGetLastError(); // a refused allocation must not fail the next launch
        throw error(status == cudaErrorMemoryAllocation ? SPARK_STATUS_OUT_OF_MEMORY : SPARK_STATUS_INTERNAL,
            format("%s: %s", what, cudaGetErrorString(status)));
    }
}

inline void check(CUresult status, const char * what) {
    if (status != CUDA_SUCCESS) {
        const char * text = nullptr;
        cuGetErrorString(status, &text);
        throw error(status == CUDA_ERROR_OUT_OF_MEMORY ? SPARK_STATUS_OUT_OF_MEMORY : SPARK_STATUS_INTERNAL,
            format("%s: %s", what, text ? text : "unknown CUDA error"));
    }
}

// Makes a device current for this scope.
class device_guard {
public:
    explicit device_guard(int ordinal) {
        check(cudaGetDevice(&previous), "no CUDA device");
        check(cudaSetDevice(ordinal), "cannot use the CUDA device");
    }
    ~device_guard() { cudaSetDevice(previous); }
    device_guard(const device_guard &) = delete;
    device_guard & operator=(const device_guard &) = delete;

private:
    int previous = 0;
};

// Device or pinned memory of n elements, zeroed.
template <typename T>
class cuda_array {
public:
    cuda_array() = default;
    cuda_array(size_t n, bool is_pinned) : n(n), is_pinned(is_pinned) {
        if (is_pinned) {
            check(cudaMallocHost((void **) &data, n * sizeof(T)), "cannot allocate pinned memory");
            std::fill_n((char *) data, n * sizeof(T), 0);
        } else {
            check(cudaMalloc((void **) &data, n * sizeof(T)), "cannot allocate device memory");
            check(cudaMemset(data, 0, n * sizeof(T)), "cannot clear device memory");
        }
    }
    ~cuda_array() { reset(); }
    cuda_array(cuda_array && other) noexcept { *this = std::move(other); }
    cuda_array & operator=(cuda_array && other) noexcept {
        std::swap(data, other.data);
        std::swap(n, other.n);
        std::swap(is_pinned, other.is_pinned);
        return *this;
    }

    void reset() {
        if (data) {
            is_pinned ? cudaFreeHost(data) : cudaFree(data);
            data = nullptr;
        }
    }

    T * get() const { return data; }
    T & operator[](size_t i) const { return data[i]; }
    size_t bytes() const { return n * sizeof(T); }

private:
    T    * data = nullptr;
    size_t n    = 0;
    bool   is_pinned = false;
};

} // namespace spark
