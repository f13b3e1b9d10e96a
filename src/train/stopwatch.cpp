#include "train/stopwatch.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace qshard {
namespace {

constexpr double kShortest = 2e-3;  // seconds that a repeat of short work takes
constexpr double kMostCalls = 1000;

using Clock = std::chrono::steady_clock;

}  // namespace

Times times_of(std::vector<double> seconds, int64_t warm_up) {
  QS_CHECK(warm_up >= 0 && warm_up < std::ssize(seconds), "{} times, {} of them warm-up",
           seconds.size(), warm_up);
  seconds.erase(seconds.begin(), seconds.begin() + warm_up);
  std::sort(seconds.begin(), seconds.end());
  const size_t n = seconds.size();
  return {(seconds[(n - 1) / 2] + seconds[n / 2]) / 2, seconds.front(), seconds.back()};
}

Stopwatch::Stopwatch(const World& world, Device& device, int64_t warm_up, int64_t repeats)
    : world_(world),
      device_(device),
      warm_up_(warm_up),
      repeats_(repeats),
      byte_(device, DType::u8, {1}, Segment::workspace, "stopwatch") {}

double Stopwatch::once(const std::function<void()>& work, int64_t calls) {
  world_.barrier();
  const Clock::time_point begin = Clock::now();
  for (int64_t i = 0; i < calls; ++i) work();
  char byte = 0;
  device_.copy(&byte, byte_->data, 1);
  const std::chrono::duration<double> seconds = Clock::now() - begin;
  return seconds.count() / static_cast<double>(calls);
}

std::vector<double> Stopwatch::time(const std::function<void()>& work,
                                    const std::function<void()>& prepare) {
  std::vector<double> seconds;
  for (int64_t i = 0; i < warm_up_ + repeats_; ++i) {
    prepare();
    seconds.push_back(once(work, 1));
  }
  world_.all_reduce_max(seconds.data(), static_cast<int>(seconds.size()));
  return seconds;
}

Times Stopwatch::time_short(const std::function<void()>& work) {
  double calls = 1;
  for (int64_t i = 0; i < warm_up_; ++i)
    calls = std::clamp(std::ceil(kShortest / once(work, 1)), 1.0, kMostCalls);
  world_.all_reduce_max(&calls, 1);
  std::vector<double> seconds;
  for (int64_t i = 0; i < repeats_; ++i) seconds.push_back(once(work, static_cast<int64_t>(calls)));
  world_.all_reduce_max(seconds.data(), static_cast<int>(seconds.size()));
  return times_of(seconds, 0);
}

}  // namespace qshard
