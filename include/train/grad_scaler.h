// Dynamic loss scaling of fp16 training, as PyTorch's GradScaler does it.
//
// [Note: Loss scaling]  Gradients of activations below 2^-24 are zero in fp16. So with fp16
// parameters backward runs on the loss times a scale, and the reduction divides by it again:
// reduced gradients, norm, clipping and metrics are those of the loss itself. A scale that is too
// large makes some gradient infinite on some rank, which the norm's all-reduce tells every rank:
// all of them skip the update (weights, moments and AdamW's step count stay) and lower the scale.
// After growth_interval steps without one the scale grows. At scale 1 a norm that is not finite is
// not the scale's doing, and ends the run as with other dtypes.
#pragma once

#include <cstdint>

namespace qshard {

struct GradScalerOptions {
  double init_scale = 65536;  // at least 1
  double growth_factor = 2, backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // steps in a row without overflow
};

class GradScaler {
 public:
  explicit GradScaler(const GradScalerOptions& options = {})
      : options_(options), scale_(options.init_scale) {}

  double scale() const { return scale_; }                     // from 1 to the largest f32
  int64_t growth_tracker() const { return growth_tracker_; }  // steps since overflow or growth
  void update(bool overflow);                                 // after every step
  void restore(double scale, int64_t growth_tracker) {
    scale_ = scale, growth_tracker_ = growth_tracker;
  }

 private:
  GradScalerOptions options_;
  double scale_;
  int64_t growth_tracker_ = 0;
};

}  // namespace qshard
