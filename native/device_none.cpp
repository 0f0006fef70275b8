// A build without CUDA: no device has a residency.
#include "device.h"

#include "status.h"

namespace spark {

std::unique_ptr<device_residency> make_device_residency(expert_store & store, const std::string & name) {
    (void) store;
    throw error(SPARK_STATUS_INVALID_ARGUMENT, format("experts cannot be kept on device '%s': this build has no CUDA", name.c_str()));
}

spark_device_info read_device_info(int32_t index) {
    throw error(SPARK_STATUS_INVALID_ARGUMENT, format("there is no GPU %d: this build has no CUDA", index));
}

device_memory read_device_memory(const std::string & name) {
    throw error(SPARK_STATUS_INVALID_ARGUMENT, format("the memory of device '%s' cannot be read: this build has no CUDA", name.c_str()));
}

} // namespace spark
