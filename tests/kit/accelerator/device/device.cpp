// What torch asks of a kind of device: a guard for devices, streams and events, an allocator, generators.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <chrono>
#include <cstring>

namespace emulated {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Event {
  Clock clock;
  DeviceIndex device;
  std::chrono::steady_clock::time_point when;
  bool was_asked = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  Device getDevice() const override { return Device(c10::kPrivateUse1, current_device()); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { set_current_device(device.index()); }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    set_current_device(device.index());
    return before;
  }

  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(c10::kPrivateUse1, index_of(device)));
  }
  Stream getNewStream(Device device, int) const override {
    const auto index = index_of(device);
    return Stream(Stream::UNSAFE, Device(c10::kPrivateUse1, index), Ledger::get().new_stream(index));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override { return exchange_stream(stream); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto clock = Ledger::get().recorded(Ledger::lane_of(stream));
    delete static_cast<Event*>(*event);
    *event = new Event{std::move(clock), stream.device_index(), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event) Ledger::get().wait(Ledger::lane_of(stream), static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(static_cast<Event*>(event)->clock, static_cast<Event*>(event)->device);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    const auto passed = static_cast<Event*>(to)->when - static_cast<Event*>(from)->when;
    return std::chrono::duration<double, std::milli>(passed).count();
  }

  // Whoever asks whether work is done must be ready for both answers: it is, when asked a second time.
  bool queryEvent(void* opaque) const override {
    auto* event = static_cast<Event*>(opaque);
    return !event || answered(event->clock, event->was_asked);
  }
  bool queryStream(const Stream& stream) const override {
    thread_local std::map<Lane, Clock> asked;
    const auto lane = Ledger::lane_of(stream);
    const auto clock = Ledger::get().recorded(lane);
    bool was_asked = asked[lane] == clock;
    asked[lane] = clock;
    return answered(clock, was_asked);
  }

  void synchronizeStream(const Stream& stream) const override {
    wait_for(Ledger::get().recorded(Ledger::lane_of(stream)), stream.device_index());
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    Ledger::get().host_waits(device);
    Ledger::get().complete_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    if (auto* block = block_of(data)) Ledger::get().record_stream(block, Ledger::lane_of(stream));
  }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

 private:
  static DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device(); }
  static void wait_for(const Clock& clock, DeviceIndex device) {
    Ledger::get().host_waits(device);
    Ledger::get().wait_until_complete(clock);
  }
  static bool answered(const Clock& clock, bool& was_asked) {
    if (!Ledger::get().is_complete(clock) && !std::exchange(was_asked, true)) return false;
    Ledger::get().complete(clock);
    return true;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void release(void* block) { Ledger::get().release(static_cast<Block*>(block)); }

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = Ledger::get().allocate(current_lane(current_device()), bytes);
    return {block->data, block, &release, block->device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    if (auto* block = block_of(data)) Ledger::get().record_stream(block, Ledger::lane_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(Ledger::get().mutex());
    return Ledger::get().device(device).stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(Ledger::get().mutex());
    const auto& on_device = Ledger::get().device(device);
    const size_t in_use = on_device.stats.allocated_bytes[0].current;
    return {on_device.limit > in_use ? on_device.limit - in_use : 0, on_device.limit};
  }

 private:
  template <typename Change>
  static void for_each_stat(DeviceIndex device, Change change) {
    std::lock_guard<std::mutex> lock(Ledger::get().mutex());
    auto& stats = Ledger::get().device(device).stats;
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.allocation})
      for (auto& stat : *array) change(stat);
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = Ledger::get().allocate_pinned(bytes);
    return {block->data, block, &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, Stream) override { return true; }  // copies keep their memory alive
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory& device_allocator() {
  static auto* allocator = new DeviceMemory;
  return *allocator;
}
const bool registered_memory = (c10::SetAllocator(c10::kPrivateUse1, &device_allocator()), true);
const bool registered_pinned_memory = (at::setHostAllocator(c10::kPrivateUse1, new PinnedMemory), true);

// Draws the CPU's numbers on a device: the same seed gives the same numbers on both.
struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(DeviceIndex device, at::Generator cpu)
      : GeneratorImpl(Device(c10::kPrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the emulated devices' generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the emulated devices' generators have no offset"); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), cpu.clone()); }
  at::Generator cpu;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }

  bool isPinnedPtr(const void* data) const override { return Ledger::get().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(c10::kPrivateUse1); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }

  at::Generator getNewGenerator(DeviceIndex device) const override {
    const auto index = device < 0 ? current_device() : device;
    return at::make_generator<DeviceGenerator>(index, at::detail::createCPUGenerator());
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    static auto* generators = [this] {
      auto* all = new std::vector<at::Generator>;
      for (DeviceIndex index = 0; index < kNumDevices; ++index) all->push_back(getNewGenerator(index));
      return all;
    }();
    return generators->at(device < 0 ? current_device() : device);
  }
};

const bool registered_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

c10::DeviceAllocator* allocator() { return &device_allocator(); }

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* before = block_of(storage.data_ptr());
  const auto device = storage.device().index();
  const OnDevice guard(device);
  auto data = device_allocator().allocate(bytes);
  auto* after = block_of(data);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (before && kept) {
    Ledger::get().launch(current_lane(device), "resize", {{before, {0, kept}, false}, {after, {0, kept}, true}});
    std::memcpy(after->data, before->data, kept);
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace emulated
