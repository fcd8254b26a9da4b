#include "ledger.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <pthread.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace emulated {
namespace {

using Lock = std::lock_guard<std::mutex>;
constexpr size_t kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
constexpr int kUnwritten = 0xFF;  // NaN in all floating formats

int64_t position(const Clock& clock, Lane lane) { return lane < clock.size() ? clock[lane] : 0; }

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t lane = 0; lane < from.size(); ++lane) into[lane] = std::max(into[lane], from[lane]);
}

// What a stream did is in order: of its accesses to the same bytes, the last one counts.
void enter(std::vector<Access>& accesses, Access&& access) {
  for (auto& entered : accesses)
    if (entered.lane == access.lane && access.extent.contains(entered.extent)) {
      entered = std::move(access);
      return;
    }
  accesses.push_back(std::move(access));
}

// A parent that used the devices has memory and clocks whose threads are missing in a child.
bool used = false, forked_after_use = false;

c10::Storage storage_over(void* data, size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, c10::kCPU), nullptr, false);
}

void* memory(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(bytes == 0 || posix_memalign(&data, 64, bytes) == 0, "the host has no memory left");
  if (bytes) std::memset(data, kUnwritten, bytes);
  return data;
}

}  // namespace

Ledger& Ledger::get() {
  static Ledger* ledger = [] {
    pthread_atfork(nullptr, nullptr, [] { forked_after_use = used; });
    return new Ledger;  // never destroyed: tensors die after static objects do
  }();
  return *ledger;
}

bool Ledger::is_forked_after_use() { return forked_after_use; }

// Default streams have the id 0 on every device, all others an id of their own.
Lane Ledger::lane_of(const c10::Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : kNumDevices - 1 + stream.id();
}

c10::StreamId Ledger::new_stream(c10::DeviceIndex device) {
  Lock lock(mutex_);
  device_of_lane_.push_back(device);
  clocks_.emplace_back();
  graves_.emplace_back();
  return static_cast<c10::StreamId>(clocks_.size() - kNumDevices);
}

bool Ledger::knows(const c10::Stream& stream) {
  Lock lock(mutex_);
  const auto lane = lane_of(stream);
  return lane < clocks_.size() && device_of_lane_[lane] == stream.device_index();
}

std::string Ledger::name_of(Lane lane) const {
  const auto device = c10::str(" of ", c10::Device(c10::kPrivateUse1, device_of_lane_[lane]));
  return lane < kNumDevices ? "the default stream" + device
                            : c10::str("stream ", lane - kNumDevices + 1, device);
}

bool Ledger::done_before(const Access& access, Lane lane) const {
  return access.lane == lane || position(clocks_[lane], access.lane) >= access.position ||
      position(host_, access.lane) >= access.position;
}

void Ledger::check(const Access& earlier, Lane lane, const std::string& op, const Use& use) const {
  if (done_before(earlier, lane) || !earlier.extent.overlaps(use.extent)) return;
  const auto later = c10::str("race on ", use.block->device, ": ", op, " on ", name_of(lane));
  const auto other = c10::str(earlier.op, " on ", name_of(earlier.lane));
  TORCH_CHECK(!earlier.by_former_owner, later, " writes memory that may be that of a tensor which died under ",
      other, ". Call record_stream() before the tensor dies, or let the stream that it was allocated on wait first.");
  TORCH_CHECK(false, later, use.writes ? " writes" : " reads", " what was used by ", other,
      ", and is not ordered behind it. Record an event there and let this stream wait for it.");
}

int64_t Ledger::launch(Lane lane, const std::string& op, const std::vector<Use>& uses, bool is_kernel) {
  Lock lock(mutex_);
  for (const auto& use : uses) {
    for (const auto& write : use.block->writes) {
      check(write, lane, op, use);
      if (pace.is_set()) pace.host_needs(current_device(), write.lane, write.position);
    }
    if (use.writes)
      for (const auto& read : use.block->reads) check(read, lane, op, use);
  }
  if (clocks_[lane].size() <= lane) clocks_[lane].resize(lane + 1);
  const int64_t now = ++clocks_[lane][lane];
  if (is_kernel && pace.is_set()) pace.launch(current_device(), lane, now);
  for (const auto& use : uses) {
    auto& block = *use.block;
    if (use.writes) {  // who is behind this write is behind all that it was behind
      const auto covered = [&](const Access& access) { return use.extent.contains(access.extent); };
      block.reads.erase(std::remove_if(block.reads.begin(), block.reads.end(), covered), block.reads.end());
      block.writes.erase(std::remove_if(block.writes.begin(), block.writes.end(), covered), block.writes.end());
    }
    enter(use.writes ? block.writes : block.reads, {lane, now, op, use.extent});
  }
  return now;
}

Clock Ledger::recorded(Lane lane) {
  Lock lock(mutex_);
  return clocks_[lane];
}

void Ledger::wait(Lane lane, const Clock& event) {
  Lock lock(mutex_);
  merge(clocks_[lane], event);
  if (pace.is_set()) pace.stream_waits(lane, event);
}

bool Ledger::is_complete(const Clock& event) {
  Lock lock(mutex_);
  for (Lane lane = 0; lane < event.size(); ++lane)
    if (position(host_, lane) < event[lane]) return false;
  return true;
}

void Ledger::complete(const Clock& event) {
  Lock seen(seen_by_host_);
  std::vector<Pending> done;
  {
    Lock lock(mutex_);
    merge(host_, event);
    done = take_pending([&](const Pending& copy) { return position(host_, copy.lane) >= copy.position; });
  }
  finish(std::move(done));
}

void Ledger::wait_until_complete(const Clock& event) {
  {
    Lock lock(mutex_);
    if (pace.is_set()) pace.host_waits(current_device(), event);
  }
  complete(event);
}

void Ledger::complete_device(c10::DeviceIndex device) {
  Clock all;
  {
    Lock lock(mutex_);
    for (Lane lane = 0; lane < clocks_.size(); ++lane)
      if (device_of_lane_[lane] == device) merge(all, clocks_[lane]);
  }
  wait_until_complete(all);
}

void Ledger::host_needs(Lane lane, const std::string& op) {
  Lock lock(mutex_);
  TORCH_CHECK(!refuse_host_reads, op, " makes the host wait for ", name_of(lane), ", which the mode \"error\" refuses");
  ++devices_[device_of_lane_[lane]].host_reads;
}

void Ledger::host_waits(c10::DeviceIndex device) {
  Lock lock(mutex_);
  ++devices_[device].host_waits;
}

Block* Ledger::allocate(Lane lane, size_t bytes) {
  Lock lock(mutex_);
  TORCH_CHECK(!forked_after_use, "the emulated devices were used before this process was forked; start it by spawn");
  used = true;
  const c10::Device where(c10::kPrivateUse1, device_of_lane_[lane]);
  auto& on_device = devices_[where.index()];
  auto& allocated = on_device.stats.allocated_bytes[kAggregate];
  if (static_cast<size_t>(allocated.current) + bytes > on_device.limit) {
    ++on_device.stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, where, " is out of memory: ", bytes, " bytes wanted, ",
        allocated.current, " of ", on_device.limit, " in use");
  }
  void* data = memory(bytes);
  allocated.increase(bytes);
  on_device.stats.reserved_bytes[kAggregate].increase(bytes);
  on_device.stats.allocation[kAggregate].increase(1);

  // The pool may give memory that its own stream is not done with, and others that it does not wait for.
  const Extent whole{0, bytes};
  auto& graves = graves_[lane];
  graves.erase(std::remove_if(graves.begin(), graves.end(),
      [&](const Access& access) { return done_before(access, lane); }), graves.end());
  auto* block = new Block{data, bytes, where, lane, storage_over(data, bytes), {}, graves, {}};
  for (auto& access : block->reads) access.extent = whole;
  block->writes.push_back({lane, position(clocks_[lane], lane), "the allocation", whole});
  return block;
}

Block* Ledger::allocate_pinned(size_t bytes) {
  Lock lock(mutex_);
  void* data = memory(std::max(bytes, size_t{1}));
  auto* block = new Block{data, bytes, c10::kCPU, 0, storage_over(data, bytes), {}, {}, {}};
  pinned_[static_cast<const char*>(data)] = block;
  return block;
}

void Ledger::release(Block* block) noexcept {
  Lock lock(mutex_);
  if (block->device.is_cpu()) {
    pinned_.erase(static_cast<const char*>(block->data));
  } else {
    auto& stats = devices_[block->device.index()].stats;
    stats.allocated_bytes[kAggregate].decrease(block->bytes);
    stats.reserved_bytes[kAggregate].decrease(block->bytes);
    stats.allocation[kAggregate].decrease(1);
    // The allocator waits for what the recorded streams have been asked for by now: their own work, and what that is
    // behind.
    const auto is_recorded = [&](const Access& access) {
      return std::any_of(block->recorded.begin(), block->recorded.end(),
          [&](Lane lane) { return done_before(access, lane); });
    };
    // Whether this is a fault is known when the memory may be written again.
    auto& graves = graves_[block->home];
    for (auto* accesses : {&block->reads, &block->writes})
      for (auto& access : *accesses)
        if (!done_before(access, block->home) && !is_recorded(access)) {
          access.extent = {0, 1};
          access.by_former_owner = true;
          const bool is_last = std::none_of(graves.begin(), graves.end(), [&](const Access& grave) {
            return grave.lane == access.lane && grave.position > access.position;
          });
          if (is_last) enter(graves, Access(access));
        }
  }
  std::free(block->data);
  delete block;
}

void Ledger::record_stream(Block* block, Lane lane) {
  Lock lock(mutex_);
  block->recorded.insert(lane);
}

Block* Ledger::pinned_block(const void* address) {
  Lock lock(mutex_);
  const auto* wanted = static_cast<const char*>(address);
  auto behind = pinned_.upper_bound(wanted);
  if (behind == pinned_.begin()) return nullptr;
  auto* block = std::prev(behind)->second;
  return wanted < static_cast<const char*>(block->data) + std::max(block->bytes, size_t{1}) ? block : nullptr;
}

bool Ledger::is_pinned(const void* address) { return pinned_block(address) != nullptr; }

std::vector<Pending> Ledger::take_pending(const std::function<bool(const Pending&)>& wanted) {
  std::vector<Pending> taken, left;
  for (auto& copy : pending_) (wanted(copy) ? taken : left).push_back(std::move(copy));
  pending_ = std::move(left);
  return taken;
}

void Ledger::finish(std::vector<Pending> done) {
  std::string too_early;
  for (auto& copy : done) {
    const auto complaint = copy.finish();
    if (too_early.empty() && !complaint.empty()) too_early = complaint + " on " + name_of(copy.lane);
  }
  TORCH_CHECK(too_early.empty(), "race on the host: ", too_early,
      ". Wait for the stream or for an event behind the copy first.");
}

void Ledger::add_pending(Pending copy) {
  Lock lock(mutex_);
  pending_.push_back(std::move(copy));
}

void Ledger::settle(Block* pinned, const Extent& extent) {
  Lock seen(seen_by_host_);
  std::vector<Pending> done;
  {
    Lock lock(mutex_);
    // A copy that is settled has seen what earlier ones brought, also beside these bytes.
    Extent touched = extent;
    for (bool grows = true; grows;) {
      const Extent before = touched;
      for (const auto& copy : pending_)
        if (copy.pinned == pinned && copy.extent.overlaps(touched))
          touched = {std::min(touched.begin, copy.extent.begin), std::max(touched.end, copy.extent.end)};
      grows = touched.begin != before.begin || touched.end != before.end;
    }
    done = take_pending([&](const Pending& copy) { return copy.pinned == pinned && copy.extent.overlaps(touched); });
  }
  finish(std::move(done));
}

void Ledger::with_pending_shown(Block* pinned, const std::function<void()>& run) {
  Lock seen(seen_by_host_);
  std::vector<Pending> shown;
  {
    Lock lock(mutex_);
    for (auto& copy : pending_) if (copy.pinned == pinned) shown.push_back(copy);
  }
  const auto hide = c10::make_scope_exit([&] { for (auto& copy : shown) copy.hide(); });
  for (auto& copy : shown) copy.show();
  run();
}

namespace {
thread_local c10::DeviceIndex thread_device = 0;
thread_local c10::StreamId thread_streams[kNumDevices] = {};
}  // namespace

c10::DeviceIndex current_device() { return thread_device; }
void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(0 <= device && device < kNumDevices, "there is no emulated device ", static_cast<int>(device));
  thread_device = device;
}
c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, device), thread_streams[device]);
}
Lane current_lane(c10::DeviceIndex device) { return Ledger::lane_of(current_stream(device)); }
c10::Stream exchange_stream(const c10::Stream& stream) {
  TORCH_CHECK(Ledger::get().knows(stream), "nobody made this stream: ", stream);
  const auto before = current_stream(stream.device_index());
  thread_streams[stream.device_index()] = stream.id();
  return before;
}

}  // namespace emulated
