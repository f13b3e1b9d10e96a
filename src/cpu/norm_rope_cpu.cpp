// RMSNorm, the residual stream, and q/k-norm with RoPE.
#include <array>
#include <cmath>

#include "cpu/arguments.h"
#include "cpu/ops_cpu.h"
#include "cpu/vec.h"

namespace qshard::cpu {
namespace {

constexpr int64_t kRowGrain = 8;  // token rows a thread takes at least

// Weight gradients are sums over tokens. Each block of rows sums on its own, then the blocks are
// added in order: the same order of additions for any number of threads.
constexpr int64_t kBlockRows = 64;
int64_t blocks_of(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

float inverse_rms(float sum_of_squares, int64_t n, float eps) {
  return 1.f / std::sqrt(sum_of_squares / static_cast<float>(n) + eps);
}

template <typename T>
QS_INLINE float row_sum_squares(const T* x, int64_t n) {
  Vec sum{};
  for_each_vec(n, [&](int64_t i, auto lanes) {
    const Vec v = load(x + i, lanes);
    sum += v * v;
  });
  return lane_sum(sum);
}

template <typename R, typename P>
QS_INLINE float norm_row(const R* x, const P* w, int64_t C, float eps, P* y) {
  const float rstd = inverse_rms(row_sum_squares(x, C), C, eps);
  for_each_vec(C, [&](int64_t i, auto lanes) {
    store(y + i, load(x + i, lanes) * rstd * load(w + i, lanes), lanes);
  });
  return rstd;
}

template <typename R, typename P>
QS_INLINE void add_row(const R* x, const P* delta, R* sum, int64_t C) {
  for_each_vec(C, [&](int64_t i, auto lanes) {
    store(sum + i, load(x + i, lanes) + load(delta + i, lanes), lanes);
  });
}

// out[c] (+)= Σ_block parts[block][c], in the order of the blocks.
void sum_blocks(const Team& team, const float* parts, int64_t blocks, int64_t stride, int64_t n,
                float* out, bool accumulate) {
  team.ranges(n, 8 * kLanes, [&](int64_t begin, int64_t end) {
    for_each_vec(end - begin, [&](int64_t i, auto lanes) {
      const int64_t c = begin + i;
      Vec sum{};
      for (int64_t block = 0; block < blocks; ++block)
        sum += load(parts + block * stride + c, lanes);
      if (accumulate) sum += load(out + c, lanes);
      store(out + c, sum, lanes);
    });
  });
}

// One row of the gradient of y = x·rstd·w:
// d_res += rstd·(g − x·rstd²·mean(g·x)) with g = dy·w, and dw += dy·x·rstd.
template <typename R, typename P>
QS_INLINE void norm_grad_row(const float* dy, const R* x, const P* w, float rstd, int64_t C,
                             R* d_res, P* d_res_p, float* dw) {
  Vec dot{};
  for_each_vec(C, [&](int64_t i, auto lanes) {
    const Vec dyx = load(dy + i, lanes) * load(x + i, lanes);
    dot += dyx * load(w + i, lanes);
    store(dw + i, load(dw + i, lanes) + dyx * rstd, lanes);
  });
  const float x_scale = rstd * rstd * rstd * lane_sum(dot) / static_cast<float>(C);
  for_each_vec(C, [&](int64_t i, auto lanes) {
    const Vec g = load(dy + i, lanes) * load(w + i, lanes);
    const Vec d = load(d_res + i, lanes) + (g * rstd - load(x + i, lanes) * x_scale);
    store(d_res + i, d, lanes);
    if (d_res_p) store(d_res_p + i, d, lanes);
  });
}

}  // namespace

void CpuOps::rms_norm(Tensor x, Tensor w, float eps, Tensor y, Tensor rstd) {
  expect_rank("rms_norm", "x", x, 2);
  const int64_t N = x.rows(), C = x.cols();
  expect("rms_norm", "x", x, x.dtype, {N, C});
  expect("rms_norm", "w", w, w.dtype, {C});
  expect("rms_norm", "y", y, w.dtype, {N, C});
  expect("rms_norm", "rstd", rstd, DType::f32, {N});
  with_dtypes("rms_norm", x.dtype, w.dtype, [&]<typename R, typename P>(R, P) {
    team_.ranges(N, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        rstd.as<float>()[n] =
            norm_row(x.as<R>() + n * x.ld, w.as<P>(), C, eps, y.as<P>() + n * y.ld);
    });
  });
}

void CpuOps::add_rms_norm(Tensor x, Tensor delta, Tensor w, float eps, Tensor sum, Tensor y,
                          Tensor rstd) {
  expect_rank("add_rms_norm", "x", x, 2);
  const int64_t N = x.rows(), C = x.cols();
  expect("add_rms_norm", "x", x, x.dtype, {N, C});
  expect("add_rms_norm", "delta", delta, w.dtype, {N, C});
  expect("add_rms_norm", "w", w, w.dtype, {C});
  expect("add_rms_norm", "sum", sum, x.dtype, {N, C});
  expect("add_rms_norm", "y", y, w.dtype, {N, C});
  expect("add_rms_norm", "rstd", rstd, DType::f32, {N});
  with_dtypes("add_rms_norm", x.dtype, w.dtype, [&]<typename R, typename P>(R, P) {
    team_.ranges(N, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        R* sum_row = sum.as<R>() + n * sum.ld;
        add_row(x.as<R>() + n * x.ld, delta.as<P>() + n * delta.ld, sum_row, C);
        // The norm is that of the stored (rounded) sum, which backward reads.
        rstd.as<float>()[n] = norm_row(sum_row, w.as<P>(), C, eps, y.as<P>() + n * y.ld);
      }
    });
  });
}

void CpuOps::add(Tensor x, Tensor delta, Tensor sum) {
  expect_rank("add", "x", x, 2);
  const int64_t N = x.rows(), C = x.cols();
  expect("add", "x", x, x.dtype, {N, C});
  expect("add", "delta", delta, delta.dtype, {N, C});
  expect("add", "sum", sum, x.dtype, {N, C});
  with_dtypes("add", x.dtype, delta.dtype, [&]<typename R, typename P>(R, P) {
    team_.ranges(N, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        add_row(x.as<R>() + n * x.ld, delta.as<P>() + n * delta.ld, sum.as<R>() + n * sum.ld, C);
    });
  });
}

void CpuOps::rms_norm_grad(Tensor dy, Tensor x, Tensor w, Tensor rstd, Tensor d_res, Tensor d_res_p,
                           Tensor dw, bool accumulate) {
  expect_rank("rms_norm_grad", "x", x, 2);
  const int64_t N = x.rows(), C = x.cols();
  expect("rms_norm_grad", "dy", dy, DType::f32, {N, C});
  expect("rms_norm_grad", "x", x, x.dtype, {N, C});
  expect("rms_norm_grad", "w", w, w.dtype, {C});
  expect("rms_norm_grad", "rstd", rstd, DType::f32, {N});
  expect("rms_norm_grad", "d_res", d_res, x.dtype, {N, C});
  if (d_res_p) expect("rms_norm_grad", "d_res_p", d_res_p, w.dtype, {N, C});
  expect("rms_norm_grad", "dw", dw, DType::f32, {C});

  const int64_t blocks = blocks_of(N);
  float* parts = workspace(blocks * C);  // [blocks, C]
  with_dtypes("rms_norm_grad", x.dtype, w.dtype, [&]<typename R, typename P>(R, P) {
    team_.tasks(blocks, [&](int64_t block, int) {
      float* part = parts + block * C;
      std::fill_n(part, C, 0.f);
      const int64_t end = std::min(N, (block + 1) * kBlockRows);
      for (int64_t n = block * kBlockRows; n < end; ++n)
        norm_grad_row(dy.as<float>() + n * dy.ld, x.as<R>() + n * x.ld, w.as<P>(),
                      rstd.as<float>()[n], C, d_res.as<R>() + n * d_res.ld,
                      d_res_p ? d_res_p.as<P>() + n * d_res_p.ld : nullptr, part);
    });
  });
  sum_blocks(team_, parts, blocks, C, C, dw.as<float>(), accumulate);
}

namespace {

// One head of one token. Elements i and i + D/2 turn together by the angle of frequency i.
struct HeadRotation {
  const float *cos, *sin;  // [D/2] each
  int64_t half;            // D/2
};

template <typename P>
QS_INLINE float norm_rope_head(const P* x, const P* w, float eps, const HeadRotation& rope,
                               P* out) {
  const int64_t half = rope.half;
  const float rstd = inverse_rms(row_sum_squares(x, 2 * half), 2 * half, eps);
  for_each_vec(half, [&](int64_t i, auto lanes) {
    const Vec a = load(x + i, lanes) * rstd * load(w + i, lanes);
    const Vec b = load(x + half + i, lanes) * rstd * load(w + half + i, lanes);
    const Vec cos = load(rope.cos + i, lanes), sin = load(rope.sin + i, lanes);
    store(out + i, a * cos - b * sin, lanes);
    store(out + half + i, b * cos + a * sin, lanes);
  });
  return rstd;
}

// d_in may be d_out: a pair of elements is read before it is written.
template <typename P>
QS_INLINE void norm_rope_head_grad(const P* d_out, const P* x, const P* w, float rstd,
                                   const HeadRotation& rope, P* d_in, float* dw) {
  const int64_t half = rope.half;
  const auto unrotate = [&](int64_t i, auto lanes) {  // the gradient of the norm's output
    const Vec da = load(d_out + i, lanes), db = load(d_out + half + i, lanes);
    const Vec cos = load(rope.cos + i, lanes), sin = load(rope.sin + i, lanes);
    return std::array<Vec, 2>{da * cos + db * sin, db * cos - da * sin};
  };
  Vec dot{};
  for_each_vec(half, [&](int64_t i, auto lanes) {
    const auto dy = unrotate(i, lanes);
    for (int part = 0; part < 2; ++part) {
      const int64_t j = part * half + i;
      const Vec dyx = dy[part] * load(x + j, lanes);
      dot += dyx * load(w + j, lanes);
      store(dw + j, load(dw + j, lanes) + dyx * rstd, lanes);
    }
  });
  const float x_scale = rstd * rstd * rstd * lane_sum(dot) / static_cast<float>(2 * half);
  for_each_vec(half, [&](int64_t i, auto lanes) {
    const auto dy = unrotate(i, lanes);
    for (int part = 0; part < 2; ++part) {
      const int64_t j = part * half + i;
      store(d_in + j, dy[part] * load(w + j, lanes) * rstd - load(x + j, lanes) * x_scale, lanes);
    }
  });
}

void expect_heads(const char* op, const AttentionShape& s, DType param, Tensor q_norm,
                  Tensor k_norm, Tensor rope) {
  QS_CHECK(s.D > 0 && s.D % 2 == 0, "{}: head_dim {} must be even: RoPE turns pairs", op, s.D);
  expect(op, "q_norm", q_norm, param, {s.D});
  expect(op, "k_norm", k_norm, param, {s.D});
  expect(op, "rope", rope, DType::f32, {s.T, s.D});
}

HeadRotation rotation_at(const Tensor& rope, int64_t t) {
  const float* row = rope.as<float>() + t * rope.ld;
  const int64_t half = rope.cols() / 2;
  return {row, row + half, half};
}

}  // namespace

void CpuOps::qk_norm_rope(Tensor qk_in, Tensor q_norm, Tensor k_norm, Tensor rope, float eps,
                          AttentionShape s, Tensor qk_out, Tensor rstd) {
  const char* op = "qk_norm_rope";
  const int64_t N = s.B * s.T, heads = s.H + s.K;
  const DType param = qk_in.dtype;
  expect(op, "qk_in", qk_in, param, {N, heads * s.D});
  expect_heads(op, s, param, q_norm, k_norm, rope);
  expect(op, "qk_out", qk_out, param, {N, heads * s.D});
  expect_contiguous(op, "rstd", rstd, DType::f32, {N, heads});
  with_dtype(op, "qk_in", param, [&]<typename P>(P) {
    team_.ranges(N, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const HeadRotation rotation = rotation_at(rope, n % s.T);
        for (int64_t h = 0; h < heads; ++h)
          rstd.as<float>()[n * heads + h] = norm_rope_head(
              qk_in.as<P>() + n * qk_in.ld + h * s.D, (h < s.H ? q_norm : k_norm).as<P>(), eps,
              rotation, qk_out.as<P>() + n * qk_out.ld + h * s.D);
      }
    });
  });
}

void CpuOps::qk_norm_rope_grad(Tensor d_qk_out, Tensor qk_in, Tensor q_norm, Tensor k_norm,
                               Tensor rope, Tensor rstd, AttentionShape s, Tensor d_qk_in,
                               Tensor dq_norm, Tensor dk_norm, bool accumulate) {
  const char* op = "qk_norm_rope_grad";
  const int64_t N = s.B * s.T, heads = s.H + s.K, D = s.D;
  const DType param = qk_in.dtype;
  expect(op, "d_qk_out", d_qk_out, param, {N, heads * D});
  expect(op, "qk_in", qk_in, param, {N, heads * D});
  expect_heads(op, s, param, q_norm, k_norm, rope);
  expect_contiguous(op, "rstd", rstd, DType::f32, {N, heads});
  expect(op, "d_qk_in", d_qk_in, param, {N, heads * D});
  expect(op, "dq_norm", dq_norm, DType::f32, {D});
  expect(op, "dk_norm", dk_norm, DType::f32, {D});

  const int64_t blocks = blocks_of(N);
  float* parts = workspace(blocks * 2 * D);  // [blocks, q and k, D]
  with_dtype(op, "qk_in", param, [&]<typename P>(P) {
    team_.tasks(blocks, [&](int64_t block, int) {
      float* part = parts + block * 2 * D;
      std::fill_n(part, 2 * D, 0.f);
      const int64_t end = std::min(N, (block + 1) * kBlockRows);
      for (int64_t n = block * kBlockRows; n < end; ++n) {
        const HeadRotation rotation = rotation_at(rope, n % s.T);
        for (int64_t h = 0; h < heads; ++h) {
          const bool is_q = h < s.H;
          norm_rope_head_grad(
              d_qk_out.as<P>() + n * d_qk_out.ld + h * D, qk_in.as<P>() + n * qk_in.ld + h * D,
              (is_q ? q_norm : k_norm).as<P>(), rstd.as<float>()[n * heads + h], rotation,
              d_qk_in.as<P>() + n * d_qk_in.ld + h * D, part + (is_q ? 0 : D));
        }
      }
    });
  });
  sum_blocks(team_, parts, blocks, 2 * D, D, dq_norm.as<float>(), accumulate);
  sum_blocks(team_, parts + D, blocks, 2 * D, D, dk_norm.as<float>(), accumulate);
}

}  // namespace qshard::cpu
