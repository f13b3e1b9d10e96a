#include "train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace qshard {

double learning_rate(const ScheduleOptions& s, int64_t step) {
  step = std::min(step, s.total_steps);
  if (step <= s.warmup_steps)
    return s.lr * static_cast<double>(step) / static_cast<double>(s.warmup_steps);
  if (s.kind == "constant") return s.lr;
  const int64_t decay_begin = s.kind == "wsd" ? s.total_steps - s.decay_steps : s.warmup_steps;
  const double length = static_cast<double>(std::max<int64_t>(1, s.total_steps - decay_begin));
  const double progress = std::clamp(static_cast<double>(step - decay_begin) / length, 0.0, 1.0);
  if (s.kind == "cosine")
    return s.min_lr + (s.lr - s.min_lr) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
  if (s.kind == "linear" || s.kind == "wsd") return s.lr + (s.min_lr - s.lr) * progress;
  fail_usage("unknown schedule '{}': expected constant, linear, cosine or wsd", s.kind);
}

}  // namespace qshard
