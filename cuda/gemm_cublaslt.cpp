#include "cuda/gemm_cublaslt.h"

#include <cublasLt.h>

#include <array>
#include <map>

#include "cuda/arguments.h"
#include "cuda/check_cuda.h"
#include "device/ops.h"

namespace qshard::cuda {
namespace {

constexpr int64_t kMaxAlignment = 256;

// A row-major matrix is a column-major one transposed, so c[m,n] = a·b is for cuBLASLt
// cᵀ[n,m] = bᵀ·aᵀ with the memory as it is: the operands change places.
struct Operand {
  void* data;
  DType dtype;
  int64_t rows, cols, ld;  // as stored, row-major
  bool transposed;         // enters the product transposed
};
Operand plain(const Tensor& t) { return {t.data, t.dtype, t.rows(), t.cols(), t.ld, false}; }
Operand transposed(const Tensor& t) { return {t.data, t.dtype, t.rows(), t.cols(), t.ld, true}; }

struct Product {
  int64_t m, n, k;
  Operand a, b, c;
  bool accumulate;
};

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::fp16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

// The largest power of two, up to 256, that divides the address.
int64_t alignment_of(const void* data) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
  return std::min(kMaxAlignment, address & -address);
}

// Handles of cuBLASLt with an owner.
struct Deleter {
  void operator()(cublasLtMatmulDesc_t d) const { cublasLtMatmulDescDestroy(d); }
  void operator()(cublasLtMatrixLayout_t l) const { cublasLtMatrixLayoutDestroy(l); }
  void operator()(cublasLtMatmulPreference_t p) const { cublasLtMatmulPreferenceDestroy(p); }
};
using Description = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulDesc_t>, Deleter>;
using Layout = std::unique_ptr<std::remove_pointer_t<cublasLtMatrixLayout_t>, Deleter>;
using Preference = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>, Deleter>;

Layout layout_of(const Operand& x) {
  cublasLtMatrixLayout_t layout = nullptr;
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, cuda_type(x.dtype),
                                          static_cast<uint64_t>(x.cols),
                                          static_cast<uint64_t>(x.rows), std::max(x.ld, x.cols)));
  return Layout(layout);
}

template <typename Value>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         Value value) {
  CUBLAS_CHECK(
      cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value));
}

void expect_output(const char* op, const char* name, const Tensor& t, DType param,
                   const Shape& shape) {
  expect(op, name, t, t.dtype == DType::f32 ? DType::f32 : param, shape);
}

}  // namespace

struct Gemm::Impl {
  struct Plan {
    Description description;
    Layout left, right, result;
    cublasLtMatmulAlgo_t algorithm;
  };
  using Key = std::array<int64_t, 14>;
  static constexpr size_t kMaxPlans = 512;  // a run uses a few dozen

  cublasLtHandle_t handle = nullptr;
  cudaStream_t stream;
  F32Products f32_products;
  Buffer workspace;
  std::map<Key, Plan> plans;

  Impl(Device& device, cudaStream_t s, F32Products products)
      : stream(s),
        f32_products(products),
        workspace(device, DType::u8, {kGpuProductBytes}, Segment::workspace, "cuBLASLt workspace") {
    CUBLAS_CHECK(cublasLtCreate(&handle));
  }
  ~Impl() { cublasLtDestroy(handle); }

  void multiply(const Product& p);
  const Plan& plan(const Product& p);
  Plan make_plan(const Product& p) const;
  cublasLtMatmulAlgo_t choose_algorithm(const Product& p, const Plan& plan) const;
};

Gemm::Gemm(Device& device, cudaStream_t stream, F32Products f32_products)
    : impl_(std::make_unique<Impl>(device, stream, f32_products)) {}
Gemm::~Gemm() = default;

void Gemm::linear(const Tensor& x, const Tensor& w, const Tensor& y) {
  expect_rank("linear", "x", x, 2);
  expect_rank("linear", "w", w, 2);
  const int64_t N = x.rows(), I = x.cols(), O = w.rows();
  expect("linear", "x", x, param_dtype("linear", "x", x), {N, I});
  expect("linear", "w", w, x.dtype, {O, I});
  expect_output("linear", "y", y, x.dtype, {N, O});
  impl_->multiply({N, O, I, plain(x), transposed(w), plain(y), false});
}

void Gemm::linear_dgrad(const Tensor& dy, const Tensor& w, const Tensor& dx, bool accumulate) {
  expect_rank("linear_dgrad", "dy", dy, 2);
  expect_rank("linear_dgrad", "w", w, 2);
  const int64_t N = dy.rows(), O = dy.cols(), I = w.cols();
  expect("linear_dgrad", "dy", dy, param_dtype("linear_dgrad", "dy", dy), {N, O});
  expect("linear_dgrad", "w", w, dy.dtype, {O, I});
  expect_output("linear_dgrad", "dx", dx, dy.dtype, {N, I});
  impl_->multiply({N, I, O, plain(dy), plain(w), plain(dx), accumulate});
}

void Gemm::linear_wgrad(const Tensor& dy, const Tensor& x, const Tensor& dw, bool accumulate) {
  expect_rank("linear_wgrad", "dy", dy, 2);
  expect_rank("linear_wgrad", "x", x, 2);
  const int64_t N = dy.rows(), O = dy.cols(), I = x.cols();
  expect("linear_wgrad", "dy", dy, param_dtype("linear_wgrad", "dy", dy), {N, O});
  expect("linear_wgrad", "x", x, dy.dtype, {N, I});
  expect("linear_wgrad", "dw", dw, DType::f32, {O, I});
  impl_->multiply({O, I, N, transposed(dy), plain(x), plain(dw), accumulate});
}

void Gemm::Impl::multiply(const Product& p) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {  // an empty sum
    const size_t size = dtype_size(p.c.dtype), width = static_cast<size_t>(p.n) * size;
    for (int64_t row = 0; row < p.m && !p.accumulate; ++row)
      CUDA_CHECK(
          cudaMemsetAsync(static_cast<char*>(p.c.data) + row * p.c.ld * static_cast<int64_t>(size),
                          0, width, stream));
    return;
  }
  const Plan& use = plan(p);
  const float alpha = 1, beta = p.accumulate ? 1 : 0;
  CUBLAS_CHECK(cublasLtMatmul(handle, use.description.get(), &alpha, p.b.data, use.left.get(),
                              p.a.data, use.right.get(), &beta, p.c.data, use.result.get(),
                              p.c.data, use.result.get(), &use.algorithm, workspace->data,
                              kGpuProductBytes, stream));
}

// The key is all that the choice of an algorithm depends on.
const Gemm::Impl::Plan& Gemm::Impl::plan(const Product& p) {
  const Key key{p.m,
                p.n,
                p.k,
                p.a.ld,
                p.b.ld,
                p.c.ld,
                p.a.transposed,
                p.b.transposed,
                static_cast<int64_t>(p.a.dtype),
                static_cast<int64_t>(p.c.dtype),
                p.accumulate,
                alignment_of(p.a.data),
                alignment_of(p.b.data),
                alignment_of(p.c.data)};
  if (const auto found = plans.find(key); found != plans.end()) return found->second;
  if (plans.size() >= kMaxPlans) plans.clear();
  return plans.emplace(key, make_plan(p)).first->second;
}

Gemm::Impl::Plan Gemm::Impl::make_plan(const Product& p) const {
  const bool tf32 = p.a.dtype == DType::f32 && f32_products == F32Products::tf32;
  cublasLtMatmulDesc_t description = nullptr;
  CUBLAS_CHECK(cublasLtMatmulDescCreate(
      &description, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F));
  Plan plan{Description(description), layout_of(p.b), layout_of(p.a), layout_of(p.c), {}};
  const cublasOperation_t left = p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t right = p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  CUBLAS_CHECK(
      cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSA, &left, sizeof left));
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSB, &right,
                                              sizeof right));
  plan.algorithm = choose_algorithm(p, plan);
  return plan;
}

cublasLtMatmulAlgo_t Gemm::Impl::choose_algorithm(const Product& p, const Plan& plan) const {
  cublasLtMatmulPreference_t made = nullptr;
  CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&made));
  const Preference preference(made);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
      static_cast<uint64_t>(kGpuProductBytes));
  // Parts of a split sum are added in f32, not in the result's type.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  const auto alignment = [](const Operand& x) {
    return static_cast<uint32_t>(alignment_of(x.data));
  };
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.c));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.c));
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(
      handle, plan.description.get(), plan.left.get(), plan.right.get(), plan.result.get(),
      plan.result.get(), preference.get(), 1, &best, &found));
  QS_CHECK(found == 1, "cuBLASLt has no algorithm for a product {} x {} x {} of {} into {}", p.m,
           p.n, p.k, dtype_name(p.a.dtype), dtype_name(p.c.dtype));
  return best.algo;
}

}  // namespace qshard::cuda
