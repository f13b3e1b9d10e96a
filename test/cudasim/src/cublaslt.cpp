// The part of cuBLASLt that multiplies matrices: D = alpha·op(A)·op(B) + beta·C, column-major, with
// f32 sums. One algorithm for everything; what it does not support is CUBLAS_STATUS_NOT_SUPPORTED,
// as in the library, or a report where the library would compute something else.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "memory.h"
#include "report.h"
#include "scheduler.h"
#include "stream.h"
#include "tracker.h"

namespace cudasim {
namespace {

constexpr size_t WORKSPACE_BYTES = 4096;  // what the algorithm asks for, if it may

struct MatmulDesc {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  cublasOperation_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N;
};

struct MatrixLayout {
  cudaDataType_t type;
  uint64_t rows, cols;
  int64_t ld;
  int32_t batch = 1;
  int64_t stride = 0;  // elements between the matrices of a batch
};

struct Preference {
  uint64_t workspace = 0;
  uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D, as the library assumes
};

// What the simulator keeps in cublasLtMatmulAlgo_t.
struct Algorithm {
  uint64_t magic;
  uint64_t workspace;
  uint32_t alignment[4];
};
constexpr uint64_t ALGORITHM_MAGIC = 0x6d69736164756373;
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

template <class T, class Handle>
T& object(Handle handle) {
  if (!handle) fail("cuBLASLt: null descriptor");
  return *reinterpret_cast<T*>(handle);
}

size_t element_size(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F:
      return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    default:
      return 0;  // not supported
  }
}

float load(const char* data, int64_t index, cudaDataType_t type) {
  if (type == CUDA_R_32F) {
    float value;
    std::memcpy(&value, data + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + index * 2, 2);
  if (type == CUDA_R_16BF) return std::bit_cast<float>(uint32_t(bits) << 16);
  return __half2float(__half(std::bit_cast<__half_raw>(bits)));
}

void store(char* data, int64_t index, cudaDataType_t type, float value) {
  if (type == CUDA_R_32F) {
    std::memcpy(data + index * 4, &value, 4);
    return;
  }
  const auto bits =
      type == CUDA_R_16BF
          ? std::bit_cast<uint16_t>(static_cast<__nv_bfloat16_raw>(__float2bfloat16(value)))
          : std::bit_cast<uint16_t>(static_cast<__half_raw>(__float2half(value)));
  std::memcpy(data + index * 2, &bits, 2);
}

float round_to_tf32(float value) {  // to 10 bits of mantissa, ties away from zero
  return std::bit_cast<float>((std::bit_cast<uint32_t>(value) + 0x1000) & 0xFFFFE000u);
}

struct Matrix {
  MatrixLayout layout;
  char* data;

  size_t column_bytes() const { return layout.rows * element_size(layout.type); }
  size_t bytes() const {
    const auto columns = static_cast<int64_t>(layout.cols) - 1;
    const auto elements = columns * layout.ld + static_cast<int64_t>(layout.rows) +
                          (layout.batch - 1) * layout.stride;
    return static_cast<size_t>(elements) * element_size(layout.type);
  }
  char* column(int batch, uint64_t col) const {
    return data + (batch * layout.stride + static_cast<int64_t>(col) * layout.ld) *
                      static_cast<int64_t>(element_size(layout.type));
  }
  template <class Visit>
  void for_each_column(Visit visit) const {
    for (int batch = 0; batch < layout.batch; ++batch)
      for (uint64_t col = 0; col < layout.cols; ++col) visit(column(batch, col), column_bytes());
  }
};

struct Matmul {
  MatmulDesc desc;
  Matrix a, b, c, d;
  float alpha, beta;
  void* workspace;
  size_t workspace_bytes;

  void run() const;

 private:
  std::vector<float> operand(const Matrix& matrix, int batch, bool rows_are_k) const;
};

// The operand of one batch as f32, `k` running fastest.
std::vector<float> Matmul::operand(const Matrix& matrix, int batch, bool columns_hold_k) const {
  const auto rows = static_cast<int64_t>(matrix.layout.rows);
  const auto cols = static_cast<int64_t>(matrix.layout.cols);
  const bool tf32 = desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  std::vector<float> values(static_cast<size_t>(rows * cols));
  for (int64_t col = 0; col < cols; ++col) {
    const char* column = matrix.column(batch, static_cast<uint64_t>(col));
    for (int64_t row = 0; row < rows; ++row) {
      const float value = load(column, row, matrix.layout.type);
      const int64_t index = columns_hold_k ? col * rows + row : row * cols + col;
      values[static_cast<size_t>(index)] = tf32 ? round_to_tf32(value) : value;
    }
  }
  return values;
}

void Matmul::run() const {
  a.for_each_column([](char* p, size_t n) { track_operation_read(p, n); });
  b.for_each_column([](char* p, size_t n) { track_operation_read(p, n); });
  if (beta != 0) c.for_each_column([](char* p, size_t n) { track_operation_read(p, n); });
  d.for_each_column([](char* p, size_t n) { track_operation_write(p, n); });
  if (workspace_bytes > 0) {
    track_operation_write(workspace, workspace_bytes);
    std::memset(workspace, 0xA5, workspace_bytes);
  }
  const auto m = static_cast<int64_t>(d.layout.rows), n = static_cast<int64_t>(d.layout.cols);
  const auto k = static_cast<int64_t>(desc.trans_a == CUBLAS_OP_N ? a.layout.cols : a.layout.rows);
  for (int batch = 0; batch < d.layout.batch; ++batch) {
    const std::vector<float> left = operand(a, batch, desc.trans_a == CUBLAS_OP_T);
    const std::vector<float> right = operand(b, batch, desc.trans_b == CUBLAS_OP_N);
    for (int64_t col = 0; col < n; ++col) {
      const float* y = &right[static_cast<size_t>(col * k)];
      char* out = d.column(batch, static_cast<uint64_t>(col));
      const char* in = c.column(batch, static_cast<uint64_t>(col));
      for (int64_t row = 0; row < m; ++row) {
        const float* x = &left[static_cast<size_t>(row * k)];
        float sum = 0;
        for (int64_t i = 0; i < k; ++i) sum += x[i] * y[i];
        const float old = beta == 0 ? 0.0f : beta * load(in, row, c.layout.type);
        store(out, row, d.layout.type, alpha * sum + old);
      }
    }
  }
}

bool supported(const MatmulDesc& desc, const MatrixLayout& a, const MatrixLayout& b,
               const MatrixLayout& c, const MatrixLayout& d) {
  const bool tf32 = desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  if (desc.compute != CUBLAS_COMPUTE_32F && !tf32) return false;
  if (desc.scale != CUDA_R_32F || a.type != b.type || c.type != d.type) return false;
  if (!element_size(a.type) || !element_size(c.type)) return false;
  if (tf32 && a.type != CUDA_R_32F) return false;
  return c.type == a.type || c.type == CUDA_R_32F;
}

// Empty if the shapes fit each other.
std::string shape_problem(const MatmulDesc& desc, const MatrixLayout& a, const MatrixLayout& b,
                          const MatrixLayout& c, const MatrixLayout& d) {
  const bool ta = desc.trans_a != CUBLAS_OP_N, tb = desc.trans_b != CUBLAS_OP_N;
  const uint64_t m = ta ? a.cols : a.rows, k = ta ? a.rows : a.cols;
  if ((tb ? b.cols : b.rows) != k) return "the inner dimensions of A and B differ";
  if (d.rows != m || d.cols != (tb ? b.rows : b.cols)) return "D is not op(A) rows × op(B) columns";
  if (c.rows != d.rows || c.cols != d.cols) return "C and D have different shapes";
  if (a.batch != d.batch || b.batch != d.batch || c.batch != d.batch) return "batch counts differ";
  for (const MatrixLayout* layout : {&a, &b, &c, &d})
    if (layout->ld < static_cast<int64_t>(layout->rows)) return "a leading dimension is too small";
  return "";
}

void check_alignment(const Matrix& matrix, uint32_t alignment, const char* name) {
  if (reinterpret_cast<uintptr_t>(matrix.data) % alignment != 0)
    fail(
        "cublasLtMatmul: %s = %p is not aligned to %u bytes, which the preference of its algorithm "
        "promised (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_%s_BYTES)",
        name, static_cast<void*>(matrix.data), alignment, name);
}

template <class T>
cublasStatus_t set_value(T& target, const void* value, size_t bytes) {
  if (bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&target, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

// Accepts an attribute only with the value that the algorithm has anyway.
template <class T>
cublasStatus_t expect_value(T expected, const void* value, size_t bytes) {
  T given{};
  if (set_value(given, value, bytes) != CUBLAS_STATUS_SUCCESS) return CUBLAS_STATUS_INVALID_VALUE;
  return given == expected ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

}  // namespace
}  // namespace cudasim

using namespace cudasim;

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new char);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<char*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion() { return 130000; }

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "CUBLAS_STATUS of no simulated call";
  }
}

const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(new MatmulDesc{compute, scale});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete reinterpret_cast<MatmulDesc*>(desc);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  auto& desc = object<MatmulDesc>(handle);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return set_value(desc.trans_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return set_value(desc.trans_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return expect_value(CUBLASLT_POINTER_MODE_HOST, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return expect_value(CUBLASLT_EPILOGUE_DEFAULT, value, bytes);
    default:
      fail("cublasLtMatmulDescSetAttribute: attribute %d is not modelled", attribute);
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new MatrixLayout{type, rows, cols, ld});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete reinterpret_cast<MatrixLayout*>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
  auto& layout = object<MatrixLayout>(handle);
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return set_value(layout.batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return set_value(layout.stride, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return expect_value(CUBLASLT_ORDER_COL, value, bytes);
    default:
      fail("cublasLtMatrixLayoutSetAttribute: attribute %d is not modelled", attribute);
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<Preference*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  auto& preference = object<Preference>(handle);
  uint32_t mask = 0;
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return set_value(preference.workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return set_value(preference.alignment[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return set_value(preference.alignment[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return set_value(preference.alignment[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return set_value(preference.alignment[3], value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return set_value(mask, value, bytes);
    default:
      fail("cublasLtMatmulPreferenceSetAttribute: attribute %d is not modelled", attribute);
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference_handle,
                                              int requested,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
  const auto &la = object<MatrixLayout>(a), &lb = object<MatrixLayout>(b),
             &lc = object<MatrixLayout>(c), &ld = object<MatrixLayout>(d);
  const auto& matmul = object<MatmulDesc>(desc);
  const auto& preference = object<Preference>(preference_handle);
  *found = 0;
  if (requested < 1 || !shape_problem(matmul, la, lb, lc, ld).empty())
    return CUBLAS_STATUS_INVALID_VALUE;
  if (!supported(matmul, la, lb, lc, ld)) return CUBLAS_STATUS_NOT_SUPPORTED;
  Algorithm algorithm{
      ALGORITHM_MAGIC, std::min<uint64_t>(preference.workspace, WORKSPACE_BYTES), {}};
  std::copy_n(preference.alignment, 4, algorithm.alignment);
  *results = {};
  std::memcpy(&results->algo, &algorithm, sizeof algorithm);
  results->workspaceSize = algorithm.workspace;
  results->state = CUBLAS_STATUS_SUCCESS;
  results->wavesCount = 1;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  ApiCall call;
  const auto matrix = [](const void* data, cublasLtMatrixLayout_t layout) {
    return Matrix{object<MatrixLayout>(layout), static_cast<char*>(const_cast<void*>(data))};
  };
  Matmul matmul{object<MatmulDesc>(desc),
                matrix(a, a_layout),
                matrix(b, b_layout),
                matrix(c, c_layout),
                matrix(d, d_layout),
                0,
                0,
                workspace,
                0};
  std::memcpy(&matmul.alpha, alpha, sizeof(float));
  std::memcpy(&matmul.beta, beta, sizeof(float));
  const Matrix* matrices[] = {&matmul.a, &matmul.b, &matmul.c, &matmul.d};
  const char* names[] = {"A", "B", "C", "D"};
  const std::string problem = shape_problem(matmul.desc, matmul.a.layout, matmul.b.layout,
                                            matmul.c.layout, matmul.d.layout);
  if (!problem.empty()) fail("cublasLtMatmul: %s", problem.c_str());
  if (!supported(matmul.desc, matmul.a.layout, matmul.b.layout, matmul.c.layout, matmul.d.layout))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (!algo) fail("cublasLtMatmul without an algorithm searches for one at each call: pass one");
  Algorithm algorithm;
  std::memcpy(&algorithm, algo, sizeof algorithm);
  if (algorithm.magic != ALGORITHM_MAGIC) fail("cublasLtMatmul: not an algorithm of the heuristic");
  if (algorithm.workspace > workspace_bytes) return CUBLAS_STATUS_INVALID_VALUE;
  matmul.workspace_bytes = algorithm.workspace;
  for (int i = 0; i < 4; ++i) {
    if (i == 2 && matmul.beta == 0) continue;  // C is not read
    check_alignment(*matrices[i], algorithm.alignment[i], names[i]);
    check_device_range(matrices[i]->data, matrices[i]->bytes(), "cublasLtMatmul");
  }
  if (matmul.workspace_bytes > 0)
    check_device_range(workspace, matmul.workspace_bytes, "cublasLtMatmul, workspace");
  enqueue_body(stream_of(stream, "cublasLtMatmul"), "cublasLtMatmul", [matmul] { matmul.run(); });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
