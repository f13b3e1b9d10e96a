// Helpers of the operator tests: matrices of any dtype with values in double, errors, finite
// differences. Nothing here uses the code under test.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "../test_main.h"

namespace qshard {

using Values = std::vector<double>;

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// To nearest, ties to even, by comparing with both neighbours (x finite).
inline uint16_t bf16_nearest(double x) {
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  const auto below = static_cast<uint16_t>(bits >> 16);  // towards zero
  const auto above = static_cast<uint16_t>(below + 1);
  const double f = static_cast<float>(x);
  const double to_below = std::abs(f - bf16_to_float(below));
  const double to_above = std::abs(bf16_to_float(above) - f);
  if (to_below != to_above) return to_below < to_above ? below : above;
  return below % 2 == 0 ? below : above;
}

// The value of an fp16 pattern by its definition.
inline double fp16_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return mantissa ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// To nearest, ties to even: the magnitude in units of its last place (x finite).
inline uint16_t fp16_nearest(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const int exponent = x == 0 ? -14 : std::max(std::ilogb(x), -14);
  if (exponent > 15) return sign | 0x7c00;
  const double units = std::nearbyint(std::ldexp(std::abs(x), 10 - exponent));
  return static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + static_cast<int>(units)));
}

// x as an element of this dtype holds it.
inline double rounded(DType dtype, double x) {
  if (dtype == DType::bf16) return bf16_to_float(bf16_nearest(x));
  if (dtype == DType::fp16) return fp16_value(fp16_nearest(x));
  return static_cast<float>(x);
}

// A matrix in memory of its own, with `gap` elements between the rows that nobody may touch.
class Matrix {
 public:
  Matrix(DType dtype, int64_t rows, int64_t cols, int64_t gap = 0)
      : dtype_(dtype), rows_(rows), cols_(cols), ld_(cols + gap) {
    bytes_.assign(static_cast<size_t>(rows * ld_) * dtype_size(dtype), kUntouched);
  }
  Matrix(DType dtype, int64_t rows, int64_t cols, const Values& values, int64_t gap = 0)
      : Matrix(dtype, rows, cols, gap) {
    for (int64_t i = 0; i < rows * cols; ++i)
      set(i / cols, i % cols, values[static_cast<size_t>(i)]);
  }
  static Matrix random(DType dtype, int64_t rows, int64_t cols, uint32_t seed, double scale = 1,
                       int64_t gap = 0) {
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal(0, scale);
    Matrix m(dtype, rows, cols, gap);
    for (int64_t i = 0; i < rows * cols; ++i) m.set(i / cols, i % cols, normal(engine));
    return m;
  }

  Tensor tensor() {
    Tensor t(bytes_.data(), dtype_, {rows_, cols_});
    t.ld = ld_;
    return t;
  }
  Tensor vector() { return Tensor(bytes_.data(), dtype_, {rows_ * cols_}); }
  Tensor shaped(Shape shape) { return Tensor(bytes_.data(), dtype_, shape); }

  void set(int64_t row, int64_t col, double x) {
    char* at = element(row, col);
    if (dtype_ == DType::bf16 || dtype_ == DType::fp16) {
      const uint16_t bits = dtype_ == DType::bf16 ? bf16_nearest(x) : fp16_nearest(x);
      std::memcpy(at, &bits, 2);
    } else if (dtype_ == DType::i32) {
      const auto value = static_cast<int32_t>(x);
      std::memcpy(at, &value, 4);
    } else {
      const auto value = static_cast<float>(x);
      std::memcpy(at, &value, 4);
    }
  }
  double get(int64_t row, int64_t col) const {
    const char* at = const_cast<Matrix*>(this)->element(row, col);
    uint16_t half;
    float value;
    std::memcpy(&half, at, 2);
    if (dtype_ == DType::bf16) return bf16_to_float(half);
    if (dtype_ == DType::fp16) return fp16_value(half);
    std::memcpy(&value, at, 4);
    return value;
  }
  Values values() const {
    Values all;
    for (int64_t i = 0; i < rows_ * cols_; ++i) all.push_back(get(i / cols_, i % cols_));
    return all;
  }
  bool gaps_untouched() const {
    const size_t size = dtype_size(dtype_);
    for (int64_t row = 0; row < rows_; ++row)
      for (size_t i = static_cast<size_t>(row * ld_ + cols_) * size;
           i < static_cast<size_t>((row + 1) * ld_) * size; ++i)
        if (bytes_[i] != kUntouched) return false;
    return true;
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  static constexpr char kUntouched = 0x7e;
  char* element(int64_t row, int64_t col) {
    return bytes_.data() + static_cast<size_t>(row * ld_ + col) * dtype_size(dtype_);
  }
  DType dtype_;
  int64_t rows_, cols_, ld_;
  std::vector<char> bytes_;
};

// max |a − b| / max |b|; infinite when a value is not finite where the other is.
inline double error_of(const Values& a, const Values& b) {
  double largest = 0, difference = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    largest = std::max(largest, std::abs(b[i]));
    const double d = std::abs(a.at(i) - b[i]);
    if (!(d <= difference)) difference = std::isfinite(d) ? d : HUGE_VAL;
  }
  return difference == 0 ? 0 : difference / largest;
}

// Relative error of one rounding to this dtype, with room for f32 sums of a few thousand terms.
// Half a unit in the last place is 2^-9 in bf16 and 2^-12 in fp16.
inline double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 0.005 : dtype == DType::fp16 ? 0.0007 : 2e-6;
}

// ∂f/∂x by central differences.
inline Values numeric_gradient(Values x, const std::function<double(const Values&)>& f) {
  constexpr double h = 1e-5;
  Values gradient;
  for (double& element : x) {
    const double at = element;
    element = at + h;
    const double above = f(x);
    element = at - h;
    gradient.push_back((above - f(x)) / (2 * h));
    element = at;
  }
  return gradient;
}

inline double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b.at(i);
  return sum;
}

inline Values sum_of(Values a, const Values& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b.at(i);
  return a;
}

inline Ops& test_ops() { return *test_backend().ops; }

}  // namespace qshard
