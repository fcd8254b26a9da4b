#include "pace.h"

#include <algorithm>

namespace emulated {

void Pace::set(double launch_seconds, double kernel_seconds) {
  *this = {};
  launch_ = launch_seconds, kernel_ = kernel_seconds;
}

// Of the last kernel up to there. What came before the pace was set was there when it began.
Pace::Moment Pace::moment(Lane lane, int64_t position) const {
  const auto moments = moments_.find(lane);
  if (moments == moments_.end()) return {};
  const auto after = moments->second.upper_bound(position);
  return after == moments->second.begin() ? Moment{} : std::prev(after)->second;
}

void Pace::launch(c10::DeviceIndex device, Lane lane, int64_t position) {
  const double launched = now_[device] += launch_;
  const double begin = std::max(launched, ready_[lane]), end = begin + kernel_;
  auto& worked = worked_.try_emplace(lane, Worked{begin}).first->second;
  worked.end = ready_[lane] = end;
  worked.busy += kernel_;
  moments_[lane][position] = {launched, end};
}

void Pace::stream_waits(Lane lane, const Clock& event) {
  for (Lane other = 0; other < event.size(); ++other)
    ready_[lane] = std::max(ready_[lane], moment(other, event[other]).ended);
}

void Pace::host_until(c10::DeviceIndex device, double seconds) {
  idle_[device] += std::max(seconds - now_[device], 0.0);
  now_[device] = std::max(now_[device], seconds);
}

void Pace::host_needs(c10::DeviceIndex device, Lane lane, int64_t position) {
  host_until(device, moment(lane, position).launched);
}

void Pace::host_waits(c10::DeviceIndex device, const Clock& event) {
  for (Lane lane = 0; lane < event.size(); ++lane) host_until(device, moment(lane, event[lane]).ended);
}

}  // namespace emulated
