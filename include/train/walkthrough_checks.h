// The key points of FSDP as checks of what was measured in a walkthrough's step.
#pragma once

#include "train/step_recorder.h"
#include "train/walkthrough.h"
#include "train/walkthrough_records.h"

namespace qshard {

struct WalkthroughCheck {
  std::string name, expected, found;
  bool ok = false;
};

// On rank 0, from all ranks' records.
std::vector<WalkthroughCheck> check_records(const WalkthroughOptions& options,
                                            const std::vector<RankRecord>& ranks);

// [Note: Rounding of a mean] With u the largest relative error of a rounding to reduce_dtype, a
// value that is rounded n times on its way has an error of at most (1+u)^n − 1, and a sum that of
// its terms' magnitudes. Transports that sum in f32 round each rank's value once, before it moves.
// NCCL adds in reduce_dtype: the value is rounded once and takes part in at most N−1 additions, in
// whatever order, each rounded, so n = N. Over replicas both happen again to the sum of the shards,
// and the total is rounded once more for the way back. f32 sums add 2^-22 a term.
double mean_gradient_bound(const std::string& transport, DType reduce_dtype, const MeshShape& mesh);

// The unit's reduced gradient against the average over ranks of the full gradients that each rank
// recorded before the reduction, by another way: an MPI sum in f64. Collective.
WalkthroughCheck check_mean_gradient(const WalkthroughOptions& options, const Mesh& mesh,
                                     Device& device, const Unit& unit,
                                     const StepRecorder& recorder);

// Rank 0 alone runs the model up to the layer, as one process with all weights, on the same tokens.
WalkthroughCheck check_single_process(const WalkthroughOptions& options, const World& world,
                                      Backend& backend, TokenBatch batch,
                                      const StepRecorder& recorder);

// Each operator's output against activations.safetensors of options.reference. Collective.
std::vector<WalkthroughCheck> check_activations(const WalkthroughOptions& options,
                                                const World& world, const LayerShape& shape,
                                                const StepRecorder& recorder);

// A model with the options' weights: from the reference folder, or drawn. Collective.
void set_weights(const WalkthroughOptions& options, const World& world, Qwen3Model& model);

}  // namespace qshard
