// Replaying a reference case: a short run whose truth was computed in float64, with the error that
// PyTorch FSDP2 itself makes as the yardstick. Format: test/reference/README.md.
#pragma once

#include <string>
#include <vector>

#include "train/engine.h"

namespace qshard {

struct VerifyOptions {
  std::string folder, out;
  std::string param_dtype = "f32", reduce_dtype = "f32", activation_checkpoint = "none";
  TransportOptions transport;
  bool ranks_any = false;
  FsdpOptions fsdp;  // all but the dtypes, which are the texts above
};

// error: loss, grad norm: largest relative error over steps. Gradients, weights: largest over
// tensors of ‖a−b‖₂/‖b‖₂. limit: f32: 3 × PyTorch's or, if larger, a floor; bf16, fp16: 2 ×
// PyTorch's.
struct VerifyRow {
  std::string quantity;
  double error = 0, pytorch = 0, limit = 0;
  std::string where;                          // the step or tensor with the largest error
  bool ok() const { return error <= limit; }  // false for NaN
};

struct VerifyReport {
  std::vector<VerifyRow> rows;  // on rank 0
  std::string transport;        // as Collectives::name() has it
  double loss_scale = 0;        // of the last step; 0: the dtype needs none
  bool ok = false;              // on every rank
};

// Collective.
VerifyReport verify_reference(const VerifyOptions& options, World& world, Backend& backend);

// Largest over the tensors of ‖a−b‖₂/‖b‖₂; a reshaped tensor, or one that either file lacks,
// throws. NaN counts as infinite.
VerifyRow compare_files(const std::string& quantity, const std::string& ours,
                        const std::string& truth);

}  // namespace qshard
