// The smallest Qwen3 and the tensors of a checkpoint of it, all held by one rank.
#pragma once

#include <vector>

#include "io/checkpoint.h"
#include "model/qwen3_params.h"

namespace qshard {

inline Qwen3Config tiny_config() {
  return Qwen3Config::from_json({{"vocab_size", 5},
                                 {"hidden_size", 4},
                                 {"intermediate_size", 3},
                                 {"num_hidden_layers", 1},
                                 {"num_attention_heads", 2},
                                 {"head_dim", 2},
                                 {"rope_theta", 1e4},
                                 {"tie_word_embeddings", true}},
                                "tiny");
}

// All tensors of the tiny model and its optimizer, no two with the same values unless scale is 0.
struct TinyTensors {
  std::vector<std::vector<float>> memory;
  std::vector<CheckpointTensor> list;

  explicit TinyTensors(float scale) {
    for (const ParamSpec& p : all_params(tiny_config()))
      for (const char* group : {"/model/", "/optim/exp_avg/", "/optim/exp_avg_sq/"}) {
        std::vector<float>& values = memory.emplace_back(p.shape.numel());
        for (size_t i = 0; i < values.size(); ++i)
          values[i] = scale * static_cast<float>(100 * memory.size() + i);
        list.push_back({group + p.name, p.shape, 0, Tensor::of(values.data(), {p.shape.numel()})});
      }
  }
};

}  // namespace qshard
