#include "stack_memory_cuda.h"

#include <cstring>

namespace spark {

static size_t round_up(size_t n, size_t page) {
    return (n + page - 1) / page * page;
}

physical_memory::physical_memory(const cuda_device & device, size_t bytes, bool is_host)
    : size(round_up(bytes, device.page)), device(device), is_host(is_host) {
    CUmemAllocationProp prop = {};
    prop.type          = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = is_host ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id   = is_host ? device.numa : device.ordinal;
    const CUresult status = cuMemCreate(&handle, size, &prop, 0);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) {
        throw error(SPARK_STATUS_OUT_OF_MEMORY, format("%.1f MiB of %s for experts were refused", size / 1048576.0,
            is_host ? "pinned RAM" : "device memory"));
    }
    check(status, "cannot allocate memory for experts");
}

physical_memory::~physical_memory() {
    cuMemRelease(handle); // lives on while it is mapped
}

void physical_memory::map(CUdeviceptr address) const {
    check(cuMemMap(address, size, 0, handle, 0), "cannot map memory for experts");
    CUmemAccessDesc access[2] = {};
    access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[0].location.id   = device.ordinal;
    access[0].flags         = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access[1].location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    access[1].location.id   = device.numa;
    access[1].flags         = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const CUresult status = cuMemSetAccess(address, size, access, is_host ? 2 : 1);
    if (status != CUDA_SUCCESS) {
        cuMemUnmap(address, size);
        check(status, "cannot make memory for experts accessible");
    }
}

void physical_memory::unmap(CUdeviceptr address) const {
    cuMemUnmap(address, size);
}

address_range::address_range(size_t bytes, size_t page) : size(round_up(bytes, page)) {
    check(cuMemAddressReserve(&base, size, 0, 0, 0), "cannot reserve address space for experts");
}

address_range::~address_range() {
    cuMemAddressFree(base, size);
}

stack_memory_cuda::stack_memory_cuda(const stack_layout & layout, const cuda_device & device)
    : layout(layout), device(device),
      range((size_t) (layout.home_slot + layout.n_expert) * layout.stride + PADDING + device.page, device.page) {
    home_address = page_floor(address(layout.home_slot));
    const size_t size = address(layout.home_slot + layout.n_expert) + PADDING - home_address;
    home = std::make_unique<physical_memory>(device, size, /*is_host =*/ true);
    home->map(home_address);
    // what a kernel reads around the experts must be numbers, not what another process left in this memory
    const CUdeviceptr begin = address(layout.home_slot), end = address(layout.home_slot + layout.n_expert);
    memset((void *) home_address, 0, begin - home_address);
    memset((void *) end, 0, home_address + home->size - end);
}

stack_memory_cuda::~stack_memory_cuda() {
    clear_shared();
    if (fast) { fast->unmap(range.base); }
    home->unmap(home_address);
}

size_t stack_memory_cuda::fast_bytes_for(int32_t n, size_t stride, size_t page) {
    return n > 0 ? round_up((size_t) n * stride + PADDING, page) : 0;
}

void stack_memory_cuda::set_fast(int32_t n) {
    clear_shared(); // it begins behind the fast slots
    if (fast) {
        fast->unmap(range.base);
        fast.reset();
    }
    if (n > 0) {
        auto memory = std::make_unique<physical_memory>(device, fast_bytes_for(n, layout.stride, device.page), /*is_host =*/ false);
        memory->map(range.base);
        fast = std::move(memory);
        check(cuMemsetD8(range.base, 0, fast->size), "cannot clear fast slots");
    }
}

int32_t stack_memory_cuda::first_shared() const {
    CUdeviceptr end = range.base + fast_bytes();
    for (const mapping & m : shared) {
        end = std::max(end, m.address + m.memory->size);
    }
    return (int32_t) ((end - range.base + layout.stride - 1) / layout.stride);
}

size_t stack_memory_cuda::shared_bytes(int32_t n) const {
    return n > 0 ? (size_t) n * layout.stride + PADDING + device.page : 0; // the first slot may begin anywhere in a page
}

void stack_memory_cuda::map_shared(const std::shared_ptr<physical_memory> & memory, int32_t slot) {
    // a slot that begins in the last page of what is mapped already moves to the next page
    const CUdeviceptr start = page_floor(address(slot));
    if (start + memory->size > home_address) {
        throw error(SPARK_STATUS_INTERNAL, format("shared slots at %d do not fit before the homes at %d", slot, layout.home_slot));
    }
    memory->map(start);
    shared.push_back({ memory, start });
}

void stack_memory_cuda::clear_shared() {
    for (const mapping & m : shared) {
        m.memory->unmap(m.address);
    }
    shared.clear();
}

} // namespace spark
