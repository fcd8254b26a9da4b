// The ledger: which work is ordered behind which, who touched which memory, and how much of it is in use.
//
// Nothing here computes. Every op tells the ledger, before it runs, which bytes it reads and writes on
// which stream; the ledger answers by an exception if another stream's work on these bytes is not
// ordered before it. Order is kept as vector clocks:
//   [1] each stream has a position, one more for each op, and a clock: how far it is behind all streams;
//   [2] recording an event copies the stream's clock, waiting for the event merges it;
//   [3] when the host waits, what it waited for is complete for everybody: one clock for the host.
#pragma once
#include "pace.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace emulated {

constexpr c10::DeviceIndex kNumDevices = 4;

struct Extent {  // bytes of an allocation
  size_t begin, end;
  bool overlaps(const Extent& other) const { return begin < other.end && other.begin < end; }
  bool contains(const Extent& other) const { return begin <= other.begin && other.end <= end; }
};

struct Access {
  Lane lane;
  int64_t position;
  std::string op;
  Extent extent;
  bool by_former_owner = false;  // of a tensor that died, whose memory this may be
};

struct Block {  // one allocation, on a device or pinned on the host
  void* data;
  size_t bytes;
  c10::Device device;
  Lane home;  // the stream whose pool it came from and goes back to
  c10::Storage on_host;  // the same bytes for the CPU's kernels
  std::vector<Access> writes, reads;
  std::set<Lane> recorded;  // by record_stream
};

struct Use {
  Block* block;
  Extent extent;
  bool writes;
};

// A copy between pinned memory and a device that the host has not waited for.
struct Pending {
  Lane lane;
  int64_t position;
  Block* pinned;
  Extent extent;
  std::function<std::string()> finish;  // says what the host did too early, or nothing
  std::function<void()> show, hide;     // the bytes as streams see them; as the host sees them
};

class Ledger {
 public:
  static Ledger& get();

  static Lane lane_of(const c10::Stream& stream);
  c10::StreamId new_stream(c10::DeviceIndex device);
  bool knows(const c10::Stream& stream);

  // Order. `launch` checks and enters an op; all others move clocks.
  int64_t launch(Lane lane, const std::string& op, const std::vector<Use>& uses, bool is_kernel = true);
  Clock recorded(Lane lane);
  void wait(Lane lane, const Clock& event);
  bool is_complete(const Clock& event);
  void complete(const Clock& event);
  void wait_until_complete(const Clock& event);  // the host does
  void complete_device(c10::DeviceIndex device);

  // The host will wait since it needs a value: counted, and refused in the mode "error".
  void host_needs(Lane lane, const std::string& op);
  void host_waits(c10::DeviceIndex device);

  // Memory.
  Block* allocate(Lane lane, size_t bytes);
  Block* allocate_pinned(size_t bytes);
  void release(Block* block) noexcept;
  void record_stream(Block* block, Lane lane);
  bool is_pinned(const void* address);
  Block* pinned_block(const void* address);

  // Copies that are still under way for the host.
  void add_pending(Pending copy);
  void settle(Block* pinned, const Extent& extent);
  void with_pending_shown(Block* pinned, const std::function<void()>& run);

  struct Device {
    c10::CachingDeviceAllocator::DeviceStats stats;
    size_t limit = size_t{16} << 30;
    int64_t host_reads = 0, host_waits = 0;
  };
  c10::DeviceIndex device_of(Lane lane) const { return device_of_lane_[lane]; }
  Device& device(c10::DeviceIndex index) { return devices_[index]; }
  static bool is_forked_after_use();
  std::mutex& mutex() { return mutex_; }
  bool refuse_host_reads = false;
  Pace pace;

 private:
  bool done_before(const Access& access, Lane lane) const;
  void check(const Access& earlier, Lane lane, const std::string& op, const Use& use) const;
  std::string name_of(Lane lane) const;
  void finish(std::vector<Pending> done);
  std::vector<Pending> take_pending(const std::function<bool(const Pending&)>& wanted);

  // Taken before `mutex_` by whoever changes what the host sees of a copy under way: a thread that waits lets
  // copies of all streams arrive that are behind, also those that another thread is showing and will hide again.
  std::mutex seen_by_host_;
  std::mutex mutex_;
  std::vector<Clock> clocks_{kNumDevices};
  std::vector<c10::DeviceIndex> device_of_lane_{0, 1, 2, 3};
  Clock host_;
  std::vector<std::vector<Access>> graves_{kNumDevices};  // by lane: who may still use freed memory
  std::map<const char*, Block*> pinned_;
  std::vector<Pending> pending_;
  Device devices_[kNumDevices];
};

// The thread's current device and streams.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
Lane current_lane(c10::DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream current_stream(c10::DeviceIndex device);

}  // namespace emulated
