#include "train/adamw.h"

#include <algorithm>

namespace qshard {

void add_grad_sum_squares(Unit& unit, Ops& ops, Tensor total) {
  for (int i = 0; i < unit.size(); ++i) ops.add_sum_squares(unit.grad_shard(i), total);
}

float clip_factor(double grad_norm, double clip) {
  if (clip <= 0) return 1.0f;
  return static_cast<float>(std::min(1.0, clip / (grad_norm + 1e-6)));
}

AdamWStep adamw_step(const AdamWOptions& o, bool decays, double lr, int64_t step,
                     float grad_scale) {
  return {static_cast<float>(lr),
          static_cast<float>(o.beta1),
          static_cast<float>(o.beta2),
          static_cast<float>(o.eps),
          decays ? static_cast<float>(o.weight_decay) : 0.0f,
          step,
          grad_scale};
}

void adamw_update(Unit& unit, Ops& ops, const AdamWOptions& o, double lr, int64_t step,
                  float grad_scale, const UpdateFactors* factors) {
  ops.mark(unit.name(), "optimizer", "AdamW");
  unit.visit_states(Unit::StateUse::all_change, [&](const Unit::States& s) {
    const bool decays = unit.layout().params()[s.param].is_matrix() || !o.decay_matrices_only;
    AdamWStep adamw = adamw_step(o, decays, lr, step, grad_scale);
    if (factors) adamw.on_device = decays ? &factors->with_decay : &factors->without_decay;
    ops.adamw(s.master, s.grad_shard, s.exp_avg, s.exp_avg_sq, s.compute_shard, adamw);
  });
  unit.publish();
}

}  // namespace qshard
