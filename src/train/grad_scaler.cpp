#include "train/grad_scaler.h"

#include <algorithm>
#include <limits>

namespace qshard {

void GradScaler::update(bool overflow) {
  if (overflow) {
    scale_ = std::max(1.0, scale_ * options_.backoff_factor);
    growth_tracker_ = 0;
  } else if (++growth_tracker_ >= options_.growth_interval) {
    const double grown = scale_ * options_.growth_factor;
    if (grown <= std::numeric_limits<float>::max()) scale_ = grown;
    growth_tracker_ = 0;
  }
}

}  // namespace qshard
