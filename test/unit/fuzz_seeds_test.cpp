// Replays the seeds of the fuzz targets: good files, damaged ones, and what libFuzzer found.
#include <algorithm>

#include "../fuzz/targets.h"
#include "../test_main.h"
#include "base/config.h"
#include "files.h"
#include "io/safetensors.h"
#include "model/qwen3_config.h"

namespace qshard {
namespace {

// make runs the tests in the root of the repository; the program may also be started elsewhere.
std::filesystem::path seeds_of(const std::string& target) {
  const std::filesystem::path here = std::filesystem::path(__FILE__).parent_path();
  return here / ".." / "fuzz" / "seeds" / target;
}

TEST(FuzzSeeds, EveryTargetRefusesOrReadsItsSeeds) {
  for (const fuzz::NamedTarget& target : fuzz::kTargets) {
    int replayed = 0;
    for (const auto& entry : std::filesystem::directory_iterator(seeds_of(target.name))) {
      const std::string bytes = read_text(entry.path());
      SCOPED_TRACE(entry.path());
      EXPECT_NO_THROW(
          target.run(test_world(), reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
      ++replayed;
    }
    EXPECT_GE(replayed, 5) << target.name;
  }
}

// What libFuzzer found has a message now.
std::string config_error(nlohmann::json change) {
  nlohmann::json config = parse_json(read_text(seeds_of("config") / "good"), "good");
  config.update(change);
  return error_of([&] { Qwen3Config::from_json(config, "config.json"); }, kExitUsage);
}

TEST(FuzzFindings, JsonThatIsTooDeepOrTooLarge) {
  const std::string deep(100000, '[');
  EXPECT_TRUE(has(error_of([&] { parse_json(deep, "a.json"); }, kExitUsage), {"a.json", "deeper"}));
  EXPECT_TRUE(has(error_of([&] { parse_json("[1e999999]", "a.json"); }, kExitUsage),
                  {"a.json", "too large"}));
}

TEST(FuzzFindings, ModelsThatNoMachineHolds) {
  EXPECT_TRUE(has(config_error({{"num_hidden_layers", 2147483647}, {"layer_types", nullptr}}),
                  {"num_hidden_layers = 2147483647"}));
  EXPECT_TRUE(has(config_error({{"vocab_size", 2147483647}, {"hidden_size", 2147483647}}),
                  {"config.json", "parameters", "at most"}));
}

TEST(FuzzFindings, EmptyTensorWithRowsThatOverflow) {
  const std::string seed = seeds_of("safetensors") / "empty-wrapping-rows";
  EXPECT_TRUE(has(error_of([&] { SafetensorsFile file(seed); }), {"larger than any file"}));
}

}  // namespace
}  // namespace qshard
