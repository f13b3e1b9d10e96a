// The parameter table: the one list of a model's parameters. It drives the shard layout, the
// initial values, weight decay, and the names in checkpoints and safetensors files.
#pragma once

#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace qshard {

enum class Init : uint8_t { normal, ones };  // normal: mean 0, std = the config's initializer_range

struct ParamSpec {
  std::string name;  // Hugging Face's, e.g. "model.layers.0.self_attn.q_proj.weight"
  Shape shape;
  Init init = Init::normal;
  bool is_matrix() const { return shape.rank() >= 2; }  // decay = "matrices" applies to these
};

}  // namespace qshard
