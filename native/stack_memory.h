// Memory of one expert stack: one contiguous address range of equal-stride slots, fast slots first, homes behind them.
// The only seam between the store and a device; it knows slots and files, not what an expert is for.
//
//     slot 0 .. n_fast-1 | (unmapped) | home_slot .. home_slot+n_expert-1
//     RAM                |            | mapping of the GGUF file
//
// The number of slots does not depend on n_fast, so that no kernel choice can depend on the residency.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace spark {

struct stack_layout {
    size_t  stride;      // bytes of one slot
    int32_t n_expert;
    int32_t n_fast;      // 0..n_expert
    int32_t home_slot;   // slot of the home of expert 0, at least stack_home_slot(); the same for all stacks of a layer
    int     home_fd;     // file of the homes; stays open while the memory lives
    size_t  home_offset; // of expert 0 in it, bytes
};

class stack_memory {
public:
    virtual ~stack_memory() = default;

    virtual char *  base() const = 0;      // address of slot 0
    virtual int32_t n_slots() const = 0;
    virtual size_t  fast_bytes() const = 0;
    virtual size_t  locked_bytes() const = 0;

    // Memory for n fast slots, 0..n_expert. In RAM slots below the old and the new number keep their content; on a device all
    // are empty afterwards. Nobody may read a slot that loses its content. Throws error OUT_OF_MEMORY, and there are as
    // many slots as before (RAM) or none (device).
    virtual void set_fast(int32_t n) = 0;
    // Starts or completes reading the home of `expert` into the page cache, ahead of its use in place.
    virtual void prefetch_home(int32_t expert) = 0;
    // Gives the memory behind all homes back. Always safe: the next access reads the file again.
    virtual void drop_homes() = 0;
};

// Least home_slot of a stack: leaves room between fast slots and homes, so that they never share a page. page: of the
// device, bytes, whose shared slots go there too, sized for the largest stride of any layer; 0: RAM.
int32_t stack_home_slot(size_t stride, int32_t n_expert, size_t page = 0, size_t largest_stride = 0);

// Fast slots in RAM, homes in the file's mapping. Throws error: OUT_OF_MEMORY, IO.
// lock_fast: lock fast slots in RAM as far as the limits allow.
std::unique_ptr<stack_memory> make_stack_memory_cpu(const stack_layout & layout, bool lock_fast);

} // namespace spark
