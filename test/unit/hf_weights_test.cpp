#include "io/hf_weights.h"

#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

#include "../test_main.h"
#include "files.h"

namespace qshard {
namespace {

using nlohmann::json;

// A tied model of two parameters beside the embedding.
const std::vector<ParamSpec> kTied = {{kEmbedding, {3, 2}},
                                      {"model.norm.weight", {2}},
                                      {"model.layers.0.self_attn.q_norm.weight", {4}}};

std::vector<ParamSpec> untied() {
  std::vector<ParamSpec> params = kTied;
  params.push_back({kHead, {3, 2}});
  return params;
}

struct HfWeightsTest : testing::Test {
  // Values 0, 1, 2, … + add.
  void save(const std::string& file, const std::vector<ParamSpec>& params, float add = 0) {
    std::vector<std::vector<float>> values;
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const ParamSpec& p : params) {
      values.emplace_back(p.shape.numel());
      for (size_t i = 0; i < values.back().size(); ++i)
        values.back()[i] = static_cast<float>(i) + add;
      tensors.emplace_back(p.name, Tensor::of(values.back().data(), p.shape));
    }
    write_safetensors(dir / file, tensors);
  }
  void save_index(const json& weight_map) {
    write_text(dir / kHfIndex,
               json{{"metadata", {{"total_size", 1}}}, {"weight_map", weight_map}}.dump());
  }
  // Two shards and their index.
  void save_shards() {
    save("a.safetensors", {kTied[0]});
    save("b.safetensors", {kTied[1], kTied[2]});
    save_index(good_map);
  }
  std::string open_error() {
    return error_of([&] { HfWeights(dir / ""); });
  }
  std::string require_error(const std::vector<ParamSpec>& params) {
    return error_of([&] { HfWeights(dir / "").require(params); });
  }
  std::vector<std::string> tied_warnings() {
    std::vector<std::string> warnings;
    warn_of_tied_head(test_world(), HfWeights(dir / ""),
                      [&](const std::string& text) { warnings.push_back(text); });
    return warnings;
  }
  TempDir dir;
  const json good_map = {{kTied[0].name, "a.safetensors"},
                         {kTied[1].name, "b.safetensors"},
                         {kTied[2].name, "b.safetensors"}};
};

TEST_F(HfWeightsTest, OneFile) {
  save(kHfWeights, kTied);
  const HfWeights weights(dir / "");
  EXPECT_NO_THROW(weights.require(kTied));
  EXPECT_EQ(weights.names().size(), 3u);
  EXPECT_EQ(weights.shape(kEmbedding), (Shape{3, 2}));
  float row[2];
  weights.read_f32(kEmbedding, 4, 2, row);
  EXPECT_EQ(row[0], 4.0f);
  EXPECT_EQ(row[1], 5.0f);
}

TEST_F(HfWeightsTest, Shards) {
  save_shards();
  const HfWeights weights(dir / "");
  EXPECT_NO_THROW(weights.require(kTied));
  float value;
  weights.read_f32("model.norm.weight", 1, 1, &value);
  EXPECT_EQ(value, 1.0f);
  weights.read_f32(kEmbedding, 5, 1, &value);
  EXPECT_EQ(value, 5.0f);
}

TEST_F(HfWeightsTest, FoldersWithoutWeights) {
  EXPECT_TRUE(has(open_error(), {kHfWeights, "No such file", kHfIndex}));
  EXPECT_TRUE(has(error_of([&] { HfWeights(dir / "absent"); }), {"absent", "No such folder"}));
  write_text(dir / "pytorch_model.bin", "x");
  EXPECT_TRUE(has(open_error(), {"pytorch_model.bin", "pickle", "safetensors"}));
  save("model-00001-of-00002.safetensors", kTied);
  EXPECT_TRUE(has(open_error(), {"1 shard(s)", "incomplete download?"}));
}

TEST_F(HfWeightsTest, MissingShard) {
  save_shards();
  std::filesystem::remove(dir / "b.safetensors");
  EXPECT_TRUE(has(open_error(), {kHfIndex, "1 of 2", "b.safetensors", "incomplete download?"}));
}

TEST_F(HfWeightsTest, TruncatedShard) {
  save_shards();
  std::filesystem::resize_file(dir / "b.safetensors",
                               std::filesystem::file_size(dir / "b.safetensors") - 4);
  EXPECT_TRUE(has(open_error(), {"b.safetensors", "expected", "found", "incomplete download?"}));
}

TEST_F(HfWeightsTest, TensorThatTheShardLacks) {
  save_shards();
  json map = good_map;
  map["model.layers.1.mlp.up_proj.weight"] = "a.safetensors";
  save_index(map);
  EXPECT_TRUE(has(open_error(), {"up_proj.weight in a.safetensors"}));
}

TEST_F(HfWeightsTest, TensorThatTheIndexLacks) {
  save_shards();
  json map = good_map;
  map.erase("model.norm.weight");
  save_index(map);
  EXPECT_TRUE(has(open_error(), {"b.safetensors", "model.norm.weight is not in"}));
}

TEST_F(HfWeightsTest, TensorInTwoShards) {
  save_shards();
  save("a.safetensors", {kTied[0], kTied[1]});
  EXPECT_TRUE(has(open_error(), {"a.safetensors", "model.norm.weight belongs into b.safetensors"}));
}

TEST_F(HfWeightsTest, IndexThatIsNone) {
  for (const char* text :
       {"[]", "{}", R"({"weight_map": []})", R"({"weight_map": {}})", R"({"weight_map": {"x": 1}})",
        R"({"weight_map": {"x": "../y"}})", "{"}) {
    write_text(dir / kHfIndex, text);
    EXPECT_TRUE(has(open_error(), {kHfIndex})) << text;
  }
}

TEST_F(HfWeightsTest, MissingTensorIsNamedWithItsShape) {
  save(kHfWeights, {kTied[0], kTied[1]});
  EXPECT_TRUE(has(require_error(kTied), {"q_norm.weight [4]", "missing"}));
  save(kHfWeights, kTied);
  EXPECT_TRUE(has(require_error(untied()), {"lm_head.weight [3, 2]", "missing"}));
}

TEST_F(HfWeightsTest, UnknownTensorIsNamed) {
  std::vector<ParamSpec> more = kTied;
  more.push_back({"model.layers.0.self_attn.q_proj.bias", {4}});
  save(kHfWeights, more);
  EXPECT_TRUE(has(require_error(kTied), {"q_proj.bias", "do not belong"}));
}

TEST_F(HfWeightsTest, BothShapesAreNamed) {
  save(kHfWeights, kTied);
  std::vector<ParamSpec> other = kTied;
  other[2].shape = {8};
  EXPECT_TRUE(has(require_error(other), {kHfWeights, "q_norm", "expected [8]", "found [4]"}));
}

TEST_F(HfWeightsTest, OtherDTypesAreRefused) {
  std::vector<int32_t> ids(4);
  write_safetensors(dir / kHfWeights, {{"w", Tensor::of(ids.data(), {4})}});
  EXPECT_TRUE(has(require_error({{"w", {4}}}), {"w has dtype I32", "BF16"}));
}

TEST_F(HfWeightsTest, HeadOfATiedModel) {
  save(kHfWeights, kTied);
  EXPECT_TRUE(tied_warnings().empty());
  save(kHfWeights, untied());  // equal: both count from 0
  EXPECT_NO_THROW(HfWeights(dir / "").require(kTied));
  EXPECT_TRUE(tied_warnings().empty());

  save("a.safetensors", kTied);
  save("b.safetensors", {{kHead, {3, 2}}}, 0.5f);
  std::filesystem::remove(dir / kHfWeights);
  json map = {{kHead, "b.safetensors"}};
  for (const ParamSpec& p : kTied) map[p.name] = "a.safetensors";
  save_index(map);
  EXPECT_NO_THROW(HfWeights(dir / "").require(kTied));
  const std::vector<std::string> warnings = tied_warnings();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(has(warnings[0], {kHead, kEmbedding, "3 of 3 rows"}));

  save("b.safetensors", {{kHead, {2, 2}}});
  EXPECT_TRUE(has(require_error(kTied), {kHead, "expected [3, 2]", "found [2, 2]"}));
}

TEST_F(HfWeightsTest, WriterRoundsToBf16) {
  const float next = std::bit_cast<float>(0x3f808001u);  // just above the middle of two bf16 values
  std::vector<float> values = {1,
                               std::bit_cast<float>(0x3f808000u),
                               std::bit_cast<float>(0x3f818000u),
                               next,
                               NAN,
                               INFINITY,
                               -0.0f,
                               3.4e38f};
  SafetensorsWriter writer(dir / "a", {{"w", DType::bf16, {8}}});
  writer.append(Tensor::of(values.data(), {8}));
  writer.commit();
  const SafetensorsFile file(dir / "a");
  const uint16_t expected[] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0x7fc0, 0x7f80, 0x8000, 0x7f80};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(file["w"].as<bf16_t>()[i].bits, expected[i]) << i;
}

TEST_F(HfWeightsTest, WriterThatIsNotFinishedLeavesNothing) {
  {
    std::vector<float> values = {1, 2};
    SafetensorsWriter writer(dir / "a", {{"v", DType::f32, {2}}, {"w", DType::f32, {2}}});
    writer.append(Tensor::of(values.data(), {2}));
    EXPECT_TRUE(has(error_of([&] { writer.commit(); }), {"1 of 2"}));
    error_of([&] { writer.append(Tensor::of(values.data(), {1})); });
  }
  EXPECT_TRUE(dir.names().empty());
}

}  // namespace
}  // namespace qshard
