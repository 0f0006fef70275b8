// Slots of device memory that all layers share: two sets, for even and for odd layers, so that one layer's are filled while
// the other's are read. Tensor i of a layer uses memory i of its set, mapped behind what its stack has on the device already.
#pragma once

#include "stack_memory_cuda.h"

#include <memory>
#include <vector>

namespace spark {

class residency_cuda;

class shared_slots_cuda {
public:
    explicit shared_slots_cuda(residency_cuda & residency) : residency(residency) {}

    // Bytes of device memory of n slots in each set, whatever the layer.
    size_t bytes_for(int32_t n) const;
    // Allocates and maps them; no step runs. Returns the first slot in each layer, [n_layers].
    std::vector<int32_t> allocate(int32_t n);
    // Gives the memory back once the stacks have unmapped it.
    void release();

    size_t bytes() const { return n_bytes; }

private:
    std::vector<size_t> sizes_for(int32_t n) const; // [n_tensors] of one set

    residency_cuda & residency;
    size_t n_bytes = 0;
    std::vector<std::shared_ptr<physical_memory>> memory[2];
};

} // namespace spark
