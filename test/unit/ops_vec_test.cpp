#include "cpu/micro_kernel.h"
#include "ops_reference.h"

namespace qshard {
namespace {

using cpu::Full;
using cpu::kLanes;
using cpu::Part;
using cpu::Vec;

float exp_one(float x) { return cpu::exp(cpu::splat(x))[0]; }

TEST(VecExp, WithinTwoUnitsInTheLastPlace) {
  double worst = 0;
  for (double x = -103; x < 88.7; x += 0.00137) {
    const auto f = static_cast<float>(x);
    const double exact = std::exp(double{f});
    const double ulp = std::max(std::ldexp(1.0, std::ilogb(exact) - 23), 0x1p-149);
    worst = std::max(worst, std::abs(exp_one(f) - exact) / ulp);
  }
  EXPECT_LT(worst, 1.2);
}

TEST(VecExp, Ends) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_one(0.f), 1.f);
  EXPECT_EQ(exp_one(-0.f), 1.f);
  EXPECT_EQ(exp_one(-infinity), 0.f);
  EXPECT_EQ(exp_one(-1e30f), 0.f);
  EXPECT_EQ(exp_one(infinity), infinity);
  EXPECT_EQ(exp_one(89.f), infinity);
  EXPECT_TRUE(std::isfinite(exp_one(88.72f)));
  EXPECT_TRUE(std::isnan(exp_one(std::nanf(""))));
  EXPECT_GT(exp_one(-100.f), 0.f);  // subnormal
}

template <typename Half>
uint16_t narrow_one(float x) {
  Half h;
  cpu::store_one(&h, x);
  return h.bits;
}

template <typename Half>
float widen_one(uint16_t bits) {
  const Half h{bits};
  return cpu::load_one(&h);
}

// The forms of fp16 for CPUs that have no instruction for them.
float widen_by_parts(uint16_t bits) { return cpu::widen_fp16_by_parts(cpu::VecH{} + bits)[0]; }
uint16_t narrow_by_parts(float x) { return cpu::narrow_fp16_by_parts(cpu::splat(x))[0]; }

void check_half(double (*value)(uint16_t), float (*widen)(uint16_t), uint16_t (*narrow)(float)) {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const double exact = value(bits);
    const float wide = widen(bits);
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_TRUE(std::isnan(value(narrow(wide)))) << bits;
      continue;
    }
    ASSERT_EQ(wide, exact) << bits;
    ASSERT_EQ(narrow(wide), bits);
    // Towards the next larger magnitude: below, at and above the middle.
    const double next = value(static_cast<uint16_t>(bits + 1));
    if (!std::isfinite(exact) || !std::isfinite(next) || (bits & 0x7fff) == 0x7fff) continue;
    const auto middle = static_cast<float>((exact + next) / 2);
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(narrow(middle), even) << bits;
    ASSERT_EQ(narrow(std::nextafter(middle, static_cast<float>(exact))), bits);
    ASSERT_EQ(narrow(std::nextafter(middle, static_cast<float>(next))), bits + 1);
  }
}

TEST(VecHalf, Bf16AllPatterns) {
  check_half([](uint16_t bits) { return static_cast<double>(bf16_to_float(bits)); },
             widen_one<bf16_t>, narrow_one<bf16_t>);
}
TEST(VecHalf, Fp16AllPatterns) {
  check_half(fp16_value, widen_one<fp16_t>, narrow_one<fp16_t>);
  check_half(fp16_value, widen_by_parts, narrow_by_parts);
}

TEST(VecHalf, OverflowIsInfinity) {
  for (auto narrow : {narrow_one<fp16_t>, narrow_by_parts}) {
    EXPECT_EQ(narrow(65519.99f), 0x7bff);
    EXPECT_EQ(narrow(65520.f), 0x7c00);
    EXPECT_EQ(narrow(-1e30f), 0xfc00);
    EXPECT_EQ(narrow(1e-30f), 0);
    EXPECT_EQ(narrow(-0.f), 0x8000);
  }
  EXPECT_EQ(narrow_one<bf16_t>(std::numeric_limits<float>::max()), 0x7f80);
}

// A NaN whose payload lies in the bits that are cut off must not become infinity.
TEST(VecHalf, NanStaysNan) {
  const float nan = std::bit_cast<float>(0x7f800001u), negative = std::bit_cast<float>(0xffffffffu);
  for (float x : {nan, negative}) {
    EXPECT_TRUE(std::isnan(bf16_to_float(narrow_one<bf16_t>(x))));
    EXPECT_TRUE(std::isnan(fp16_value(narrow_one<fp16_t>(x))));
    EXPECT_TRUE(std::isnan(fp16_value(narrow_by_parts(x))));
  }
}

TEST(VecLoads, PartLeavesTheRestAlone) {
  std::vector<float> from(kLanes), to(kLanes, -1);
  for (int i = 0; i < kLanes; ++i) from[static_cast<size_t>(i)] = static_cast<float>(i + 1);
  for (int64_t count = 1; count < kLanes; ++count) {
    const Vec v = cpu::load(from.data(), Part{count});
    std::fill(to.begin(), to.end(), -1.f);
    cpu::store(to.data(), v, Part{count});
    for (int64_t i = 0; i < kLanes; ++i) {
      EXPECT_EQ(v[i], i < count ? static_cast<float>(i + 1) : 0.f);
      EXPECT_EQ(to[static_cast<size_t>(i)], i < count ? static_cast<float>(i + 1) : -1.f);
    }
  }
}

TEST(VecLanes, SumMaxAndTranspose) {
  Vec block[kLanes];
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) block[i][j] = static_cast<float>(100 * i + j);
  EXPECT_EQ(cpu::lane_sum(block[1]), 100.f * kLanes + kLanes * (kLanes - 1) / 2);
  EXPECT_EQ(cpu::lane_max(-block[1]), -100.f);
  cpu::transpose_block(block);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) EXPECT_EQ(block[i][j], static_cast<float>(100 * j + i));
}

}  // namespace
}  // namespace qshard
