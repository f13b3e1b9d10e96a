// Helpers of the CUDA operators' tests: the CPU backend in f32 is the reference, on the very values
// that the GPU gets (rounded to its dtype first).
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../test_main.h"
#include "cuda/backend_cuda.h"
#include "cuda/ops_cuda.h"

namespace qshard {

using Floats = std::vector<float>;

inline Backend& cuda_backend() {
  static Backend& backend =
      *new Backend(make_cuda_backend(0, 1));  // outlives the runtime's own statics
  return backend;
}
inline cuda::CudaOps& cuda_ops() { return static_cast<cuda::CudaOps&>(*cuda_backend().ops); }
inline Ops& cpu_ops() { return *test_backend().ops; }

// x as it reads back from memory of this dtype.
inline Floats rounded(Floats x, DType dtype) {
  std::vector<uint16_t> bits(x.size());
  const Shape shape{static_cast<int64_t>(x.size())};
  if (dtype == DType::f32 || x.empty()) return x;
  const Tensor floats = Tensor::of(x.data(), shape), halves(bits.data(), dtype, shape);
  cpu_ops().cast(floats, halves);
  cpu_ops().cast(halves, floats);
  return x;
}

// A matrix on the GPU and in f32 on the host. `gap` elements between the rows may not be touched.
class Twin {
 public:
  Twin(DType dtype, int64_t rows, int64_t cols, int64_t gap = 0)
      : Twin(dtype, rows, cols, Floats(), gap) {}
  Twin(DType dtype, int64_t rows, int64_t cols, const Floats& values, int64_t gap = 0)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        ld_(cols + gap),
        host_(values.empty() ? Floats(static_cast<size_t>(rows * cols), std::nanf(""))
                             : rounded(values, dtype)),
        gpu_(*cuda_backend().device, dtype, {rows, ld_}, Segment::workspace, "test") {
    upload(host_);
  }
  static Twin random(DType dtype, int64_t rows, int64_t cols, uint32_t seed, int64_t gap = 0,
                     float scale = 1) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal(0, scale);
    Floats values(static_cast<size_t>(rows * cols));
    for (float& x : values) x = normal(engine);
    return Twin(dtype, rows, cols, values, gap);
  }

  Tensor gpu() const {
    Tensor t(gpu_->data, dtype_, {rows_, cols_});
    t.ld = ld_;
    return t;
  }
  Tensor gpu_vector() const { return Tensor(gpu_->data, dtype_, {rows_ * cols_}); }
  Tensor gpu_shaped(Shape shape) const { return Tensor(gpu_->data, dtype_, shape); }
  Tensor cpu() { return Tensor::of(host_.data(), {rows_, cols_}); }
  Tensor cpu_vector() { return Tensor::of(host_.data(), {rows_ * cols_}); }
  Tensor cpu_shaped(Shape shape) { return Tensor::of(host_.data(), shape); }
  const Floats& host() const { return host_; }

  // What the GPU holds now, as f32; fails the test where a gap was written.
  Floats download() const {
    const std::vector<char> bytes = download_bytes();
    Floats all(bytes.size() / dtype_size(dtype_));
    const Shape shape{static_cast<int64_t>(all.size())};
    cpu_ops().cast(Tensor(const_cast<char*>(bytes.data()), dtype_, shape),
                   Tensor::of(all.data(), shape));
    Floats values;
    for (int64_t row = 0; row < rows_; ++row)
      values.insert(values.end(), all.begin() + row * ld_, all.begin() + row * ld_ + cols_);
    EXPECT_TRUE(gaps_untouched(bytes)) << "written beyond the columns of a view";
    return values;
  }
  std::vector<char> download_bytes() const {
    std::vector<char> bytes(gpu_->bytes());
    cuda_backend().device->copy(bytes.data(), gpu_->data, bytes.size());
    return bytes;
  }

  bool gaps_untouched(const std::vector<char>& bytes) const {
    const auto size = static_cast<int64_t>(dtype_size(dtype_));
    for (int64_t row = 0; row < rows_; ++row)
      for (int64_t i = (row * ld_ + cols_) * size; i < (row + 1) * ld_ * size; ++i)
        if (bytes[static_cast<size_t>(i)] != kUntouched) return false;
    return true;
  }

 private:
  static constexpr char kUntouched = 0x7e;
  void upload(Floats values) {
    std::vector<char> bytes(gpu_->bytes(), kUntouched);
    for (int64_t row = 0; row < rows_ && cols_ > 0; ++row) {
      char* to = bytes.data() + static_cast<size_t>(row * ld_) * dtype_size(dtype_);
      cpu_ops().cast(Tensor::of(values.data() + row * cols_, {cols_}), Tensor(to, dtype_, {cols_}));
    }
    cuda_backend().device->copy(gpu_->data, bytes.data(), bytes.size());
  }
  DType dtype_;
  int64_t rows_, cols_, ld_;
  Floats host_;
  Buffer gpu_;
};

// i32 values on both sides.
class TwinIds {
 public:
  explicit TwinIds(std::vector<int32_t> ids)
      : ids_(std::move(ids)),
        gpu_(*cuda_backend().device, DType::i32, shape(), Segment::workspace, "test ids") {
    cuda_backend().device->copy(gpu_->data, ids_.data(), gpu_->bytes());
  }
  Tensor gpu() const { return gpu_; }
  Tensor cpu() { return Tensor::of(ids_.data(), shape()); }

 private:
  Shape shape() const { return {static_cast<int64_t>(ids_.size())}; }
  std::vector<int32_t> ids_;
  Buffer gpu_;
};

// max |a − b| / max |b|; infinite where only one of two values is finite.
inline double error_of(const Floats& a, const Floats& b) {
  if (a.size() != b.size()) return HUGE_VAL;
  double largest = 0, difference = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    largest = std::max(largest, std::abs(double{b[i]}));
    const double d = std::abs(double{a[i]} - double{b[i]});
    if (!(d <= difference)) difference = std::isfinite(d) ? d : HUGE_VAL;
  }
  return difference == 0 ? 0 : difference / largest;
}

// Of one rounding to the dtype, with room for f32 sums in another order.
inline double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 0.005 : dtype == DType::fp16 ? 0.0007 : 5e-6;
}

// Residual stream and parameters.
inline auto dtype_pairs() {
  using enum DType;
  return testing::Values(std::pair{f32, f32}, std::pair{f32, bf16}, std::pair{bf16, bf16},
                         std::pair{f32, fp16}, std::pair{fp16, fp16});
}

}  // namespace qshard
