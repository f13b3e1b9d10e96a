// AdamW on shards: every rank updates its own rows, nothing moves.
#pragma once

#include "fsdp/unit.h"

namespace qshard {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  bool decay_matrices_only = true;  // false: norms decay as well
  double clip = 1.0;                // global gradient norm; 0: no clipping
};

// Adds Σ over this rank's rows of the squared reduced gradient to `total` (f64 [1]).
void add_grad_sum_squares(Unit& unit, Ops& ops, Tensor total);

// The factor that clips: min(1, clip / (norm + 1e-6)), PyTorch's clip_grad_norm_.
float clip_factor(double grad_norm, double clip);

// Step `step`, 1 for the first, of parameters that decay or do not.
AdamWStep adamw_step(const AdamWOptions& options, bool decays, double lr, int64_t step,
                     float grad_scale);

// Of parameters that decay, and of the others.
struct UpdateFactors {
  AdamWFactors with_decay, without_decay;
};

// One update of the unit's rows and publish(). factors: in the device's memory, or null; instead of
// what lr, step and grad_scale come to.
void adamw_update(Unit& unit, Ops& ops, const AdamWOptions& options, double lr, int64_t step,
                  float grad_scale, const UpdateFactors* factors = nullptr);

}  // namespace qshard
