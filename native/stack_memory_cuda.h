// Physical memory and address ranges of expert stacks on a CUDA device, through the driver's virtual memory management.
#pragma once

#include "cuda_util.h"
#include "stack_memory.h"

#include <memory>
#include <vector>

namespace spark {

struct cuda_device {
    int    ordinal = 0;
    size_t page    = 0; // bytes; physical memory is mapped in multiples of this
    int    numa    = 0; // host node whose memory is closest
};

// Physical memory, on the device or pinned on the host; mapped at one or several addresses.
class physical_memory {
public:
    physical_memory(const cuda_device & device, size_t size, bool is_host);
    ~physical_memory();
    physical_memory(const physical_memory &) = delete;
    physical_memory & operator=(const physical_memory &) = delete;

    void map(CUdeviceptr address) const; // the device (and for host memory the CPU) may read and write it there
    void unmap(CUdeviceptr address) const;

    const size_t size; // bytes, a multiple of the page

private:
    const cuda_device device;
    const bool is_host;
    CUmemGenericAllocationHandle handle = 0;
};

// An address range; frees itself after everything in it is unmapped.
class address_range {
public:
    address_range(size_t size, size_t page);
    ~address_range();
    address_range(const address_range &) = delete;
    address_range & operator=(const address_range &) = delete;

    const size_t size;
    CUdeviceptr base = 0;
};

//     slot 0 .. n_fast-1 | first_shared() ..       | home_slot .. home_slot+n_expert-1
//     device memory      | staging and ring, shared | pinned host memory
//
// Every part is followed by PADDING mapped bytes: matrix kernels read a little past the last expert they compute.
class stack_memory_cuda : public stack_memory {
public:
    static constexpr size_t PADDING = 128 * 1024;

    stack_memory_cuda(const stack_layout & layout, const cuda_device & device);
    ~stack_memory_cuda() override;

    char *  base()         const override { return (char *) range.base; }
    int32_t n_slots()      const override { return layout.home_slot + layout.n_expert; }
    size_t  fast_bytes()   const override { return fast ? fast->size : 0; }
    size_t  locked_bytes() const override { return fast_bytes(); }
    void prefetch_home(int32_t) override {}
    void drop_homes() override {}

    void set_fast(int32_t n) override;
    // First slot behind everything on the device at which memory that stacks share can be mapped.
    int32_t first_shared() const;
    // Maps shared memory so that slots `slot`.. lie in it; at least shared_bytes(n) for n slots.
    void map_shared(const std::shared_ptr<physical_memory> & memory, int32_t slot);
    void clear_shared();
    size_t shared_bytes(int32_t n) const;

    // Bytes of device memory that n fast slots take.
    static size_t fast_bytes_for(int32_t n, size_t stride, size_t page);

private:
    CUdeviceptr address(int32_t slot) const { return range.base + (size_t) slot * layout.stride; }
    CUdeviceptr page_floor(CUdeviceptr p) const { return p / device.page * device.page; }

    const stack_layout layout;
    const cuda_device  device;
    address_range range;
    std::unique_ptr<physical_memory> fast;
    std::unique_ptr<physical_memory> home;
    CUdeviceptr home_address = 0;
    struct mapping {
        std::shared_ptr<physical_memory> memory;
        CUdeviceptr address;
    };
    std::vector<mapping> shared;
};

} // namespace spark
