// The key points of FSDP as checks of what was measured in a walkthrough's step.
#pragma once

#include "train/step_recorder.h"
#include "train/walkthrough_document.h"

namespace qshard {

struct WalkthroughCheck {
  std::string name, expected, found;
  bool ok = false;
};

// On rank 0, from all ranks' records.
std::vector<WalkthroughCheck> check_records(const WalkthroughOptions& options,
                                            const std::vector<RankRecord>& ranks);

// The unit's reduced gradient against the average over ranks of the full gradients that each rank
// recorded before the reduction, by another way: an MPI sum in f64. Collective.
WalkthroughCheck check_mean_gradient(const WalkthroughOptions& options, const World& world,
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
