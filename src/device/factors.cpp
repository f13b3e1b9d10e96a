#include "device/factors.h"

#include <cmath>

#include "base/check.h"

namespace qshard {

AdamWFactors AdamWStep::factors() const {
  QS_CHECK(step >= 1, "adamw: the first update is step 1, not {}", step);
  const double t = static_cast<double>(step);
  return {static_cast<float>(1.0 - double{lr} * double{weight_decay}), grad_scale,
          static_cast<float>(lr / (1.0 - std::pow(double{beta1}, t))),
          static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(double{beta2}, t)))};
}

}  // namespace qshard
