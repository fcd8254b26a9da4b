// What Python is told and may set.
#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

namespace emulated {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  const auto locked = [](c10::DeviceIndex index, auto use) {
    std::lock_guard<std::mutex> lock(Ledger::get().mutex());
    return use(Ledger::get().device(index));
  };
  module.def("take_kernels", &take_kernels);
  module.def("default_generator", [](c10::DeviceIndex index) {
    const auto& generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(index);
    return pybind11::reinterpret_steal<pybind11::object>(THPGenerator_Wrap(generator));
  });
  module.def("is_forked_after_use", &Ledger::is_forked_after_use);
  module.def("complete", [](c10::DeviceIndex index) { Ledger::get().complete_device(index); });
  module.def("refuse_host_reads", [](bool refuse) { Ledger::get().refuse_host_reads = refuse; });
  module.def("set_memory_limit", [locked](c10::DeviceIndex index, size_t bytes) {
    locked(index, [bytes](auto& device) { device.limit = bytes; });
  });
  module.def("host_reads", [locked](c10::DeviceIndex index) {
    return locked(index, [](auto& device) { return device.host_reads; });
  });
  module.def("host_waits", [locked](c10::DeviceIndex index) {
    return locked(index, [](auto& device) { return device.host_waits; });
  });
  module.def("set_pace", [](double launch_seconds, double kernel_seconds) {
    std::lock_guard<std::mutex> lock(Ledger::get().mutex());
    Ledger::get().pace.set(launch_seconds, kernel_seconds);
  });
  module.def("worked", [](c10::DeviceIndex index) {
    std::lock_guard<std::mutex> lock(Ledger::get().mutex());
    std::vector<std::tuple<double, double, double>> streams;
    for (const auto& [lane, worked] : Ledger::get().pace.worked())
      if (Ledger::get().device_of(lane) == index) streams.emplace_back(worked.begin, worked.end, worked.busy);
    return streams;
  });
  module.def("host_idle", [](c10::DeviceIndex index) {
    std::lock_guard<std::mutex> lock(Ledger::get().mutex());
    return Ledger::get().pace.host_idle(index);
  });
  module.def("reset_host_counts", [locked](c10::DeviceIndex index) {
    locked(index, [](auto& device) { device.host_reads = device.host_waits = 0; });
  });
}

}  // namespace emulated
