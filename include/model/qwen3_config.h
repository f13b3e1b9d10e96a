// The shape of a Qwen3 decoder, read from a Hugging Face config.json.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace qshard {

struct Qwen3Config {
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, num_hidden_layers = 0;
  int64_t num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0;
  int64_t max_position_embeddings = 0;
  double rope_theta = 0, rms_norm_eps = 0, initializer_range = 0;
  bool tie_word_embeddings = false;

  // Required: vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads
  // and a rope theta. Where absent or null: num_key_value_heads = heads, head_dim = hidden / heads,
  // rms_norm_eps 1e-6, initializer_range 0.02, tie_word_embeddings false, max_position_embeddings
  // 32768. rope_theta: top level, rope_parameters or rope_scaling; two different values, or none,
  // is an error. What this program does not do is refused by field name with the value found:
  // model_type other than qwen3, attention_bias, use_sliding_window, a layer_types entry other than
  // full_attention, rope type other than default, hidden_act other than silu, attention_dropout >
  // 0, quantized weights, odd head_dim, heads not a multiple of kv heads. `where` names the file.
  static Qwen3Config from_json(const nlohmann::json& json, const std::string& where);
  nlohmann::json to_json() const;  // a config.json that transformers reads

  int64_t q_rows() const { return num_attention_heads * head_dim; }
  int64_t kv_rows() const { return num_key_value_heads * head_dim; }
  int64_t num_parameters() const;  // a tied head counted once

  // Model FLOPs of one token of a training step (forward + backward = 3 × forward): matrix products
  // of the layers and of the head (once, tied or not), not the embedding look-up, plus causal
  // attention with H·D and the mean context (T+1)/2 of a sequence of T. No recompute.
  double train_flops_per_token(int64_t T) const;
};

}  // namespace qshard
