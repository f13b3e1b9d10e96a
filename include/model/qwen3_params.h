// Qwen3's parameters, unit by unit, under Hugging Face's names.
#pragma once

#include <string>
#include <vector>

#include "model/qwen3_config.h"
#include "tensor/param_spec.h"

namespace qshard {

// A decoder layer's 11 parameters, in this order. q/k/v and gate/up follow each other so that each
// group can run as one product.
enum LayerParam {
  kInputNorm,
  kQProj,
  kKProj,
  kVProj,
  kQNorm,
  kKNorm,
  kOProj,
  kPostNorm,
  kGateProj,
  kUpProj,
  kDownProj,
  kLayerParams
};

// "layers.3"; of several layers "layers.3-5".
std::string layers_name(int64_t first, int64_t end);

// The root unit. The head exists only when it is not tied to the embedding.
enum RootParam { kEmbedTokens, kFinalNorm, kLmHead };

std::vector<ParamSpec> layer_params(const Qwen3Config& config, int64_t layer);
std::vector<ParamSpec> root_params(const Qwen3Config& config);
// Of layers [first, end), layer by layer: what a unit of several layers holds.
std::vector<ParamSpec> layers_params(const Qwen3Config& config, int64_t first, int64_t end);
std::vector<ParamSpec> all_params(const Qwen3Config& config);  // root unit first, then the layers

}  // namespace qshard
