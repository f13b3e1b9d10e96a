#include "io/safetensors.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "files.h"

namespace qshard {
namespace {

// A file with this header text and these data bytes.
std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

std::string one_tensor(const std::string& dtype, const std::string& shape, int begin, int end) {
  return fmt::format(R"({{"w":{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}}}})", dtype, shape,
                     begin, end);
}

struct SafetensorsTest : testing::Test {
  std::string open_error(const std::string& content) {
    write_text(dir / "m.safetensors", content);
    const std::string message = error_of([&] { SafetensorsFile(dir / "m.safetensors"); });
    EXPECT_TRUE(has(message, {dir / "m.safetensors"}));
    return message;
  }
  TempDir dir;
};

TEST_F(SafetensorsTest, WritesAndReadsEveryDType) {
  std::vector<float> f = {1, -2, 3, 4, 5, 6};
  std::vector<int32_t> i = {7, -100};
  std::vector<uint8_t> b = {1, 2, 3};
  std::vector<bf16_t> h = {{0x3f80}};
  std::vector<double> d = {0.5};
  write_safetensors(dir / "a", {{"f", Tensor::of(f.data(), {2, 3})},
                                {"d", Tensor::of(d.data(), {1})},
                                {"i", Tensor::of(i.data(), {2})},
                                {"h", Tensor::of(h.data(), {1, 1})},
                                {"b", Tensor::of(b.data(), {3})},
                                {"none", Tensor::of(f.data(), {0, 4})}});
  EXPECT_EQ(dir.names(), std::vector<std::string>{"a"});  // no temporary file is left
  const SafetensorsFile file(dir / "a");
  EXPECT_EQ(file.names(), (std::vector<std::string>{"b", "d", "f", "h", "i", "none"}));
  EXPECT_EQ(file["f"].shape, (Shape{2, 3}));
  EXPECT_EQ(std::memcmp(file["f"].as<float>(), f.data(), 24), 0);
  EXPECT_EQ(file["i"].as<int32_t>()[1], -100);
  EXPECT_EQ(file["b"].as<uint8_t>()[2], 3);
  EXPECT_EQ(file["d"].as<double>()[0], 0.5);
  EXPECT_EQ(file["h"].as<bf16_t>()->bits, 0x3f80);
  EXPECT_EQ(file["none"].numel(), 0);
  EXPECT_TRUE(has(read_text(dir / "a"), {R"("format":"pt")"}));
  EXPECT_TRUE(has(error_of([&] { file["q_norm"]; }), {dir / "a", "q_norm is missing"}));
}

TEST_F(SafetensorsTest, EmptyListIsAFile) {
  write_safetensors(dir / "a", {}, {{"format", "np"}});
  EXPECT_TRUE(SafetensorsFile(dir / "a").names().empty());
  EXPECT_TRUE(has(read_text(dir / "a"), {R"("format":"np")"}));
}

// By the definition of the formats, independent of the reader's bit operations.
double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST_F(SafetensorsTest, EveryHalfBecomesTheSameFloat) {
  std::vector<fp16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<uint16_t>(i);
  write_safetensors(dir / "a", {{"w", Tensor::of(all.data(), {65536})}});
  std::vector<float> out(65536);
  SafetensorsFile(dir / "a").read_f32("w", 0, 65536, out.data());
  for (size_t i = 0; i < all.size(); ++i) {
    const double expected = half_value(all[i].bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(out[i])) << i;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(out[i]),
                std::bit_cast<uint32_t>(static_cast<float>(expected)))
          << i;
    }
  }
}

TEST_F(SafetensorsTest, ReadsRangesAsFloat) {
  std::vector<bf16_t> h = {{0x3f80}, {0xc000}, {0x4040}};  // 1, −2, 3
  std::vector<float> f = {1, 2, 3, 4};
  std::vector<int32_t> i = {1};
  write_safetensors(dir / "a", {{"h", Tensor::of(h.data(), {3})},
                                {"f", Tensor::of(f.data(), {4})},
                                {"i", Tensor::of(i.data(), {1})}});
  const SafetensorsFile file(dir / "a");
  float out[2];
  file.read_f32("h", 1, 2, out);
  EXPECT_EQ(out[0], -2.0f);
  EXPECT_EQ(out[1], 3.0f);
  file.read_f32("f", 2, 2, out);
  EXPECT_EQ(out[0], 3.0f);
  EXPECT_NO_THROW(file.read_f32("f", 4, 0, out));
  error_of([&] { file.read_f32("f", 3, 2, out); });
  EXPECT_TRUE(has(error_of([&] { file.read_f32("i", 0, 1, out); }), {"I32", "F32, BF16 or F16"}));
  // A 2-byte tensor of odd length moves the next one off its alignment: read, but not viewed.
  EXPECT_TRUE(has(error_of([&] { file["f"]; }), {"tensor f", "multiple of 4 bytes"}));
}

TEST_F(SafetensorsTest, UnsupportedDTypesAreCheckedButNotViewed) {
  write_text(dir / "a", file_of(one_tensor("I64", "[1]", 0, 8), std::string(8, 'x')));
  const SafetensorsFile file(dir / "a");
  EXPECT_TRUE(file.contains("w"));
  EXPECT_TRUE(has(error_of([&] { file["w"]; }), {"tensor w", "I64"}));
  EXPECT_TRUE(has(open_error(file_of(one_tensor("I64", "[1]", 0, 4), "xxxx")), {"8 bytes"}));
}

TEST_F(SafetensorsTest, DamagedFiles) {
  const std::string good = file_of(one_tensor("F32", "[2,2]", 0, 16), std::string(16, 0));
  write_text(dir / "good", good);
  EXPECT_NO_THROW(SafetensorsFile(dir / "good"));

  EXPECT_TRUE(has(open_error(""), {"0 bytes", "incomplete download?"}));
  EXPECT_TRUE(has(open_error("1234567"), {"7 bytes", "too short"}));
  EXPECT_TRUE(has(open_error(good.substr(0, good.size() - 10)),
                  {fmt::format("expected {} bytes", good.size()),
                   fmt::format("found {}", good.size() - 10), "incomplete download?"}));
  EXPECT_TRUE(has(open_error(good.substr(0, 20)), {"does not fit into a file of 20 bytes"}));
  EXPECT_TRUE(has(open_error(good + "x"), {fmt::format("found {}", good.size() + 1)}));
  std::string huge = good;
  huge.replace(0, 8, std::string("\0\0\0\0\0\1\0\0", 8));  // 2^40
  EXPECT_TRUE(has(open_error(huge), {"1099511627776", "limit"}));
  EXPECT_TRUE(has(error_of([&] { SafetensorsFile(dir / "absent"); }), {"No such file"}));
}

TEST_F(SafetensorsTest, HeaderThatIsNoJson) {
  write_text(dir / "a", file_of("{\"w\": nonsense}", ""));
  EXPECT_TRUE(has(error_of([&] { SafetensorsFile(dir / "a"); }),
                  {dir / "a", "safetensors header", "not valid JSON"}));
  EXPECT_TRUE(has(open_error(file_of("[1]", "")), {"expected an object, found array"}));
}

TEST_F(SafetensorsTest, EntriesThatCannotBe) {
  const std::string data(16, 0);
  EXPECT_TRUE(has(open_error(file_of(R"({"w":{"dtype":"F32"}})", data)), {"tensor w", "shape"}));
  EXPECT_TRUE(has(open_error(file_of(one_tensor("F31", "[4]", 0, 16), data)),
                  {"tensor w", "unknown dtype \"F31\""}));
  EXPECT_TRUE(has(open_error(file_of(one_tensor("F32", "[5]", 0, 16), data)),
                  {"[5] of F32 takes 20 bytes", "[0, 16]", "16"}));
  EXPECT_TRUE(has(open_error(file_of(one_tensor("F32", "[-4]", 0, 16), data)), {"-4"}));
  EXPECT_TRUE(has(open_error(file_of(one_tensor("F32", "4", 0, 16), data)), {"shape"}));
  EXPECT_TRUE(has(open_error(file_of(one_tensor("F32", "[4]", 4, 20), data)), {"begins at byte"}));
  EXPECT_TRUE(has(open_error(file_of(one_tensor("F32", "[4]", 16, 0), data)), {"16 bytes"}));
  const std::string wraps = "[4294967296,4294967296,4294967296]";
  EXPECT_TRUE(has(open_error(file_of(one_tensor("F32", wraps, 0, 0), data)), {"larger than any"}));
  EXPECT_TRUE(has(open_error(file_of(one_tensor("F32", "[1,1,1,1,4]", 0, 16), data)),
                  {"at most 4 dimensions"}));
}

TEST_F(SafetensorsTest, OverlapGapAndRepetition) {
  const auto two = [](int begin, int end) {
    return fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},)"
                       R"("b":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}}})",
                       end - begin, begin, end);
  };
  EXPECT_TRUE(has(open_error(file_of(two(2, 8), "12345678")), {"tensor b"}));
  EXPECT_TRUE(has(open_error(file_of(two(6, 8), "12345678")), {"tensor b"}));
  const std::string twice = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                            R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  write_text(dir / "t", file_of(twice, "x"));
  EXPECT_TRUE(has(error_of([&] { SafetensorsFile(dir / "t"); }), {"\"a\" appears twice"}));
}

TEST_F(SafetensorsTest, AFailedWriteLeavesNothing) {
  error_of([&] { write_safetensors(dir / "no/such/folder/a", {}); });
  std::vector<float> f = {1};
  const Tensor t = Tensor::of(f.data(), {1});
  EXPECT_TRUE(has(error_of([&] {
                    write_safetensors(dir / "a", {{"w", t}, {"w", t}});
                  }),
                  {"tensor w is given twice"}));
  EXPECT_TRUE(dir.names().empty());
}

}  // namespace
}  // namespace qshard
