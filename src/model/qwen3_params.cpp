#include "model/qwen3_params.h"

#include <fmt/format.h>

namespace qshard {

std::string layers_name(int64_t first, int64_t end) {
  return end == first + 1 ? fmt::format("layers.{}", first)
                          : fmt::format("layers.{}-{}", first, end - 1);
}

std::vector<ParamSpec> layer_params(const Qwen3Config& c, int64_t layer) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const int64_t C = c.hidden_size, F = c.intermediate_size, D = c.head_dim;
  return {
      {prefix + "input_layernorm.weight", {C}, Init::ones},
      {prefix + "self_attn.q_proj.weight", {c.q_rows(), C}},
      {prefix + "self_attn.k_proj.weight", {c.kv_rows(), C}},
      {prefix + "self_attn.v_proj.weight", {c.kv_rows(), C}},
      {prefix + "self_attn.q_norm.weight", {D}, Init::ones},
      {prefix + "self_attn.k_norm.weight", {D}, Init::ones},
      {prefix + "self_attn.o_proj.weight", {C, c.q_rows()}},
      {prefix + "post_attention_layernorm.weight", {C}, Init::ones},
      {prefix + "mlp.gate_proj.weight", {F, C}},
      {prefix + "mlp.up_proj.weight", {F, C}},
      {prefix + "mlp.down_proj.weight", {C, F}},
  };
}

std::vector<ParamSpec> root_params(const Qwen3Config& c) {
  std::vector<ParamSpec> params = {
      {"model.embed_tokens.weight", {c.vocab_size, c.hidden_size}},
      {"model.norm.weight", {c.hidden_size}, Init::ones},
  };
  if (!c.tie_word_embeddings) params.push_back({"lm_head.weight", {c.vocab_size, c.hidden_size}});
  return params;
}

std::vector<ParamSpec> layers_params(const Qwen3Config& c, int64_t first, int64_t end) {
  std::vector<ParamSpec> params;
  for (int64_t l = first; l < end; ++l)
    for (ParamSpec& p : layer_params(c, l)) params.push_back(std::move(p));
  return params;
}

std::vector<ParamSpec> all_params(const Qwen3Config& c) {
  std::vector<ParamSpec> params = root_params(c);
  for (ParamSpec& p : layers_params(c, 0, c.num_hidden_layers)) params.push_back(std::move(p));
  return params;
}

}  // namespace qshard
