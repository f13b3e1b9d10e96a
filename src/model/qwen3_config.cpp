#include "model/qwen3_config.h"

#include <cmath>
#include <limits>
#include <optional>

#include "base/check.h"

namespace qshard {
namespace {

using nlohmann::json;

// Fields of one object of a config file. A field that is null counts as absent, as in transformers.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object())
      fail_usage("{}: expected a JSON object with the fields of a model config, found {}", where_,
                 object.type_name());
  }

  const json* find(const char* name) const {
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  std::optional<int64_t> size(const char* name) const {
    const json* value = find(name);
    if (!value) return std::nullopt;
    // Token ids and row counts are 32-bit in the operators.
    constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
    if (!value->is_number_integer() || value->get<double>() < 1 || value->get<double>() > kMax)
      refuse(name, *value, fmt::format("an integer from 1 to {}", kMax));
    return value->get<int64_t>();
  }

  int64_t required_size(const char* name) const {
    const auto value = size(name);
    if (!value)
      fail_usage("{}: {} is missing; the shape of a model has no default value", where_, name);
    return *value;
  }

  std::optional<double> number(const char* name) const {
    const json* value = find(name);
    if (!value) return std::nullopt;
    if (!value->is_number() || !std::isfinite(value->get<double>()))
      refuse(name, *value, "a number");
    return value->get<double>();
  }

  double positive(const char* name, double otherwise) const {
    const double value = number(name).value_or(otherwise);
    if (value <= 0) refuse(name, value, "a number above 0");
    return value;
  }

  bool flag(const char* name, bool otherwise) const {
    const json* value = find(name);
    if (value && !value->is_boolean()) refuse(name, *value, "true or false");
    return value ? value->get<bool>() : otherwise;
  }

  // Absent is fine; any other value than `supported` is not.
  void only(const char* name, const json& supported) const {
    const json* value = find(name);
    if (value && *value != supported) refuse(name, *value, supported.dump());
  }

  [[noreturn]] void refuse(const char* name, const json& found,
                           const std::string& supported) const {
    fail_usage("{}: {} = {} is not supported; supported: {}", where_, name, found.dump(),
               supported);
  }

  const std::string& where() const { return where_; }

 private:
  const json& object_;
  std::string where_;
};

// transformers 4 writes rope_theta at top level, transformers 5 in rope_parameters; a few files
// have it in rope_scaling. All that are present have to agree.
double read_rope_theta(const Fields& top) {
  std::optional<double> theta;
  std::string found_in;
  const auto take = [&](const Fields& fields, const std::string& name) {
    const auto value = fields.number("rope_theta");
    if (!value) return;
    if (*value <= 1) fields.refuse("rope_theta", *value, "a number above 1");
    if (theta && *theta != *value)
      fail_usage("{}: {} = {} and {} = {} contradict each other; keep one", top.where(), found_in,
                 *theta, name, *value);
    theta = value;
    found_in = name;
  };
  take(top, "rope_theta");
  top.only("partial_rotary_factor", 1.0);
  for (const char* group : {"rope_parameters", "rope_scaling"}) {
    const json* object = top.find(group);
    if (!object) continue;
    const Fields fields(*object, fmt::format("{}: {}", top.where(), group));
    fields.only("rope_type", "default");
    fields.only("type", "default");
    fields.only("partial_rotary_factor", 1.0);
    fields.only("factor", 1.0);
    take(fields, fmt::format("{}.rope_theta", group));
  }
  if (!theta)
    fail_usage(
        "{}: rope_theta is missing (looked at top level, in rope_parameters and in rope_scaling); "
        "Qwen3 models use 1000000, but no value is assumed",
        top.where());
  return *theta;
}

void refuse_other_architectures(const Fields& fields) {
  fields.only("model_type", "qwen3");
  if (const json* names = fields.find("architectures")) {
    const json supported = json::array({"Qwen3ForCausalLM"});
    if (*names != supported && *names != json::array({"Qwen3Model"}))
      fields.refuse("architectures", *names, supported.dump());
  }
  fields.only("hidden_act", "silu");
  fields.only("attention_bias", false);
  fields.only("attention_dropout", 0.0);
  fields.only("use_sliding_window", false);  // sliding_window alone has no effect in transformers
  if (const json* method = fields.find("quantization_config"))
    fields.refuse("quantization_config", *method, "none (weights in f32, bf16 or fp16)");
}

void check_layer_types(const Fields& fields, int64_t num_hidden_layers) {
  const json* types = fields.find("layer_types");
  if (!types) return;
  if (!types->is_array() || static_cast<int64_t>(types->size()) != num_hidden_layers)
    fields.refuse("layer_types", *types,
                  fmt::format("a list of num_hidden_layers = {} names", num_hidden_layers));
  for (size_t l = 0; l < types->size(); ++l)
    if ((*types)[l] != "full_attention")
      fields.refuse(fmt::format("layer_types[{}]", l).c_str(), (*types)[l], "\"full_attention\"");
}

// Every number of elements, bytes and FLOPs then fits into 64 bits, and the table of parameters
// into memory.
void check_size(const Fields& fields, const Qwen3Config& c) {
  constexpr int64_t kMaxLayers = 1 << 14;
  constexpr double kMaxParameters = 1e15;
  if (c.num_hidden_layers > kMaxLayers)
    fields.refuse("num_hidden_layers", c.num_hidden_layers, fmt::format("at most {}", kMaxLayers));
  const double C = static_cast<double>(c.hidden_size), D = static_cast<double>(c.head_dim);
  const double heads = static_cast<double>(c.num_attention_heads + c.num_key_value_heads);
  const double layer = C * (2 * heads * D + 3 * static_cast<double>(c.intermediate_size));
  const double all =
      static_cast<double>(c.num_hidden_layers) * layer + 2 * C * static_cast<double>(c.vocab_size);
  if (all > kMaxParameters)
    fail_usage("{}: a model of {:.1e} parameters, supported: at most {:.0e}", fields.where(), all,
               kMaxParameters);
}

void check_heads(const Fields& fields, const Qwen3Config& c) {
  if (c.num_attention_heads % c.num_key_value_heads != 0)
    fields.refuse("num_attention_heads", c.num_attention_heads,
                  fmt::format("a multiple of num_key_value_heads = {}", c.num_key_value_heads));
  if (c.head_dim % 2 != 0)
    fields.refuse("head_dim", c.head_dim, "an even number (RoPE turns pairs of elements)");
}

}  // namespace

Qwen3Config Qwen3Config::from_json(const json& object, const std::string& where) {
  const Fields fields(object, where);
  refuse_other_architectures(fields);
  Qwen3Config c;
  c.vocab_size = fields.required_size("vocab_size");
  c.hidden_size = fields.required_size("hidden_size");
  c.intermediate_size = fields.required_size("intermediate_size");
  c.num_hidden_layers = fields.required_size("num_hidden_layers");
  c.num_attention_heads = fields.required_size("num_attention_heads");
  c.num_key_value_heads = fields.size("num_key_value_heads").value_or(c.num_attention_heads);
  if (const auto head_dim = fields.size("head_dim")) {
    c.head_dim = *head_dim;
  } else {
    if (c.hidden_size % c.num_attention_heads != 0)
      fail_usage(
          "{}: head_dim is missing and hidden_size = {} is not a multiple of num_attention_heads = "
          "{}",
          where, c.hidden_size, c.num_attention_heads);
    c.head_dim = c.hidden_size / c.num_attention_heads;
  }
  c.max_position_embeddings = fields.size("max_position_embeddings").value_or(32768);
  c.rope_theta = read_rope_theta(fields);
  c.rms_norm_eps = fields.positive("rms_norm_eps", 1e-6);
  c.initializer_range = fields.positive("initializer_range", 0.02);
  c.tie_word_embeddings = fields.flag("tie_word_embeddings", false);
  check_layer_types(fields, c.num_hidden_layers);
  check_heads(fields, c);
  check_size(fields, c);
  return c;
}

json Qwen3Config::to_json() const {
  return {{"architectures", {"Qwen3ForCausalLM"}},
          {"model_type", "qwen3"},
          {"vocab_size", vocab_size},
          {"hidden_size", hidden_size},
          {"intermediate_size", intermediate_size},
          {"num_hidden_layers", num_hidden_layers},
          {"num_attention_heads", num_attention_heads},
          {"num_key_value_heads", num_key_value_heads},
          {"head_dim", head_dim},
          {"hidden_act", "silu"},
          {"max_position_embeddings", max_position_embeddings},
          {"initializer_range", initializer_range},
          {"rms_norm_eps", rms_norm_eps},
          {"rope_theta", rope_theta},  // read by transformers 4 and 5
          {"tie_word_embeddings", tie_word_embeddings},
          {"attention_bias", false},
          {"attention_dropout", 0.0},
          {"use_sliding_window", false},
          {"sliding_window", nullptr}};
}

int64_t Qwen3Config::num_parameters() const {
  const int64_t C = hidden_size, F = intermediate_size;
  const int64_t attention = 2 * q_rows() * C + 2 * kv_rows() * C + 2 * head_dim;
  const int64_t layer = attention + 3 * C * F + 2 * C;
  const int64_t embeddings = (tie_word_embeddings ? 1 : 2) * vocab_size * C;
  return embeddings + num_hidden_layers * layer + C;
}

double Qwen3Config::train_flops_per_token(int64_t T) const {
  const double C = static_cast<double>(hidden_size), F = static_cast<double>(intermediate_size);
  const double HD = static_cast<double>(q_rows()), KD = static_cast<double>(kv_rows());
  const double mean_context = (static_cast<double>(T) + 1) / 2;
  const double products = 2 * (C * HD + 2 * C * KD + HD * C + 3 * C * F);
  const double attention = 2 * 2 * HD * mean_context;  // q·kᵀ, then probabilities·v
  const double head = 2 * C * static_cast<double>(vocab_size);
  const double forward = static_cast<double>(num_hidden_layers) * (products + attention) + head;
  return 3 * forward;
}

}  // namespace qshard
