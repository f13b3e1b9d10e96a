// Tokens from a trained model, one after the other.
//
// [Note: Sampling] Each token is the training forward over all tokens before it, at most a window
// of them: one code computes both, and units are gathered as in training, so that a model which
// needs several ranks samples on them. Sample i is made by rank i mod ranks while the others go
// through the same gathers. Every forward is one sequence of one shape: the same tokens on any
// number of ranks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/transport_options.h"
#include "comm/world.h"
#include "device/ops.h"
#include "model/qwen3_config.h"
#include "train/token_choice.h"

namespace qshard {

using Warn = std::function<void(const std::string&)>;  // called on rank 0

struct TrainedModel {
  std::string path;            // a checkpoint, or a folder with config.json and safetensors
  bool is_checkpoint = false;  // which of both
  Qwen3Config config;
  std::string tokenizer;  // of the tokens it was trained on; empty: not known
  int64_t context = 0;    // tokens of a training sequence; of a folder max_position_embeddings
};

// `from`: a checkpoint, a Hugging Face folder, or a folder of checkpoints (or of a run with some),
// whose newest good one is taken. Collective.
TrainedModel find_trained_model(const World& world, const std::string& from, const Warn& warn);

struct GenerateOptions {
  std::vector<int32_t> prompt;  // at least one id
  int64_t tokens = 200;         // at most, of a sample
  int64_t samples = 1;
  int64_t window = 0;   // tokens before the next one that count; 0: the model's context
  int64_t choices = 0;  // ids from here on are never chosen; 0: all may be
  int32_t end = -1;     // id that ends a sample; -1: none
  uint64_t seed = 1;
  ChoiceOptions choice;
  DType param_dtype = DType::f32;
  TransportOptions transport;
};

// Calls use(sample, id) on rank 0 for every token, sample by sample: tokens of rank 0 as they come,
// those of other ranks when they have ended. The end is told as well. Collective.
void generate(const TrainedModel& from, const GenerateOptions& options, World& world,
              Backend& backend, const Warn& warn,
              const std::function<void(int64_t sample, int32_t id)>& use);

}  // namespace qshard
