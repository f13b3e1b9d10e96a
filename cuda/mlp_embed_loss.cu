// Embedding, SwiGLU and cross-entropy. Shapes as in device/ops.h.
//
// Bytes moved in device memory per element, against the minimum, with P of 2 bytes and R of 4:
//   embedding        2 + 4        the minimum
//   embedding_grad   4 + 8        the minimum for ids that occur once; repeated rows stay in L2.
//   Besides,
//                                 every one of kBuckets blocks reads all ids (4 bytes each, from
//                                 L2): 64 MiB for 16,384 tokens, which takes about as long as the
//                                 rows.
//   swiglu           4 + 2        the minimum
//   swiglu_grad      2 + 4 + 4    the minimum
//   cross_entropy    8 + 2        a row of 10⁵ logits does not fit on an SM, so it is read twice;
//   the
//                                 minimum is 4 + 2, and a part of the second reading comes from L2
#include "cuda/kernel.cuh"
#include "cuda/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int32_t kIgnoredLabel = -100;

// --- embedding
template <typename R, typename P, int W>
__global__ void __launch_bounds__(kElementThreads)
    embedding_kernel(const int32_t* ids, View w, View x) {
  for_each_chunk<W>(x.rows, x.cols, [&]<int N>(int64_t n, int64_t c, Width<N>) {
    float v[N];
    load<N>(w.as<P>() + ids[n] * w.ld + c, v);
    store<N>(x.as<R>() + n * x.ld + c, v);
  });
}

// [Note: Embedding gradient]
// A block owns the vocabulary rows with id % kBuckets == blockIdx.x. It scans the ids a tile at a
// time, lists its own tokens of the tile in token order, and adds their gradient rows one after the
// other. A thread always has the same columns, so each element is summed in token order, without
// atomics, scratch or a sort, and the result is bitwise that of a serial loop. Ids of text are
// skewed towards small numbers, which the modulus spreads over the blocks.
constexpr int kBuckets = 1024, kScanThreads = 256, kIdsPerThread = 4;
constexpr int kIdTile = kScanThreads * kIdsPerThread;

struct TokenList {
  int count;
  int of_warp[kScanThreads / 32];  // tokens that each warp found
  int tokens[kIdTile];
};

// The tokens of the tile at `begin` that are in this block's bucket, in order. The tile before may
// still be in use: its list is overwritten only after the first barrier.
__device__ void list_tokens(const int32_t* ids, int64_t N, int64_t begin, TokenList& list) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t first = begin + int64_t{threadIdx.x} * kIdsPerThread;
  bool mine[kIdsPerThread];
  int found = 0;
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i) {
    mine[i] = first + i < N && ids[first + i] % kBuckets == static_cast<int>(blockIdx.x);
    found += mine[i];
  }
  int upto = found;  // found by this lane and those before it
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, upto, distance);
    if (lane >= distance) upto += before;
  }
  if (lane == 31) list.of_warp[warp] = upto;
  __syncthreads();
  int at = upto - found;
  for (int w = 0; w < warp; ++w) at += list.of_warp[w];
  if (threadIdx.x == kScanThreads - 1) list.count = at + found;
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i)
    if (mine[i]) list.tokens[at++] = static_cast<int>(first + i - begin);
  __syncthreads();
}

template <typename R, int W>
__global__ void __launch_bounds__(kScanThreads)
    embedding_grad_kernel(const int32_t* ids, View dx, View dw) {
  __shared__ TokenList list;
  for (int64_t begin = 0; begin < dx.rows; begin += kIdTile) {
    list_tokens(ids, dx.rows, begin, list);
    for (int i = 0; i < list.count; ++i) {
      const int64_t n = begin + list.tokens[i];
      const R* from = dx.as<R>() + n * dx.ld;
      float* to = dw.as<float>() + ids[n] * dw.ld;
      for (int64_t c = int64_t{threadIdx.x} * W; c < dx.cols; c += kScanThreads * W) {
        float v[W], sum[W];
        load<W>(from + c, v);
        load<W>(to + c, sum);
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] += v[j];
        store<W>(to + c, sum);
      }
    }
  }
}

// --- SwiGLU
__device__ __forceinline__ float sigmoid(float x) { return divide_fast(1.f, 1.f + expf(-x)); }

template <typename P, int W>
__global__ void __launch_bounds__(kElementThreads) swiglu_kernel(View gu, View a) {
  for_each_chunk<W>(a.rows, a.cols, [&]<int N>(int64_t n, int64_t c, Width<N>) {
    float gate[N], up[N];
    load<N>(gu.as<P>() + n * gu.ld + c, gate);
    load<N>(gu.as<P>() + n * gu.ld + a.cols + c, up);
#pragma unroll
    for (int i = 0; i < N; ++i) up[i] *= gate[i] * sigmoid(gate[i]);
    store<N>(a.as<P>() + n * a.ld + c, up);
  });
}

// d_gu may be gu: a thread reads its elements before it writes them.
template <typename P, int W>
__global__ void __launch_bounds__(kElementThreads) swiglu_grad_kernel(View da, View gu, View d_gu) {
  for_each_chunk<W>(da.rows, da.cols, [&]<int N>(int64_t n, int64_t c, Width<N>) {
    float d[N], gate[N], up[N];
    load<N>(da.as<P>() + n * da.ld + c, d);
    load<N>(gu.as<P>() + n * gu.ld + c, gate);
    load<N>(gu.as<P>() + n * gu.ld + da.cols + c, up);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = sigmoid(gate[i]), silu = gate[i] * s;
      gate[i] = d[i] * up[i] * (s + silu * (1.f - s));
      up[i] = d[i] * silu;
    }
    store<N>(d_gu.as<P>() + n * d_gu.ld + c, gate);
    store<N>(d_gu.as<P>() + n * d_gu.ld + da.cols + c, up);
  });
}

// --- cross-entropy, one block a row
constexpr int kLossThreads = 512;

// Running Σ exp(x − max) of some of a row.
struct Softmax {
  float max, sum;
};

// A NaN must survive: fmaxf drops it from the maximum, but the sum keeps it.
__device__ __forceinline__ Softmax merged(Softmax a, Softmax b) {
  const float top = fmaxf(a.max, b.max);
  if (top == -INFINITY) return {top, a.sum + b.sum};
  return {top, a.sum * expf(a.max - top) + b.sum * expf(b.max - top)};
}

__device__ Softmax merged_over_block(Softmax s) {
  __shared__ Softmax of_warp[kLossThreads / 32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int turn = 0;; ++turn) {
    for (int distance = 16; distance > 0; distance /= 2)
      s = merged(s, {__shfl_xor_sync(kAllLanes, s.max, distance),
                     __shfl_xor_sync(kAllLanes, s.sum, distance)});
    if (turn == 1) return s;
    if (lane == 0) of_warp[warp] = s;
    __syncthreads();
    s = lane < kLossThreads / 32 ? of_warp[lane] : Softmax{-INFINITY, 0};
  }
}

template <int W>
__device__ Softmax softmax_of_row(const float* x, int64_t V) {
  Softmax s = {-INFINITY, 0};
  for (int64_t c = int64_t{threadIdx.x} * W; c < V; c += kLossThreads * W) {
    float v[W], top = s.max;
    load<W>(x + c, v);
#pragma unroll
    for (int i = 0; i < W; ++i) top = fmaxf(top, v[i]);
    const float shift = top == -INFINITY ? 0.f : top;  // −∞ so far: exp(−∞ − 0) = 0
    s.sum *= expf(s.max - shift);
#pragma unroll
    for (int i = 0; i < W; ++i) s.sum += expf(v[i] - shift);
    s.max = top;
  }
  return s;
}

// d_logits may lie over logits from the same row start. A turn reads kLossThreads·W logits, then
// writes as many narrower (or equal) elements, which lie over logits of this or earlier turns: one
// barrier between reading and writing is enough.
template <typename P, int W>
__global__ void __launch_bounds__(kLossThreads)
    cross_entropy_kernel(View logits, const int32_t* labels, Factor given_scale, View d_logits,
                         float* loss) {
  const int64_t n = blockIdx.x, V = logits.cols;
  const float* x = logits.as<float>() + n * logits.ld;
  P* d = d_logits.data ? d_logits.as<P>() + n * d_logits.ld : nullptr;
  const int32_t label = labels[n];
  const bool kept = label != kIgnoredLabel;
  const bool known = label >= 0 && label < V;

  Softmax s = {};
  float at_label = 0;
  if (kept) {
    s = merged_over_block(softmax_of_row<W>(x, V));
    // The host cannot check labels without waiting for them: an impossible one makes the loss NaN.
    at_label = known ? x[label] : NAN;
  }
  if (threadIdx.x == 0) loss[n] = kept ? logf(s.sum) + (s.max - at_label) : 0.f;
  if (!d) return;
  const float scale = value_of(given_scale);
  const float factor = kept ? scale / s.sum : 0.f;
  for (int64_t turn = 0; turn < V; turn += kLossThreads * W) {
    const int64_t c = turn + int64_t{threadIdx.x} * W;
    float v[W] = {};
    if (kept && c < V) {
      load<W>(x + c, v);
#pragma unroll
      for (int i = 0; i < W; ++i)
        v[i] = expf(v[i] - s.max) * factor - (c + i == label ? scale : 0.f);
    }
    __syncthreads();
    if (c < V) store<W>(d + c, v);
  }
}

}  // namespace

void embedding(cudaStream_t stream, const int32_t* ids, View w, View x) {
  if (x.rows == 0) return;
  with_types(x.type, w.type, [&]<typename R, typename P>(Tag<R>, Tag<P>) {
    with_width<kWidth<R, P>>(rows_aligned({w, x}), [&]<int W>(Width<W>) {
      launch(over_elements(stream, x.rows, x.cols, W), embedding_kernel<R, P, W>, ids, w, x);
    });
  });
}

void embedding_grad(cudaStream_t stream, const int32_t* ids, View dx, View dw) {
  if (dx.rows == 0) return;
  with_type(dx.type, [&]<typename R>(Tag<R>) {
    const bool aligned = rows_aligned({dx, dw}) && dx.cols % kWidth<R> == 0;
    with_width<kWidth<R>>(aligned, [&]<int W>(Width<W>) {
      const auto blocks = static_cast<unsigned>(std::min<int64_t>(kBuckets, dw.rows));
      launch({stream, dim3(blocks), dim3(kScanThreads)}, embedding_grad_kernel<R, W>, ids, dx, dw);
    });
  });
}

void swiglu(cudaStream_t stream, View gu, View a) {
  if (a.rows == 0) return;
  with_type(a.type, [&]<typename P>(Tag<P>) {
    const bool aligned = rows_aligned({gu, a}) && a.cols % kWidth<P> == 0;
    with_width<kWidth<P>>(aligned, [&]<int W>(Width<W>) {
      launch(over_elements(stream, a.rows, a.cols, W), swiglu_kernel<P, W>, gu, a);
    });
  });
}

void swiglu_grad(cudaStream_t stream, View da, View gu, View d_gu) {
  if (da.rows == 0) return;
  with_type(da.type, [&]<typename P>(Tag<P>) {
    const bool aligned = rows_aligned({da, gu, d_gu}) && da.cols % kWidth<P> == 0;
    with_width<kWidth<P>>(aligned, [&]<int W>(Width<W>) {
      launch(over_elements(stream, da.rows, da.cols, W), swiglu_grad_kernel<P, W>, da, gu, d_gu);
    });
  });
}

void cross_entropy(cudaStream_t stream, View logits, const int32_t* labels, Factor scale,
                   View d_logits, float* loss) {
  if (logits.rows == 0) return;
  // One for all types, so that the order of the sums is the same with and without a gradient.
  constexpr int kLossWidth = 8;
  with_type(d_logits.data ? d_logits.type : Type::f32, [&]<typename P>(Tag<P>) {
    const bool aligned = rows_aligned({logits, d_logits}) && logits.cols % kLossWidth == 0;
    with_width<kLossWidth>(aligned, [&]<int W>(Width<W>) {
      launch({stream, dim3(static_cast<unsigned>(logits.rows)), dim3(kLossThreads)},
             cross_entropy_kernel<P, W>, logits, labels, scale, d_logits, loss);
    });
  });
}

}  // namespace qshard::cuda
