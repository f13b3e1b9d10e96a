// RMSNorm with the residual stream, and q/k-norm with RoPE. Shapes as in device/ops.h.
//
// Bytes moved in device memory per element, against the minimum (inputs read once, outputs written
// once), with P of 2 bytes and R of 4:
//   rms_norm            4 + 2              the minimum
//   add_rms_norm        4 + 2 + 4 + 2      the minimum
//   add                 4 + 2 + 4          the minimum
//   rms_norm_grad       4 + 4 + 8 + 2      the minimum, + 8/16 for the partial weight gradients
//   qk_norm_rope        2 + 2              the minimum
//   qk_norm_rope_grad   2 + 2 + 2          the minimum, + 8/(8·heads)
// Weight gradients are sums over tokens: each block sums its kTokensPerBlock tokens, a second
// kernel adds the blocks' sums in their order.
#include "cuda/kernel.cuh"
#include "cuda/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kTokensPerBlock = 16;
constexpr int kMaxRowThreads = 512;

// Threads for one row of C elements: all chunks in as few turns as possible, evenly.
int row_threads(int64_t C, int width) {
  const int64_t chunks = ceil_div(C, width);
  return static_cast<int>(round_up(ceil_div(chunks, ceil_div(chunks, kMaxRowThreads)), 32));
}

// Floats that a thread puts aside in shared memory for its own chunks of a row. Neighbouring
// threads' accesses of 16 bytes are neighbours, so there are no bank conflicts; nobody else reads
// them, so there are no barriers.
template <int W>
class Aside {
 public:
  static size_t bytes(int64_t C, int threads) {
    return static_cast<size_t>(round_up(C, int64_t{W} * threads)) * sizeof(float);
  }
  __device__ explicit Aside(unsigned char* memory) : floats_(reinterpret_cast<float*>(memory)) {}
  __device__ void put(int turn, const float (&x)[W]) {
    if constexpr (W == 1) {
      floats_[turn * blockDim.x + threadIdx.x] = x[0];
    } else {
#pragma unroll
      for (int i = 0; i < W; i += 4)
        store<4, Memory::shared>(at(turn, i), {x[i], x[i + 1], x[i + 2], x[i + 3]});
    }
  }
  __device__ void get(int turn, float (&x)[W]) const {
    if constexpr (W == 1) {
      x[0] = floats_[turn * blockDim.x + threadIdx.x];
    } else {
#pragma unroll
      for (int i = 0; i < W; i += 4) {
        float part[4];
        load<4, Memory::shared>(at(turn, i), part);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i + j] = part[j];
      }
    }
  }

 private:
  __device__ float* at(int turn, int i) const {
    return floats_ + 4 * ((turn * (W / 4) + i / 4) * blockDim.x + threadIdx.x);
  }
  float* floats_;
};

// body(turn, column) for this thread's chunks of a row.
template <int W, typename F>
__device__ __forceinline__ void for_each_chunk_of_row(int C, F&& body) {
  int turn = 0;
  for (int c = static_cast<int>(threadIdx.x) * W; c < C; c += static_cast<int>(blockDim.x) * W)
    body(turn++, c);
}

// --- RMSNorm, one block a row
template <typename R, typename P, int W, bool kAdd>
__global__ void __launch_bounds__(kMaxRowThreads) rms_norm_kernel(RmsNorm a) {
  const int64_t n = blockIdx.x;
  const int C = static_cast<int>(a.x.cols);
  const R* x = a.x.as<R>() + n * a.x.ld;
  Aside<W> row(smem);
  float squares = 0;
  for_each_chunk_of_row<W>(C, [&](int turn, int c) {
    float v[W];
    load<W>(x + c, v);
    if constexpr (kAdd) {
      float delta[W];
      load<W>(a.delta.as<P>() + n * a.delta.ld + c, delta);
      // The norm is that of the stored (rounded) sum, which backward reads.
#pragma unroll
      for (int i = 0; i < W; ++i) v[i] = rounded<R>(v[i] + delta[i]);
      store<W>(a.sum.as<R>() + n * a.sum.ld + c, v);
    }
#pragma unroll
    for (int i = 0; i < W; ++i) squares += v[i] * v[i];
    row.put(turn, v);
  });
  const float rstd = rsqrtf(sum_over_block(squares) / static_cast<float>(C) + a.eps);
  for_each_chunk_of_row<W>(C, [&](int turn, int c) {
    float v[W], w[W];
    row.get(turn, v);
    load<W>(a.w.as<P>() + c, w);
#pragma unroll
    for (int i = 0; i < W; ++i) v[i] = v[i] * rstd * w[i];
    store<W>(a.y.as<P>() + n * a.y.ld + c, v);
  });
  if (threadIdx.x == 0) a.rstd[n] = rstd;
}

template <typename R, typename P, int W>
__global__ void __launch_bounds__(kElementThreads) add_kernel(View x, View delta, View sum) {
  for_each_chunk<W>(x.rows, x.cols, [&]<int N>(int64_t row, int64_t c, Width<N>) {
    float v[N], d[N];
    load<N>(x.as<R>() + row * x.ld + c, v);
    load<N>(delta.as<P>() + row * delta.ld + c, d);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] += d[i];
    store<N>(sum.as<R>() + row * sum.ld + c, v);
  });
}

// --- its gradient, one block for kTokensPerBlock rows:
// d_res += rstd·(g − x·rstd²·mean(g·x)) with g = dy·w, and dw += dy·x·rstd.
template <typename R, typename P, int W>
__global__ void __launch_bounds__(kMaxRowThreads)
    rms_norm_grad_kernel(RmsNormGrad a, size_t aside_bytes) {
  const int C = static_cast<int>(a.x.cols);
  Aside<W> g_row(smem), x_row(smem + aside_bytes), dw_part(smem + 2 * aside_bytes);
  const int64_t begin = int64_t{blockIdx.x} * kTokensPerBlock;
  const int64_t end = min(begin + kTokensPerBlock, a.x.rows);
  for (int64_t n = begin; n < end; ++n) {
    const float rstd = a.rstd[n];
    float dot = 0;
    for_each_chunk_of_row<W>(C, [&](int turn, int c) {
      float dy[W], x[W], w[W], dw[W] = {};
      load<W>(a.dy.as<float>() + n * a.dy.ld + c, dy);
      load<W>(a.x.as<R>() + n * a.x.ld + c, x);
      load<W>(a.w.as<P>() + c, w);
      if (n > begin) dw_part.get(turn, dw);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        dw[i] += dy[i] * x[i] * rstd;
        dy[i] *= w[i];
        dot += dy[i] * x[i];
      }
      g_row.put(turn, dy);
      x_row.put(turn, x);
      dw_part.put(turn, dw);
    });
    const float x_scale = rstd * rstd * rstd * sum_over_block(dot) / static_cast<float>(C);
    for_each_chunk_of_row<W>(C, [&](int turn, int c) {
      float g[W], x[W], d[W];
      g_row.get(turn, g);
      x_row.get(turn, x);
      load<W>(a.d_res.as<R>() + n * a.d_res.ld + c, d);
#pragma unroll
      for (int i = 0; i < W; ++i) d[i] += g[i] * rstd - x[i] * x_scale;
      store<W>(a.d_res.as<R>() + n * a.d_res.ld + c, d);
      if (a.d_res_p.data) store<W>(a.d_res_p.as<P>() + n * a.d_res_p.ld + c, d);
    });
  }
  for_each_chunk_of_row<W>(C, [&](int turn, int c) {
    float dw[W];
    dw_part.get(turn, dw);
    store<W>(a.parts + int64_t{blockIdx.x} * C + c, dw);
  });
}

// out[c] (+)= Σ_part parts[part][c]: kSlices threads a column sum every kSlices-th part, then their
// sums are added in order.
constexpr int kSlices = 16, kSliceCols = 32;

__global__ void __launch_bounds__(kSlices* kSliceCols)
    sum_columns_kernel(const float* parts, int64_t count, int64_t ld, int cols, float* out,
                       bool accumulate) {
  __shared__ float of_slice[kSlices][kSliceCols];
  const int c = static_cast<int>(blockIdx.x) * kSliceCols + static_cast<int>(threadIdx.x);
  float sum = 0;
  if (c < cols)
    for (int64_t part = threadIdx.y; part < count; part += kSlices) sum += parts[part * ld + c];
  of_slice[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= cols) return;
  float total = 0;
  for (int slice = 0; slice < kSlices; ++slice) total += of_slice[slice][threadIdx.x];
  out[c] = accumulate ? out[c] + total : total;
}

void sum_columns(cudaStream_t stream, const float* parts, int64_t count, int64_t ld, int64_t cols,
                 float* out, bool accumulate) {
  launch(
      {stream, dim3(static_cast<unsigned>(ceil_div(cols, kSliceCols))), dim3(kSliceCols, kSlices)},
      sum_columns_kernel, parts, count, ld, static_cast<int>(cols), out, accumulate);
}

// --- q/k-norm and RoPE. A group of lanes (a power of two) has one head of one token; a lane has
// the chunk at i of the first half and the one it turns with at D/2 + i.
constexpr int kHeadThreads = 256;

int lanes_of_head(int D, int width) {
  int lanes = 1;
  while (lanes < 32 && lanes * width < D / 2) lanes *= 2;
  return lanes;
}

template <typename P, int W>
__global__ void __launch_bounds__(kHeadThreads)
    qk_norm_rope_kernel(QkNormRope a, int64_t rows, int lanes) {
  const int half = a.D / 2, heads = a.H + a.K, lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t mine = (int64_t{blockIdx.x} * kHeadThreads + threadIdx.x) / lanes;
  const int64_t row = min(mine, rows - 1);  // lanes beyond the end take part in the sums
  const int64_t n = row / heads;
  const int h = static_cast<int>(row % heads);
  const P* x = a.in.as<P>() + n * a.in.ld + h * a.D;
  float squares = 0;
  for (int i = lane * W; i < a.D / 2; i += lanes * W)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float v[W];
      load<W>(x + part * half + i, v);
#pragma unroll
      for (int j = 0; j < W; ++j) squares += v[j] * v[j];
    }
  const float rstd = rsqrtf(sum_over_lanes(squares, lanes) / static_cast<float>(a.D) + a.eps);
  if (mine >= rows) return;

  const P* w = (h < a.H ? a.q_norm : a.k_norm).template as<P>();
  const float* cos_row = a.rope.as<float>() + n % a.T * a.rope.ld;
  P* out = a.out.as<P>() + n * a.out.ld + h * a.D;
  for (int i = lane * W; i < half; i += lanes * W) {
    float first[W], second[W], w_first[W], w_second[W], cos[W], sin[W];
    load<W>(x + i, first);
    load<W>(x + half + i, second);
    load<W>(w + i, w_first);
    load<W>(w + half + i, w_second);
    load<W>(cos_row + i, cos);
    load<W>(cos_row + half + i, sin);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const float u = first[j] * rstd * w_first[j], v = second[j] * rstd * w_second[j];
      first[j] = u * cos[j] - v * sin[j];
      second[j] = v * cos[j] + u * sin[j];
    }
    store<W>(out + i, first);
    store<W>(out + half + i, second);
  }
  if (lane == 0) a.rstd[row] = rstd;
}

// The gradient at the norm's output: the rotation turned back.
template <int W, typename P>
__device__ __forceinline__ void load_unrotated(const P* d_out, const float* cos_row, int i,
                                               int half, float (&first)[W], float (&second)[W]) {
  float cos[W], sin[W];
  load<W>(d_out + i, first);
  load<W>(d_out + half + i, second);
  load<W>(cos_row + i, cos);
  load<W>(cos_row + half + i, sin);
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const float u = first[j], v = second[j];
    first[j] = u * cos[j] + v * sin[j];
    second[j] = v * cos[j] - u * sin[j];
  }
}

// A block has kTokensPerBlock tokens, its groups take their heads in turn. d_in may be d_out: a
// lane reads its elements before it writes them. dw [groups][q and k][D] in shared memory; each
// element belongs to one lane until the barrier.
template <typename P, int W>
__global__ void __launch_bounds__(kHeadThreads)
    qk_norm_rope_grad_kernel(QkNormRopeGrad a, int lanes) {
  const int half = a.D / 2, heads = a.H + a.K, lane = static_cast<int>(threadIdx.x) % lanes;
  const int group = static_cast<int>(threadIdx.x) / lanes, groups = kHeadThreads / lanes;
  float* dw = reinterpret_cast<float*>(smem) + group * 2 * a.D;
  for (int i = lane * W; i < half; i += lanes * W)
    for (int part = 0; part < 4; ++part) store<W, Memory::shared>(dw + part * half + i, {});

  const int64_t begin = int64_t{blockIdx.x} * kTokensPerBlock * heads;
  const int64_t end = min(begin + kTokensPerBlock * heads, a.in.rows * heads);
  for (int64_t first_row = begin; first_row < end; first_row += groups) {
    const bool valid = first_row + group < end;
    const int64_t row = min(first_row + group, end - 1);
    const int64_t n = row / heads;
    const int h = static_cast<int>(row % heads);
    const P* x = a.in.as<P>() + n * a.in.ld + h * a.D;
    const P* d_out = a.d_out.as<P>() + n * a.d_out.ld + h * a.D;
    const P* w = (h < a.H ? a.q_norm : a.k_norm).template as<P>();
    const float* cos_row = a.rope.as<float>() + n % a.T * a.rope.ld;
    float* dw_head = dw + (h < a.H ? 0 : a.D);
    const float rstd = a.rstd[row];

    float dot = 0;
    if (valid) {
      for (int i = lane * W; i < half; i += lanes * W) {
        float dy[2][W];
        load_unrotated<W>(d_out, cos_row, i, half, dy[0], dy[1]);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          float v[W], weight[W], sum[W];
          load<W>(x + part * half + i, v);
          load<W>(w + part * half + i, weight);
          load<W, Memory::shared>(dw_head + part * half + i, sum);
#pragma unroll
          for (int j = 0; j < W; ++j) {
            const float dyx = dy[part][j] * v[j];
            dot += dyx * weight[j];
            sum[j] += dyx * rstd;
          }
          store<W, Memory::shared>(dw_head + part * half + i, sum);
        }
      }
    }
    const float x_scale = rstd * rstd * rstd * sum_over_lanes(dot, lanes) / static_cast<float>(a.D);
    if (!valid) continue;
    P* d_in = a.d_in.as<P>() + n * a.d_in.ld + h * a.D;
    for (int i = lane * W; i < half; i += lanes * W) {
      float dy[2][W];
      load_unrotated<W>(d_out, cos_row, i, half, dy[0], dy[1]);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        float v[W], weight[W];
        load<W>(x + part * half + i, v);
        load<W>(w + part * half + i, weight);
#pragma unroll
        for (int j = 0; j < W; ++j) v[j] = dy[part][j] * weight[j] * rstd - v[j] * x_scale;
        store<W>(d_in + part * half + i, v);
      }
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < 2 * a.D; c += kHeadThreads) {
    float total = 0;
    for (int g = 0; g < groups; ++g) total += reinterpret_cast<float*>(smem)[g * 2 * a.D + c];
    a.parts[int64_t{blockIdx.x} * 2 * a.D + c] = total;
  }
}

}  // namespace

void rms_norm(cudaStream_t stream, const RmsNorm& a) {
  if (a.x.rows == 0) return;
  const bool adds = a.delta.data;
  with_types(a.x.type, a.w.type, [&]<typename R, typename P>(Tag<R>, Tag<P>) {
    const bool aligned =
        rows_aligned({a.x, a.delta, a.w, a.sum, a.y}) && a.x.cols % kWidth<R, P> == 0;
    with_width<kWidth<R, P>>(aligned, [&]<int W>(Width<W>) {
      const int threads = row_threads(a.x.cols, W);
      launch({stream, dim3(static_cast<unsigned>(a.x.rows)), dim3(threads),
              Aside<W>::bytes(a.x.cols, threads)},
             adds ? rms_norm_kernel<R, P, W, true> : rms_norm_kernel<R, P, W, false>, a);
    });
  });
}

void add(cudaStream_t stream, View x, View delta, View sum) {
  if (x.rows == 0) return;
  with_types(x.type, delta.type, [&]<typename R, typename P>(Tag<R>, Tag<P>) {
    with_width<kWidth<R, P>>(rows_aligned({x, delta, sum}), [&]<int W>(Width<W>) {
      launch(over_elements(stream, x.rows, x.cols, W), add_kernel<R, P, W>, x, delta, sum);
    });
  });
}

int64_t rms_norm_grad_parts(int64_t N) { return ceil_div(N, kTokensPerBlock); }

void rms_norm_grad(cudaStream_t stream, const RmsNormGrad& a) {
  const int64_t blocks = rms_norm_grad_parts(a.x.rows);
  if (blocks > 0)
    with_types(a.x.type, a.w.type, [&]<typename R, typename P>(Tag<R>, Tag<P>) {
      const bool aligned =
          rows_aligned({a.dy, a.x, a.w, a.d_res, a.d_res_p}) && a.x.cols % kWidth<R, P> == 0;
      with_width<kWidth<R, P>>(aligned, [&]<int W>(Width<W>) {
        const int threads = row_threads(a.x.cols, W);
        const size_t aside = Aside<W>::bytes(a.x.cols, threads);
        launch({stream, dim3(static_cast<unsigned>(blocks)), dim3(threads), 3 * aside},
               rms_norm_grad_kernel<R, P, W>, a, aside);
      });
    });
  sum_columns(stream, a.parts, blocks, a.x.cols, a.x.cols, a.dw, a.accumulate);
}

void qk_norm_rope(cudaStream_t stream, const QkNormRope& a) {
  const int64_t rows = a.in.rows * (a.H + a.K);
  if (rows == 0) return;
  with_type(a.in.type, [&]<typename P>(Tag<P>) {
    const bool aligned =
        rows_aligned({a.in, a.q_norm, a.k_norm, a.rope, a.out}) && a.D / 2 % kWidth<P> == 0;
    with_width<kWidth<P>>(aligned, [&]<int W>(Width<W>) {
      const int lanes = lanes_of_head(a.D, W);
      launch({stream, dim3(static_cast<unsigned>(ceil_div(rows * lanes, kHeadThreads))),
              dim3(kHeadThreads)},
             qk_norm_rope_kernel<P, W>, a, rows, lanes);
    });
  });
}

int64_t qk_norm_rope_grad_parts(int64_t N) { return ceil_div(N, kTokensPerBlock); }

void qk_norm_rope_grad(cudaStream_t stream, const QkNormRopeGrad& a) {
  const int64_t blocks = qk_norm_rope_grad_parts(a.in.rows);
  if (blocks > 0)
    with_type(a.in.type, [&]<typename P>(Tag<P>) {
      const bool aligned = rows_aligned({a.d_out, a.in, a.q_norm, a.k_norm, a.rope, a.d_in}) &&
                           a.D / 2 % kWidth<P> == 0;
      with_width<kWidth<P>>(aligned, [&]<int W>(Width<W>) {
        const int lanes = lanes_of_head(a.D, W);
        launch({stream, dim3(static_cast<unsigned>(blocks)), dim3(kHeadThreads),
                static_cast<size_t>(kHeadThreads / lanes * 2 * a.D) * sizeof(float)},
               qk_norm_rope_grad_kernel<P, W>, a, lanes);
      });
    });
  sum_columns(stream, a.parts, blocks, 2 * a.D, a.D, a.dq_norm, a.accumulate);
  sum_columns(stream, a.parts + a.D, blocks, 2 * a.D, a.D, a.dk_norm, a.accumulate);
}

}  // namespace qshard::cuda
