// What ops need to know of the devices: whose memory a pointer is, who draws the random numbers.
#pragma once
#include "ledger.h"

#include <ATen/core/Generator.h>

namespace emulated {

c10::DeviceAllocator* allocator();
Block* block_of(const c10::DataPtr& data);  // none where the memory is not ours
void resize_storage(const c10::Storage& storage, size_t bytes);
at::Generator cpu_generator(const at::Generator& generator);

// Registers the kernel that computes by the CPU for ops of these names.
void take_kernels(const std::vector<std::string>& names);

struct OnDevice {  // makes a device the thread's current one, for as long as it lives
  explicit OnDevice(c10::DeviceIndex device) : before(current_device()) { set_current_device(device); }
  ~OnDevice() { set_current_device(before); }
  c10::DeviceIndex before;
};

}  // namespace emulated
