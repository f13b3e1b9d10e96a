// Times of repeated work on all ranks.
#pragma once

#include <functional>
#include <vector>

#include "comm/world.h"
#include "device/device.h"

namespace qshard {

struct Times {
  double median = 0, lowest = 0, highest = 0;  // seconds
};

// Of all but the first `warm_up`; at least one has to remain.
Times times_of(std::vector<double> seconds, int64_t warm_up);

class Stopwatch {
 public:
  Stopwatch(const World& world, Device& device, int64_t warm_up, int64_t repeats);

  // Seconds of warm_up + repeats calls, each of the slowest rank: all ranks begin together, and the
  // device has done what it was asked for. Collective.
  // `prepare` runs before each, untimed.
  std::vector<double> time(
      const std::function<void()>& work, const std::function<void()>& prepare = [] {});
  // Of one call where calls may be shorter than the clock's steps: a repeat makes as many calls as
  // take 2 ms, the same number on all ranks. Collective.
  Times time_short(const std::function<void()>& work);

 private:
  double once(const std::function<void()>& work, int64_t calls);  // seconds of a call, this rank
  const World& world_;
  Device& device_;
  int64_t warm_up_, repeats_;
  Buffer byte_;  // a copy of it waits for the device
};

}  // namespace qshard
