// Virtual time: when kernels would begin and end if the host took so long to launch each, and its stream to run it.
//
// Nothing is slowed down, and what the host does between two launches counts for nothing: the figures are those of
// the order of launches and waits, and the same on any machine. Each device has a host: all threads whose current
// device it is (autograd has its own) launch as one, kernel after kernel.
#pragma once
#include <c10/core/Device.h>
#include <cstdint>
#include <map>
#include <vector>

namespace emulated {

using Lane = size_t;                  // a stream's number among the streams of all devices
using Clock = std::vector<int64_t>;   // by lane: the last position that is known to be done

struct Worked {  // a stream, in seconds since the pace was set
  double begin = 0, end = 0, busy = 0;
};

class Pace {
 public:
  void set(double launch_seconds, double kernel_seconds);  // and begins anew
  bool is_set() const { return launch_ > 0 || kernel_ > 0; }

  void launch(c10::DeviceIndex device, Lane lane, int64_t position);
  void stream_waits(Lane lane, const Clock& event);

  // A host goes on no sooner than another one has launched what it needs, or than what it waits for has ended.
  void host_needs(c10::DeviceIndex device, Lane lane, int64_t position);
  void host_waits(c10::DeviceIndex device, const Clock& event);

  const std::map<Lane, Worked>& worked() const { return worked_; }
  double host_idle(c10::DeviceIndex device) { return idle_[device]; }

 private:
  struct Moment {
    double launched = 0, ended = 0;
  };
  Moment moment(Lane lane, int64_t position) const;
  void host_until(c10::DeviceIndex device, double seconds);

  double launch_ = 0, kernel_ = 0;
  std::map<Lane, std::map<int64_t, Moment>> moments_;
  std::map<Lane, double> ready_;
  std::map<Lane, Worked> worked_;
  std::map<c10::DeviceIndex, double> now_, idle_;  // of hosts
};

}  // namespace emulated
