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

// One update of the unit's rows and publish(). step: 1 for the first.
void adamw_update(Unit& unit, Ops& ops, const AdamWOptions& options, double lr, int64_t step,
                  float grad_scale);

}  // namespace qshard
