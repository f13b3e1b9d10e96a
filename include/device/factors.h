// Numbers that change from step to step and that operators multiply with: given at the call, or
// read from the device's memory when the operator runs, for work that is recorded once ([Note:
// Recording]). No fmt here: kernels include it.
#pragma once

#include <cstdint>

namespace qshard {

struct Factor {
  Factor(float given) : value(given) {}
  static Factor of(const float* device_memory) {
    Factor factor(0);
    factor.on_device = device_memory;
    return factor;
  }
  float get() const { return on_device ? *on_device : value; }  // where the host can read it

  float value;
  const float* on_device = nullptr;  // null: value
};

// What changes from one step of AdamW to the next, computed in double.
struct AdamWFactors {
  float decay;       // of the weight: 1 - lr · weight_decay
  float grad_scale;  // of the gradient
  float step_size;   // lr / (1 - beta1^step)
  float root_scale;  // 1 / sqrt(1 - beta2^step)
};

struct AdamWStep {
  float lr, beta1, beta2, eps, weight_decay;
  int64_t step;      // 1 for the first update: bias correction is 1 - beta^step
  float grad_scale;  // multiplies the gradient first (clipping)
  const AdamWFactors* on_device = nullptr;  // null: those of factors()

  AdamWFactors factors() const;  // a step below 1 throws
};

}  // namespace qshard
