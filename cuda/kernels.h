// The launchers of all kernels, one for each operator of device/ops.h that is not a matrix product.
// They enqueue on `stream` and return; shapes and types have been checked by ops_cuda.cpp.
#pragma once

#include <cuda_runtime.h>

#include "cuda/view.h"
#include "device/factors.h"

namespace qshard::cuda {

// --- norm_rope.cu
inline constexpr int kMaxNormCols =
    12288;  // rms_norm_grad keeps three f32 of each in shared memory
struct RmsNorm {
  View x, delta;  // [N,C] R; [N,C] P, or empty: no addition
  View w;         // [C] P
  float eps;
  View sum;     // [N,C] R: x + delta (unused without delta)
  View y;       // [N,C] P
  float* rstd;  // [N]
};
void rms_norm(cudaStream_t stream, const RmsNorm& a);
void add(cudaStream_t stream, View x, View delta, View sum);

struct RmsNormGrad {
  View dy, x, w;  // [N,C] f32, [N,C] R, [C] P
  const float* rstd;
  View d_res, d_res_p;  // [N,C] R, [N,C] P or empty
  float* dw;            // [C]
  bool accumulate;
  float* parts;  // scratch of rms_norm_grad_parts(N) · C floats
};
int64_t rms_norm_grad_parts(int64_t N);
void rms_norm_grad(cudaStream_t stream, const RmsNormGrad& a);

struct QkNormRope {
  View in;              // [N,heads·D] P
  View q_norm, k_norm;  // [D] P
  View rope;            // [T,D] f32
  float eps;
  int64_t T;
  int H, K, D;
  View out;     // [N,heads·D] P
  float* rstd;  // [N,heads]
};
void qk_norm_rope(cudaStream_t stream, const QkNormRope& a);

struct QkNormRopeGrad {
  View d_out, in, q_norm, k_norm, rope;
  const float* rstd;
  int64_t T;
  int H, K, D;
  View d_in;
  float *dq_norm, *dk_norm;  // [D]
  bool accumulate;
  float* parts;  // scratch of qk_norm_rope_grad_parts(N) · 2D floats
};
int64_t qk_norm_rope_grad_parts(int64_t N);
void qk_norm_rope_grad(cudaStream_t stream, const QkNormRopeGrad& a);

// --- attention.cu (tensor cores), attention_general.cu (any even D, any type)
struct Attention {
  int64_t B, T;
  int H, K, D;
  View q, k, v, o;  // [N,H·D], [N,K·D], [N,K·D], [N,H·D]
  float* lse;       // [B,H,T]
  // backward
  View d_o, dq, dk, dv;
  float* delta;  // scratch [B,H,T]: Σ_d d_o·o
};
// Whether the tensor-core kernels take it: 16-bit types, D of 64 or 128, aligned rows.
bool attention_on_tensor_cores(const Attention& a);
void attention_tensor(cudaStream_t stream, const Attention& a);
void attention_tensor_grad(cudaStream_t stream, const Attention& a);
inline constexpr int kMaxGeneralHeadDim = 384;
void attention_general(cudaStream_t stream, const Attention& a);
void attention_general_grad(cudaStream_t stream, const Attention& a);

// --- mlp_embed_loss.cu
void embedding(cudaStream_t stream, const int32_t* ids, View w, View x);
void embedding_grad(cudaStream_t stream, const int32_t* ids, View dx, View dw);
void swiglu(cudaStream_t stream, View gu, View a);
void swiglu_grad(cudaStream_t stream, View da, View gu, View d_gu);
void cross_entropy(cudaStream_t stream, View logits, const int32_t* labels, Factor scale,
                   View d_logits, float* loss);

// --- adamw_reduce.cu
struct AdamW {
  int64_t n;
  float *p, *m, *v;
  const float* g;
  View p_out;  // [1,n] P, or empty
  float beta1, beta2, eps;
  AdamWFactors factors;
  const AdamWFactors* on_device;  // null: factors
};
void adamw(cudaStream_t stream, const AdamW& a);

inline constexpr int kSumBlocks = 1024;
enum class Summand { value, square };
// *total += Σ x or Σ x²; parts: scratch of kSumBlocks doubles.
void add_sum(cudaStream_t stream, const float* x, int64_t n, Summand summand, double* parts,
             double* total);
void cast(cudaStream_t stream, View from, View to);

inline constexpr int kMaxParts = 256;
struct SumParts {
  const void* parts[kMaxParts];
  int count;
  Type type;
  int64_t n;
  Factor scale = 1;
  float* out;
  bool accumulate;
};
void sum_parts(cudaStream_t stream, const SumParts& a);
void fill(cudaStream_t stream, View out, float value);

struct InitNormal {
  float* out;
  int64_t n, first;
  uint64_t seed, stream;
  float std;
};
void init_normal(cudaStream_t stream, const InitNormal& a);

}  // namespace qshard::cuda
