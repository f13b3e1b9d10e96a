// Embedding, SwiGLU and cross-entropy.
#include <cmath>

#include "cpu/arguments.h"
#include "cpu/ops_cpu.h"
#include "cpu/vec.h"

namespace qshard::cpu {
namespace {

constexpr int64_t kRowGrain = 8;  // token rows a thread takes at least
constexpr int32_t kIgnoredLabel = -100;

}  // namespace

void CpuOps::embedding(Tensor ids, Tensor w, Tensor x) {
  expect_rank("embedding", "w", w, 2);
  const int64_t N = ids.numel(), C = w.cols();
  expect_contiguous("embedding", "ids", ids, DType::i32, ids.shape);
  expect("embedding", "w", w, w.dtype, {w.rows(), C});
  expect("embedding", "x", x, x.dtype, {N, C});
  with_dtypes("embedding", x.dtype, w.dtype, [&]<typename R, typename P>(R, P) {
    team_.ranges(N, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const P* row = w.as<P>() + ids.as<int32_t>()[n] * w.ld;
        R* out = x.as<R>() + n * x.ld;
        for_each_vec(C,
                     [&](int64_t i, auto lanes) { store(out + i, load(row + i, lanes), lanes); });
      }
    });
  });
}

void CpuOps::embedding_grad(Tensor ids, Tensor dx, Tensor dw) {
  expect_rank("embedding_grad", "dw", dw, 2);
  const int64_t N = ids.numel(), C = dw.cols();
  expect_contiguous("embedding_grad", "ids", ids, DType::i32, ids.shape);
  expect("embedding_grad", "dx", dx, dx.dtype, {N, C});
  expect("embedding_grad", "dw", dw, DType::f32, {dw.rows(), C});
  // A token may occur many times: threads share the columns, so that each sums in token order.
  with_dtype("embedding_grad", "dx", dx.dtype, [&]<typename R>(R) {
    team_.ranges(C, 4 * kLanes, [&](int64_t begin, int64_t end) {
      for (int64_t n = 0; n < N; ++n) {
        const R* d = dx.as<R>() + n * dx.ld + begin;
        float* row = dw.as<float>() + ids.as<int32_t>()[n] * dw.ld + begin;
        for_each_vec(end - begin, [&](int64_t i, auto lanes) {
          store(row + i, load(row + i, lanes) + load(d + i, lanes), lanes);
        });
      }
    });
  });
}

void CpuOps::swiglu(Tensor gu, Tensor a) {
  expect_rank("swiglu", "a", a, 2);
  const int64_t N = a.rows(), F = a.cols();
  expect("swiglu", "gu", gu, a.dtype, {N, 2 * F});
  expect("swiglu", "a", a, a.dtype, {N, F});
  with_dtype("swiglu", "a", a.dtype, [&]<typename P>(P) {
    team_.ranges(N, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const P* gate = gu.as<P>() + n * gu.ld;
        const P* up = gate + F;
        P* out = a.as<P>() + n * a.ld;
        for_each_vec(F, [&](int64_t i, auto lanes) {
          const Vec g = load(gate + i, lanes);
          store(out + i, g / (1.f + exp(-g)) * load(up + i, lanes), lanes);
        });
      }
    });
  });
}

void CpuOps::swiglu_grad(Tensor da, Tensor gu, Tensor d_gu) {
  expect_rank("swiglu_grad", "da", da, 2);
  const int64_t N = da.rows(), F = da.cols();
  expect("swiglu_grad", "da", da, da.dtype, {N, F});
  expect("swiglu_grad", "gu", gu, da.dtype, {N, 2 * F});
  expect("swiglu_grad", "d_gu", d_gu, da.dtype, {N, 2 * F});
  with_dtype("swiglu_grad", "da", da.dtype, [&]<typename P>(P) {
    team_.ranges(N, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const P* gate = gu.as<P>() + n * gu.ld;
        const P* d_out = da.as<P>() + n * da.ld;
        P* d_gate = d_gu.as<P>() + n * d_gu.ld;
        for_each_vec(F, [&](int64_t i, auto lanes) {
          const Vec g = load(gate + i, lanes), u = load(gate + F + i, lanes);
          const Vec d = load(d_out + i, lanes);
          const Vec sigmoid = 1.f / (1.f + exp(-g));
          const Vec silu = g * sigmoid;
          store(d_gate + i, d * u * (sigmoid + silu * (1.f - sigmoid)), lanes);
          store(d_gate + F + i, d * silu, lanes);
        });
      }
    });
  });
}

namespace {

struct SoftmaxOfRow {
  float max;
  double sum;  // Σ exp(x − max)
};

SoftmaxOfRow softmax_of_row(const float* x, int64_t V) {
  Vec max_lanes = splat(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= V; i += kLanes) max_lanes = max(load(x + i, Full{}), max_lanes);
  float max_all = lane_max(max_lanes);
  for (; i < V; ++i) max_all = std::max(max_all, x[i]);

  // f32 sums of short pieces, f64 across them: a vocabulary row has 10^5 terms.
  constexpr int64_t kPiece = 1024;
  double sum = 0;
  for (int64_t begin = 0; begin < V; begin += kPiece) {
    Vec part{};
    for_each_vec(std::min(kPiece, V - begin), [&](int64_t j, auto lanes) {
      Vec e = exp(load(x + begin + j, lanes) - max_all);
      for (int64_t lane = lanes.count; lane < kLanes; ++lane) e[lane] = 0;
      part += e;
    });
    sum += lane_sum(part);
  }
  return {max_all, sum};
}

// d may lie over x from the same start: each vector of x is read before the (not wider) vector of d
// at the same index is written.
template <typename P>
void cross_entropy_grad_row(const float* x, const SoftmaxOfRow& s, int32_t label, float scale,
                            int64_t V, P* d) {
  const float factor = static_cast<float>(scale / s.sum);
  const float at_label = std::exp(x[label] - s.max) * factor - scale;
  for_each_vec(V, [&](int64_t i, auto lanes) {
    store(d + i, exp(load(x + i, lanes) - s.max) * factor, lanes);
  });
  store_one(d + label, at_label);
}

}  // namespace

void CpuOps::cross_entropy(Tensor logits, Tensor labels, Factor given_scale, Tensor d_logits,
                           Tensor loss) {
  const float scale = given_scale.get();
  expect_rank("cross_entropy", "logits", logits, 2);
  const int64_t n = logits.rows(), V = logits.cols();
  expect("cross_entropy", "logits", logits, DType::f32, {n, V});
  expect("cross_entropy", "labels", labels, DType::i32, {n});
  expect("cross_entropy", "loss", loss, DType::f32, {n});
  if (d_logits) expect("cross_entropy", "d_logits", d_logits, d_logits.dtype, {n, V});
  const int32_t* label_of = labels.as<int32_t>();
  for (int64_t row = 0; row < n; ++row)
    QS_CHECK(label_of[row] == kIgnoredLabel || (label_of[row] >= 0 && label_of[row] < V),
             "cross_entropy: label {} of token {} is neither in [0, {}) nor {} (ignored)",
             label_of[row], row, V, kIgnoredLabel);

  with_dtype("cross_entropy", "d_logits", d_logits ? d_logits.dtype : DType::f32,
             [&]<typename P>(P) {
               team_.ranges(n, 1, [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) {
                   const float* x = logits.as<float>() + row * logits.ld;
                   P* d = d_logits ? d_logits.as<P>() + row * d_logits.ld : nullptr;
                   const int32_t label = label_of[row];
                   if (label == kIgnoredLabel) {
                     loss.as<float>()[row] = 0;
                     if (d) std::memset(d, 0, static_cast<size_t>(V) * sizeof(P));
                     continue;
                   }
                   const SoftmaxOfRow s = softmax_of_row(x, V);
                   loss.as<float>()[row] =
                       static_cast<float>(std::log(s.sum) + (double{s.max} - double{x[label]}));
                   if (d) cross_entropy_grad_row(x, s, label, scale, V, d);
                 }
               });
             });
}

}  // namespace qshard::cpu
