#include "shared_slots_cuda.h"

#include "expert_store.h"
#include "residency_cuda.h"

#include <algorithm>

namespace spark {

std::vector<size_t> shared_slots_cuda::sizes_for(int32_t n) const {
    std::vector<size_t> sizes;
    for (const auto & layer : residency.store.layers) {
        sizes.resize(std::max(sizes.size(), layer->stacks.size()), 0);
        for (size_t i = 0; i < layer->stacks.size(); i++) {
            sizes[i] = std::max(sizes[i], residency.memory(*layer, i).shared_bytes(n));
        }
    }
    return sizes;
}

size_t shared_slots_cuda::bytes_for(int32_t n) const {
    size_t total = 0;
    for (size_t size : sizes_for(n)) {
        total += 2 * ((size + residency.device.page - 1) / residency.device.page * residency.device.page);
    }
    return total;
}

std::vector<int32_t> shared_slots_cuda::allocate(int32_t n) {
    for (auto & set : memory) {
        for (size_t size : sizes_for(n)) {
            set.push_back(std::make_shared<physical_memory>(residency.device, size, /*is_host =*/ false));
            n_bytes += set.back()->size;
        }
    }
    std::vector<int32_t> first_slots;
    for (const auto & layer : residency.store.layers) {
        int32_t first = 0;
        for (size_t i = 0; i < layer->stacks.size(); i++) {
            first = std::max(first, residency.memory(*layer, i).first_shared());
        }
        for (size_t i = 0; i < layer->stacks.size(); i++) {
            residency.memory(*layer, i).map_shared(memory[layer->index % 2][i], first);
        }
        first_slots.push_back(first);
    }
    return first_slots;
}

void shared_slots_cuda::release() {
    for (auto & set : memory) {
        set.clear();
    }
    n_bytes = 0;
}

} // namespace spark
