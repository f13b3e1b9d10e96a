#include "base/config.h"

#include "files.h"

namespace qshard {
namespace {

using nlohmann::json;

struct Settings {
  int steps = 10;
  int64_t tokens = 5;
  uint64_t seed = 1;
  double lr = 1e-3;
  float clip = 1;
  bool tie = false;
  std::string dtype = "bf16", path;
};

struct ConfigTest : testing::Test {
  ConfigTest() {
    table.section("train", "the run");
    table.section("optim", "AdamW");
    table.add("train.steps", s.steps, "steps of the run").at_least(1).at_most(1000).unit("steps");
    table.add("train.tokens", s.tokens, "tokens to read");
    table.add("train.seed", s.seed, "seed of all random numbers");
    table.add("train.tie", s.tie, "tie the head");
    table.add("train.dtype", s.dtype, "dtype of products").one_of({"f32", "bf16"});
    table.add("train.path", s.path, "where");
    table.add("optim.lr", s.lr, "peak learning rate").at_least(0);
    table.add("optim.clip", s.clip, "largest gradient norm");
  }
  void load(const std::string& text) { table.load_json(parse_json(text, "run.json"), "run.json"); }
  std::string usage_error(const std::string& text) {
    return error_of([&] { load(text); }, kExitUsage);
  }
  void parse(std::vector<std::string> arguments) {
    CLI::App app;
    table.add_to(app);
    std::reverse(arguments.begin(), arguments.end());
    app.parse(std::move(arguments));
  }
  std::string command_error(const std::vector<std::string>& arguments) {
    return error_of([&] { parse(arguments); }, kExitUsage);
  }
  Settings s;
  OptionTable table;
};

TEST_F(ConfigTest, NestedAndDottedKeys) {
  load(R"({"train": {"steps": 7, "tie": true, "dtype": "f32"}, "optim.lr": 2, "train.path": "x"})");
  EXPECT_EQ(s.steps, 7);
  EXPECT_TRUE(s.tie);
  EXPECT_EQ(s.dtype, "f32");
  EXPECT_EQ(s.lr, 2.0);
  EXPECT_EQ(s.path, "x");
  EXPECT_EQ(s.tokens, 5);
}

TEST_F(ConfigTest, CommandLineWinsInEitherOrder) {
  table.set_text("train.steps", "20", "command line");
  load(R"({"train": {"steps": 7, "tokens": 8}})");
  EXPECT_EQ(s.steps, 20);
  EXPECT_EQ(s.tokens, 8);
  table.set_text("train.tokens", "9", "command line");
  EXPECT_EQ(s.tokens, 9);
  // What the file says is still checked.
  EXPECT_TRUE(has(usage_error(R"({"train": {"steps": 0}})"), {"run.json", "train.steps = 0"}));
  EXPECT_EQ(s.steps, 20);
}

TEST_F(ConfigTest, UnknownKeySuggestsTheNearest) {
  EXPECT_TRUE(has(usage_error(R"({"train": {"setps": 7}})"),
                  {"run.json: unknown option train.setps", "did you mean train.steps?"}));
  EXPECT_TRUE(has(usage_error(R"({"lr": 7})"), {"unknown option lr", "did you mean optim.lr?"}));
  EXPECT_TRUE(
      has(usage_error(R"({"model": {"layers": 7}})"), {"unknown option model.layers", "--help"}));
}

TEST_F(ConfigTest, WrongTypesAndRangesAreRefused) {
  EXPECT_TRUE(has(usage_error(R"({"train": {"steps": "7"}})"),
                  {"train.steps = \"7\"", "an integer from 1 to 1000", "steps"}));
  EXPECT_TRUE(has(usage_error(R"({"train": {"steps": 1001}})"), {"train.steps = 1001"}));
  EXPECT_TRUE(has(usage_error(R"({"train": {"steps": 1.5}})"), {"train.steps = 1.5"}));
  EXPECT_TRUE(has(usage_error(R"({"train": {"steps": true}})"), {"train.steps = true"}));
  EXPECT_TRUE(has(usage_error(R"({"train": {"tie": 1}})"), {"train.tie = 1", "true or false"}));
  EXPECT_TRUE(has(usage_error(R"({"train": {"dtype": "f64"}})"), {"\"f64\"", "f32, bf16"}));
  EXPECT_TRUE(has(usage_error(R"({"train": {"path": 3}})"), {"train.path = 3", "a text"}));
  EXPECT_TRUE(has(usage_error(R"({"train": {"path": null}})"), {"train.path = null"}));
  EXPECT_TRUE(has(usage_error(R"({"optim": {"lr": -1}})"), {"optim.lr = -1", "at least 0"}));
  EXPECT_TRUE(has(usage_error(R"({"optim": {"clip": 1e300}})"), {"optim.clip = 1e+300"}));
  EXPECT_TRUE(has(usage_error(R"({"train": 3})"), {"unknown option train"}));
  EXPECT_TRUE(has(usage_error("[1]"), {"expected a JSON object", "array"}));
  EXPECT_EQ(s.steps, 10);
  EXPECT_EQ(s.clip, 1.0f);
}

TEST_F(ConfigTest, IntegersKeepAllTheirBits) {
  load(R"({"train": {"seed": 18446744073709551615, "tokens": 1e9}})");
  EXPECT_EQ(s.seed, 18446744073709551615u);
  EXPECT_EQ(s.tokens, 1000000000);
  table.set_text("train.seed", "9223372036854775809", "command line");
  EXPECT_EQ(s.seed, 9223372036854775809u);
  table.set_text("train.tokens", "-9007199254740993", "command line");  // −(2^53 + 1)
  EXPECT_EQ(s.tokens, -9007199254740993);
  EXPECT_TRUE(has(usage_error(R"({"train": {"seed": -1}})"), {"train.seed = -1"}));
  EXPECT_TRUE(has(usage_error(R"({"train": {"tokens": 18446744073709551615}})"), {"train.tokens"}));
}

TEST_F(ConfigTest, TheSameKeyTwiceIsRefused) {
  EXPECT_TRUE(has(usage_error(R"({"train": {"steps": 3}, "train.steps": 4})"),
                  {"train.steps is given twice"}));
  EXPECT_TRUE(
      has(usage_error(R"({"train": {"steps": 3, "steps": 4}})"), {"\"steps\" appears twice"}));
}

TEST_F(ConfigTest, CommandLineOptions) {
  parse({"--train.steps", "1e2", "--train.tie", "true", "--optim.lr=0.5", "--train.tokens", "-3"});
  EXPECT_EQ(s.steps, 100);
  EXPECT_TRUE(s.tie);
  EXPECT_EQ(s.lr, 0.5);
  EXPECT_EQ(s.tokens, -3);
}

TEST_F(ConfigTest, CommandLineErrors) {
  EXPECT_TRUE(has(command_error({"--train.stesp", "3"}),
                  {"unknown option --train.stesp", "did you mean --train.steps?"}));
  EXPECT_TRUE(has(command_error({"--lr=3"}), {"unknown option --lr;", "--optim.lr"}));
  EXPECT_TRUE(has(command_error({"train.steps", "3"}), {"unexpected argument 'train.steps'"}));
  EXPECT_TRUE(has(command_error({"--train.tie", "1"}),
                  {"command line: train.tie = \"1\"", "true or false"}));
  EXPECT_TRUE(has(command_error({"--train.tie", "yes"}), {"train.tie = \"yes\""}));
  EXPECT_TRUE(has(command_error({"--train.steps", "3x"}), {"train.steps = \"3x\""}));
  EXPECT_TRUE(has(command_error({"--optim.lr", "nan"}), {"optim.lr = \"nan\""}));
}

TEST_F(ConfigTest, HelpNamesTypeUnitDefaultAndChoices) {
  CLI::App app;
  table.add_to(app);
  EXPECT_TRUE(has(app.help(), {"train: the run", "optim: AdamW", "--train.steps INT=10",
                               "from 1 to 1000", "[steps]", "f32, bf16", "true|false"}));
}

TEST_F(ConfigTest, JsonOfTheRunLoadsAgain) {
  load(R"({"train": {"steps": 7, "seed": 18446744073709551615}, "optim": {"lr": 0.1}})");
  const json written = table.to_json();
  EXPECT_EQ(written["train"]["steps"], 7);
  EXPECT_EQ(written["optim"]["clip"], 1.0);
  ConfigTest_JsonOfTheRunLoadsAgain_Test other;
  other.load(written.dump());
  EXPECT_EQ(other.table.to_json(), written);
  EXPECT_EQ(other.s.seed, s.seed);
}

TEST_F(ConfigTest, TableMarksChangedValues) {
  load(R"({"train": {"steps": 7, "tokens": 5}})");
  const std::string text = table.to_table();
  EXPECT_TRUE(has(text, {"train       *steps 7", " · tokens 5", "\noptim       lr"})) << text;
  EXPECT_EQ(text.find("*tokens"), std::string::npos);
}

TEST_F(ConfigTest, MistakesOfTheProgrammerAreCaught) {
  error_of([&] { table.add("train.steps", s.steps, "again"); });
  error_of([&] { table.add("data.path", s.path, "no such section"); });
}

TEST(ParseJson, CommentsAndPlaceOfAnError) {
  EXPECT_EQ(parse_json("{\"a\": 1, // one\n /* two */ \"b\": 2}", "x")["b"], 2);
  const std::string error =
      error_of([] { parse_json("{\n  \"a\": 1,\n  \"b\" 2\n}", "run.json"); }, kExitUsage);
  EXPECT_TRUE(has(error, {"run.json: line 3, column 7: not valid JSON"}));
  EXPECT_TRUE(has(error_of([] { parse_json("", "empty.json"); }, kExitUsage),
                  {"empty.json: line 1, column 1"}));
  EXPECT_TRUE(has(error_of([] { parse_json("{\"a\": 1}\n}", "run.json"); }, kExitUsage),
                  {"line 2, column 1"}));
}

TEST(ReadFile, WholeFileOrTheReason) {
  const TempDir dir;
  const std::string text(200000, 'x');
  write_text(dir / "a", text);
  EXPECT_EQ(read_file(dir / "a"), text);
  EXPECT_TRUE(has(error_of([&] { read_file(dir / "b"); }), {dir / "b", "No such file"}));
  EXPECT_TRUE(has(error_of([&] { read_file(dir / "."); }), {"Is a directory"}));
}

TEST(NearestName, OnlyWhatIsNear) {
  EXPECT_EQ(nearest_name("optim.betas1", {"optim.beta1", "optim.beta2"}), "optim.beta1");
  EXPECT_EQ(nearest_name("quite.different", {"optim.beta1", "optim.beta2"}), "");
}

}  // namespace
}  // namespace qshard
