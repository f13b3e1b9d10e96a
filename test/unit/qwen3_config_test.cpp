#include "model/qwen3_config.h"

#include "base/config.h"
#include "files.h"
#include "train/walkthrough.h"

namespace qshard {
namespace {

using nlohmann::json;

json tiny() {
  return {{"model_type", "qwen3"},    {"vocab_size", 515},      {"hidden_size", 64},
          {"intermediate_size", 96},  {"num_hidden_layers", 2}, {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"head_dim", 32},         {"rope_theta", 10000.0}};
}

Qwen3Config load(const json& object) { return Qwen3Config::from_json(object, "config.json"); }

Qwen3Config with(const std::string& field, const json& value) {
  json object = tiny();
  object[field] = value;
  return load(object);
}

// Every refusal names the file, the field, the value found and what is supported.
void expect_refused(const std::string& field, const json& value, const std::string& supported) {
  const std::string message = error_of([&] { with(field, value); }, kExitUsage);
  EXPECT_TRUE(has(message, {"config.json: ", field, value.dump(), supported}));
}

struct Preset {
  const char* name;
  int64_t V, C, F, L, H, K, D;
  bool tied;
  int64_t parameters;  // added up by hand from the table of a layer's parameters
};

const Preset kPresets[] = {
    {"walkthrough-layer", 512, 512, 1024, 1, 8, 4, 64, true, 2'623'104},
    {"small30m", 8192, 512, 1536, 8, 8, 4, 64, true, 29'369'856},
    {"qwen3-0.6b", 151936, 1024, 3072, 28, 16, 8, 128, true, 596'049'920},
    {"qwen3-1.7b", 151936, 2048, 6144, 28, 16, 8, 128, true, 1'720'574'976},
    {"qwen3-4b", 151936, 2560, 9728, 36, 32, 8, 128, true, 4'022'468'096},
    {"qwen3-8b", 151936, 4096, 12288, 36, 32, 8, 128, false, 8'190'735'360},
    {"qwen3-14b", 151936, 5120, 17408, 40, 40, 8, 128, false, 14'768'307'200},
    {"qwen3-32b", 151936, 5120, 25600, 64, 64, 8, 128, false, 32'762'123'264},
};

TEST(Qwen3Config, PresetsAreThePublishedModels) {
  for (const Preset& p : kPresets) {
    SCOPED_TRACE(p.name);
    const std::string path = fmt::format("data/configs/{}.json", p.name);
    const Qwen3Config c = Qwen3Config::from_json(parse_json(read_file(path), path), path);
    EXPECT_EQ(c.vocab_size, p.V);
    EXPECT_EQ(c.hidden_size, p.C);
    EXPECT_EQ(c.intermediate_size, p.F);
    EXPECT_EQ(c.num_hidden_layers, p.L);
    EXPECT_EQ(c.num_attention_heads, p.H);
    EXPECT_EQ(c.num_key_value_heads, p.K);
    EXPECT_EQ(c.head_dim, p.D);
    EXPECT_EQ(c.tie_word_embeddings, p.tied);
    EXPECT_EQ(c.rope_theta, 1e6);
    EXPECT_EQ(c.rms_norm_eps, 1e-6);
    EXPECT_EQ(c.num_parameters(), p.parameters);
  }
}

TEST(Qwen3Config, EveryPresetOnDiskIsTested) {
  std::vector<std::string> tested, on_disk;
  for (const Preset& p : kPresets) tested.push_back(p.name);
  for (const auto& entry : std::filesystem::directory_iterator("data/configs")) {
    const json object = parse_json(read_text(entry.path().string()), entry.path().string());
    if (object.contains("vocab_size")) on_disk.push_back(entry.path().stem().string());
  }
  std::sort(tested.begin(), tested.end());
  std::sort(on_disk.begin(), on_disk.end());
  EXPECT_EQ(on_disk, tested);
}

TEST(Qwen3Config, WalkthroughLayerHasTheDesignsTotal) {
  const json object = parse_json(read_file("data/configs/walkthrough-layer.json"), "w");
  const Qwen3Config c = load(object);
  EXPECT_EQ(c.num_parameters() - c.vocab_size * c.hidden_size - c.hidden_size, 2'360'448);
  Qwen3Config told = walkthrough_config();  // of the same layer
  told.num_hidden_layers = c.num_hidden_layers;
  EXPECT_EQ(told.to_json(), c.to_json());
}

// Multiply-adds of one token, matrix by matrix: two FLOPs each, backward twice the forward.
double flops_by_hand(const Preset& p, double T) {
  double macs = 0;
  for (int64_t l = 0; l < p.L; ++l) {
    macs += static_cast<double>(p.C * p.H * p.D);      // q_proj
    macs += static_cast<double>(p.C * p.K * p.D) * 2;  // k_proj, v_proj
    macs += static_cast<double>(p.H * p.D * p.C);      // o_proj
    macs += static_cast<double>(p.C * p.F) * 3;        // gate_proj, up_proj, down_proj
    double pairs = 0;                                  // query–key pairs of a sequence
    for (int64_t t = 0; t < static_cast<int64_t>(T); ++t) pairs += static_cast<double>(t + 1);
    macs += 2 * pairs / T * static_cast<double>(p.H * p.D);  // scores and values
  }
  macs += static_cast<double>(p.V * p.C);  // head
  return 6 * macs;
}

TEST(Qwen3Config, TrainFlopsMatchCountingByHand) {
  for (const Preset& p : kPresets) {
    const std::string path = fmt::format("data/configs/{}.json", p.name);
    const Qwen3Config c = Qwen3Config::from_json(parse_json(read_file(path), path), path);
    for (int64_t T : {1, 8, 4096, 32768})
      EXPECT_DOUBLE_EQ(c.train_flops_per_token(T), flops_by_hand(p, static_cast<double>(T)))
          << p.name << " T " << T;
  }
  // heads · head_dim = 2 × hidden
  const Preset wide = {"", 515, 64, 96, 2, 4, 2, 32, false, 0};
  EXPECT_DOUBLE_EQ(load(tiny()).train_flops_per_token(32), flops_by_hand(wide, 32));
}

TEST(Qwen3Config, TyingDoesNotChangeTheFlops) {
  EXPECT_EQ(with("tie_word_embeddings", true).train_flops_per_token(64),
            with("tie_word_embeddings", false).train_flops_per_token(64));
  EXPECT_EQ(with("tie_word_embeddings", false).num_parameters() -
                with("tie_word_embeddings", true).num_parameters(),
            515 * 64);
}

TEST(Qwen3Config, HeadDim) {
  EXPECT_EQ(load(tiny()).head_dim, 32);
  EXPECT_EQ(load(tiny()).q_rows(), 128);
  EXPECT_EQ(load(tiny()).kv_rows(), 64);
  json object = tiny();
  object.erase("head_dim");
  EXPECT_EQ(load(object).head_dim, 16);
  object["head_dim"] = nullptr;
  EXPECT_EQ(load(object).head_dim, 16);
  object["num_attention_heads"] = 6;
  EXPECT_TRUE(has(error_of([&] { load(object); }, kExitUsage), {"head_dim", "64", "6"}));
  expect_refused("head_dim", 15, "even");
}

TEST(Qwen3Config, Defaults) {
  json object = tiny();
  object.erase("num_key_value_heads");
  const Qwen3Config c = load(object);
  EXPECT_EQ(c.num_key_value_heads, 4);
  EXPECT_EQ(c.rms_norm_eps, 1e-6);
  EXPECT_EQ(c.initializer_range, 0.02);
  EXPECT_EQ(c.max_position_embeddings, 32768);
  EXPECT_FALSE(c.tie_word_embeddings);
}

TEST(Qwen3Config, ShapeFieldsHaveNoDefaults) {
  for (const char* field : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                            "num_attention_heads"}) {
    json object = tiny();
    object.erase(field);
    EXPECT_TRUE(
        has(error_of([&] { load(object); }, kExitUsage), {"config.json", field, "missing"}));
    for (const json& bad : {json(0), json(-1), json(1.5), json("64"), json(true), json(5000000000)})
      expect_refused(field, bad, "an integer from 1 to 2147483647");
  }
  EXPECT_TRUE(has(error_of([] { load(json::array()); }, kExitUsage), {"config.json", "array"}));
}

TEST(Qwen3Config, RopeThetaOfBothForms) {
  json object = tiny();
  object.erase("rope_theta");
  EXPECT_TRUE(has(error_of([&] { load(object); }, kExitUsage), {"rope_theta is missing"}));
  object["rope_parameters"] = {{"rope_theta", 5000000}, {"rope_type", "default"}};
  EXPECT_EQ(load(object).rope_theta, 5e6);
  object["rope_theta"] = 5e6;  // the same value twice
  EXPECT_EQ(load(object).rope_theta, 5e6);
  object["rope_theta"] = 1e6;
  EXPECT_TRUE(has(error_of([&] { load(object); }, kExitUsage),
                  {"rope_theta = 1000000", "rope_parameters.rope_theta = 5000000"}));
  object.erase("rope_parameters");
  object["rope_scaling"] = {{"rope_theta", 2e6}};
  EXPECT_TRUE(
      has(error_of([&] { load(object); }, kExitUsage), {"rope_scaling.rope_theta = 2000000"}));
  object.erase("rope_theta");
  EXPECT_EQ(load(object).rope_theta, 2e6);
  EXPECT_EQ(with("rope_scaling", nullptr).rope_theta, 1e4);
  expect_refused("rope_theta", 0, "above 1");
}

TEST(Qwen3Config, OtherRopeTypesAreRefused) {
  const auto refusal = [](const char* field, const json& value) {
    return error_of([&] { with(field, value); }, kExitUsage);
  };
  EXPECT_TRUE(has(refusal("rope_scaling", {{"rope_type", "yarn"}, {"factor", 4}}),
                  {"rope_scaling: rope_type = \"yarn\"", "\"default\""}));
  EXPECT_TRUE(has(refusal("rope_scaling", {{"type", "linear"}, {"factor", 2}}),
                  {"rope_scaling: type = \"linear\"", "\"default\""}));
  EXPECT_TRUE(has(refusal("rope_parameters", {{"rope_type", "llama3"}}),
                  {"rope_parameters: rope_type = \"llama3\"", "\"default\""}));
  EXPECT_TRUE(has(refusal("rope_parameters", {{"rope_type", "default"}, {"factor", 2}}),
                  {"rope_parameters: factor = 2"}));
  expect_refused("partial_rotary_factor", 0.5, "1.0");
}

TEST(Qwen3Config, SlidingWindow) {
  EXPECT_NO_THROW(with("sliding_window", nullptr));
  json object = tiny();
  object["sliding_window"] = 2048;
  object["use_sliding_window"] = false;
  object["max_window_layers"] = 1;
  EXPECT_NO_THROW(load(object));
  expect_refused("use_sliding_window", true, "false");
  EXPECT_NO_THROW(with("layer_types", {"full_attention", "full_attention"}));
  expect_refused("layer_types", {"full_attention"}, "num_hidden_layers = 2");
  EXPECT_TRUE(has(error_of(
                      [] {
                        with("layer_types", {"full_attention", "sliding_attention"});
                      },
                      kExitUsage),
                  {"layer_types[1]", "\"sliding_attention\"", "full_attention"}));
}

TEST(Qwen3Config, WhatIsNotDoneIsRefusedByName) {
  expect_refused("model_type", "qwen2", "\"qwen3\"");
  expect_refused("model_type", "qwen3_moe", "\"qwen3\"");
  expect_refused("architectures", {"LlamaForCausalLM"}, "Qwen3ForCausalLM");
  expect_refused("attention_bias", true, "false");
  expect_refused("hidden_act", "gelu", "\"silu\"");
  expect_refused("attention_dropout", 0.1, "0.0");
  expect_refused("quantization_config", {{"bits", 4}}, "none");
  expect_refused("num_key_value_heads", 3, "3");
  expect_refused("rms_norm_eps", 0, "above 0");
  expect_refused("rms_norm_eps", "1e-6", "a number");
  expect_refused("tie_word_embeddings", 1, "true or false");
  EXPECT_NO_THROW(with("attention_dropout", 0));
  EXPECT_NO_THROW(with("hidden_act", "silu"));
}

TEST(Qwen3Config, WritesWhatItReads) {
  const Qwen3Config c = with("rms_norm_eps", 1e-5);
  const json written = c.to_json();
  EXPECT_EQ(load(written).to_json(), written);
  EXPECT_EQ(written["model_type"], "qwen3");
  EXPECT_EQ(written["head_dim"], 32);
  EXPECT_EQ(written["rms_norm_eps"], 1e-5);
}

}  // namespace
}  // namespace qshard
