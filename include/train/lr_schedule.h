// Learning rate as a pure function of the step: nothing to save, nothing to drift after a restart.
#pragma once

#include <cstdint>
#include <string>

namespace qshard {

struct ScheduleOptions {
  std::string kind = "cosine";  // constant, linear, cosine, wsd
  double lr = 1e-3;             // peak
  double min_lr = 0;            // at the last step
  int64_t warmup_steps = 0;     // linear from lr/warmup_steps at step 1 to lr at step warmup_steps
  int64_t decay_steps = 0;      // wsd: steps of the final linear decay
  int64_t total_steps = 1;
};

// Rate of step `step`, 1 for the first. Past total_steps it stays at the last value.
double learning_rate(const ScheduleOptions& schedule, int64_t step);

}  // namespace qshard
