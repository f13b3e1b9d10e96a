// Causal attention with grouped kv heads on tensor cores: bf16 or fp16, head_dim 64 or 128.
//
// [Note: Tensor-core attention]
// FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691) with three kernels built from two
// warp-level products, in which every warp owns rows of the result:
//   s += a · bᵀ   multiply_rows: a and b are tiles in shared memory, D is summed over
//   o += p · b    multiply_scores: p is a result of the first product, still in registers
// and the tiles of the other operand stream through two buffers of shared memory by asynchronous
// copies.
//   forward   a block has kRows queries:  S = Q·Kᵀ, online softmax, O += P·V
//   dq        a block has kRows queries:  S = Q·Kᵀ, dP = dO·Vᵀ, dQ += dS·K
//   dk, dv    a block has kRows keys:     Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q
//             over all queries that see them and all query heads of the group
// with P = exp(S − lse) and dS = P·(dP − delta), delta = Σ_d dO·O. S and dP are computed twice in
// backward (7 products for 5): in return nothing is added across blocks, dq needs no f32 buffer,
// and the result is bitwise repeatable. Exponents are in base 2.
//
// Device memory: q, k, v, o, d_o once or from L2 (a block's K and V tiles are also those of its
// neighbours in time), gradients once: T² terms never leave the SM.
#include <cmath>

#include "cuda/kernel.cuh"
#include "cuda/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr float kLog2E = 1.44269504088896340736f;

// Rows of a block's own tile and of the streamed tiles. Forward takes 32 rows a warp, which halves
// the reads of shared memory for each product; backward has two more accumulators and takes 16.
template <int D>
struct Tiles {
  static constexpr int kForwardRows = 128, kGradRows = 64, kStreamed = D == 64 ? 64 : 32;
};

__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / 32; }
__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % 32; }

// --- tiles [rows][D] of 16-bit elements in shared memory. A row's chunks of 16 bytes are permuted
// by the row's number, so that the eight rows of an ldmatrix lie in different banks.
template <int D, typename P>
__device__ __forceinline__ P* chunk_of(P* tile, int row, int chunk) {
  return tile + row * D + ((chunk ^ (row & 7)) << 3);
}

// Starts to copy rows [first, first + kRows) of a head; rows from T on become zeros.
template <int kRows, int D, typename P>
__device__ __forceinline__ void start_tile(P* tile, const P* head, int64_t ld, int first, int T) {
  constexpr int kChunks = D / 8, kStep = kThreads / kChunks;
  static_assert(kStep % 8 == 0, "a thread's rows must have the same permutation");
  const int row = static_cast<int>(threadIdx.x) / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks;
  P* to = chunk_of<D>(tile, row, chunk);
  head += chunk * 8;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    const bool valid = first + row + i < T;
    copy_async<16>(to + i * D, head + (valid ? first + row + i : 0) * ld, valid);
  }
}

// --- products. A warp's result s [16·M][N]: s[m][n][…] is the fragment d of mma_16x8x16 for rows
// 16m… and columns 8n….
template <int M, int N>
using Fragments = float[M][N / 8][4];

// s += a · bᵀ with a [16·M][D] from row `a_row` of its tile, b [N][D].
template <int M, int N, int D, typename P>
__device__ __forceinline__ void multiply_rows(Fragments<M, N>& s, P* a, int a_row, P* b) {
  const int lane = lane_index();
#pragma unroll 4  // all 8 of D = 128 would need more registers than there are
  for (int k = 0; k < D / 16; ++k) {
    uint32_t left[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
      load_matrices(left[m], chunk_of<D>(a, a_row + 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      uint32_t r[4];
      load_matrices(r, chunk_of<D>(b, 16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_16x8x16<P>(s[m][2 * n], left[m], {r[0], r[1]});
        mma_16x8x16<P>(s[m][2 * n + 1], left[m], {r[2], r[3]});
      }
    }
  }
}

template <typename P>
__device__ __forceinline__ uint32_t packed(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<P, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    std::memcpy(&bits, &pair, 4);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    std::memcpy(&bits, &pair, 4);
  }
  return bits;
}

// o += p · b with p [16·M][N] rounded to P, b [N][D].
template <int M, int N, int D, typename P>
__device__ __forceinline__ void multiply_scores(Fragments<M, D>& o, const Fragments<M, N>& p,
                                                P* b) {
  const int lane = lane_index();
#pragma unroll
  for (int k = 0; k < N / 16; ++k) {
    uint32_t left[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        left[m][i] = packed<P>(p[m][2 * k + i / 2][i % 2 * 2], p[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t r[4];
      load_matrices_transposed(r, chunk_of<D>(b, 16 * k + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma_16x8x16<P>(o[m][2 * n], left[m], {r[0], r[1]});
        mma_16x8x16<P>(o[m][2 * n + 1], left[m], {r[2], r[3]});
      }
    }
  }
}

// f(element, row, column) of a warp's result.
template <int M, int N, typename F>
__device__ __forceinline__ void for_each_element(Fragments<M, N>& s, F&& f) {
  const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(s[m][n][i], 16 * m + g + i / 2 * 8, 8 * n + 2 * t + i % 2);
}

__device__ __forceinline__ float max_over_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Writes a warp's rows, scaled, to rows [first, T) of a head, through the warp's own rows of a tile
// that it no longer reads, so that device memory is written 16 bytes at a time.
template <int M, int D, typename P>
__device__ __forceinline__ void write_rows(const Fragments<M, D>& o, const float (&scale)[M][2],
                                           P* tile, int tile_row, P* head, int64_t ld, int first,
                                           int T) {
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
  __syncwarp();  // all lanes have read the tile
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        P* chunk = chunk_of<D>(tile, tile_row + 16 * m + g + 8 * half, n);
        *reinterpret_cast<uint32_t*>(chunk + 2 * t) =
            packed<P>(o[m][n][2 * half] * scale[m][half], o[m][n][2 * half + 1] * scale[m][half]);
      }
  __syncwarp();
  constexpr int kChunks = D / 8;
#pragma unroll
  for (int i = lane; i < 16 * M * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first + row < T)
      store_16(head + (first + row) * ld + chunk * 8,
               load_bits<Memory::shared>(chunk_of<D>(tile, tile_row + row, chunk)));
  }
}

// --- forward
template <int M>
struct RowSoftmax {
  float max[M][2], sum[M][2];  // of rows 16m + g and 16m + g + 8; sum: this lane's columns only
};

// s becomes exp(scale·(s − max)); o is rescaled when the maximum of a row grows.
template <int M, int N, int D>
__device__ __forceinline__ void softmax(Fragments<M, N>& s, Fragments<M, D>& o,
                                        RowSoftmax<M>& state, float scale_log2) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = state.max[m][half];
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
        top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      top = max_over_quad(top);
      // top is finite: key 0, in the first tile, is seen by every query.
      const float correction = exp2_fast((state.max[m][half] - top) * scale_log2);
      const float shift = top * scale_log2;
      float sum = state.sum[m][half] * correction;
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[m][n][i] = exp2_fast(fmaf(s[m][n][i], scale_log2, -shift));
          sum += s[m][n][i];
        }
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        o[m][n][2 * half] *= correction;
        o[m][n][2 * half + 1] *= correction;
      }
      state.max[m][half] = top;
      state.sum[m][half] = sum;
    }
}

// The head of one tensor: element (0, 0) of sequence b.
template <typename P>
__device__ __forceinline__ P* head_of(const View& x, int64_t b, int64_t T, int h, int D) {
  return x.as<P>() + b * T * x.ld + int64_t{h} * D;
}

// Grid: query blocks with the longest rows first, query heads, sequences.
template <typename P, int D>
__global__ void __launch_bounds__(kThreads, 2) attention_kernel(Attention a, float scale) {
  constexpr int kRows = Tiles<D>::kForwardRows, kKeys = Tiles<D>::kStreamed;
  constexpr int M = kRows / (16 * kWarps);
  const int T = static_cast<int>(a.T), h = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;
  const int warp_row = warp_index() * 16 * M;
  const P* k_head = head_of<P>(a.k, b, T, h / (a.H / a.K), D);
  const P* v_head = head_of<P>(a.v, b, T, h / (a.H / a.K), D);
  P* q_tile = reinterpret_cast<P*>(smem);  // [kRows][D]
  P* kv_tiles = q_tile + kRows * D;        // two of k [kKeys][D], v [kKeys][D]
  const auto start_stage = [&](int stage) {
    P* k_tile = kv_tiles + stage % 2 * 2 * kKeys * D;
    start_tile<kKeys, D>(k_tile, k_head, a.k.ld, stage * kKeys, T);
    start_tile<kKeys, D>(k_tile + kKeys * D, v_head, a.v.ld, stage * kKeys, T);
    copy_async_commit();
  };
  start_tile<kRows, D>(q_tile, head_of<P>(a.q, b, T, h, D), a.q.ld, first_row, T);
  start_stage(0);

  Fragments<M, D> o = {};
  RowSoftmax<M> state;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) state.max[m][half] = -INFINITY, state.sum[m][half] = 0;

  const int stages = (min(first_row + kRows, T) + kKeys - 1) / kKeys;
  for (int stage = 0; stage < stages; ++stage) {
    if (stage + 1 < stages) start_stage(stage + 1);
    if (stage + 1 < stages)
      copy_async_wait<1>();
    else
      copy_async_wait<0>();
    __syncthreads();  // every thread's part of this stage has arrived
    P* k_tile = kv_tiles + stage % 2 * 2 * kKeys * D;
    Fragments<M, kKeys> s = {};
    multiply_rows<M, kKeys, D>(s, q_tile, warp_row, k_tile);
    const int first_key = stage * kKeys;
    if (first_key + kKeys > first_row + warp_row + 1)  // crosses the diagonal
      for_each_element<M, kKeys>(s, [&](float& x, int row, int key) {
        if (first_key + key > first_row + warp_row + row) x = -INFINITY;
      });
    softmax<M, kKeys, D>(s, o, state, scale * kLog2E);
    multiply_scores<M, kKeys, D>(o, s, k_tile + kKeys * D);
    __syncthreads();  // the next turn's copies overwrite this stage
  }

  float inverse[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_over_lanes(state.sum[m][half], 4);
      const int row = first_row + warp_row + 16 * m + lane_index() / 4 + 8 * half;
      inverse[m][half] = 1.f / sum;
      if (lane_index() % 4 == 0 && row < T)
        a.lse[(b * a.H + h) * T + row] = state.max[m][half] * scale + logf(sum);
    }
  write_rows<M, D>(o, inverse, q_tile, warp_row, head_of<P>(a.o, b, T, h, D), a.o.ld,
                   first_row + warp_row, T);
}

// --- backward. s becomes dS: x is S, dp is dP.
__device__ __forceinline__ float score_gradient(float p, float dp, float delta) {
  return p * (dp - delta);
}

// lse (in base 2) and delta of the warp's rows g and g + 8; writes delta for the other kernel.
template <typename P, int D>
__device__ __forceinline__ void row_statistics(const Attention& a, int64_t b, int h, int first_row,
                                               float (&lse)[2], float (&delta)[2]) {
  const int T = static_cast<int>(a.T), t = lane_index() % 4;
  const P* o = head_of<P>(a.o, b, T, h, D);
  const P* d_o = head_of<P>(a.d_o, b, T, h, D);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane_index() / 4 + 8 * half;
    float sum = 0;
    if (row < T) {
#pragma unroll
      for (int c = 8 * t; c < D; c += 32) {
        float x[8], y[8];
        load<8>(o + row * a.o.ld + c, x);
        load<8>(d_o + row * a.d_o.ld + c, y);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
      }
    }
    const int64_t at = (b * a.H + h) * T + row;
    delta[half] = sum_over_lanes(sum, 4);
    lse[half] = row < T ? a.lse[at] * kLog2E : 0.f;
    if (t == 0 && row < T) a.delta[at] = delta[half];
  }
}

// Grid as in forward.
template <typename P, int D>
__global__ void __launch_bounds__(kThreads, 2) attention_dq_kernel(Attention a, float scale) {
  constexpr int kRows = Tiles<D>::kGradRows, kKeys = Tiles<D>::kStreamed;
  const int T = static_cast<int>(a.T), h = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;
  const int warp_row = warp_index() * 16;
  const P* k_head = head_of<P>(a.k, b, T, h / (a.H / a.K), D);
  const P* v_head = head_of<P>(a.v, b, T, h / (a.H / a.K), D);
  P* q_tile = reinterpret_cast<P*>(smem);  // [kRows][D]
  P* d_o_tile = q_tile + kRows * D;        // [kRows][D]
  P* kv_tiles = d_o_tile + kRows * D;      // two of k [kKeys][D], v [kKeys][D]
  const auto start_stage = [&](int stage) {
    P* k_tile = kv_tiles + stage % 2 * 2 * kKeys * D;
    start_tile<kKeys, D>(k_tile, k_head, a.k.ld, stage * kKeys, T);
    start_tile<kKeys, D>(k_tile + kKeys * D, v_head, a.v.ld, stage * kKeys, T);
    copy_async_commit();
  };
  start_tile<kRows, D>(q_tile, head_of<P>(a.q, b, T, h, D), a.q.ld, first_row, T);
  start_tile<kRows, D>(d_o_tile, head_of<P>(a.d_o, b, T, h, D), a.d_o.ld, first_row, T);
  start_stage(0);
  float lse[2], delta[2];
  row_statistics<P, D>(a, b, h, first_row + warp_row, lse, delta);

  Fragments<1, D> dq = {};
  const int stages = (min(first_row + kRows, T) + kKeys - 1) / kKeys;
  for (int stage = 0; stage < stages; ++stage) {
    if (stage + 1 < stages) start_stage(stage + 1);
    if (stage + 1 < stages)
      copy_async_wait<1>();
    else
      copy_async_wait<0>();
    __syncthreads();
    P* k_tile = kv_tiles + stage % 2 * 2 * kKeys * D;
    Fragments<1, kKeys> s = {}, dp = {};
    multiply_rows<1, kKeys, D>(s, q_tile, warp_row, k_tile);
    multiply_rows<1, kKeys, D>(dp, d_o_tile, warp_row, k_tile + kKeys * D);
    const int first_key = stage * kKeys, row = first_row + warp_row + lane_index() / 4;
    const bool masks = first_key + kKeys > first_row + warp_row + 1;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float p = exp2_fast(fmaf(s[0][n][i], scale * kLog2E, -lse[i / 2]));
        if (masks && first_key + 8 * n + lane_index() % 4 * 2 + i % 2 > row + i / 2 * 8) p = 0;
        s[0][n][i] = score_gradient(p, dp[0][n][i], delta[i / 2]);
      }
    multiply_scores<1, kKeys, D>(dq, s, k_tile);
    __syncthreads();
  }
  write_rows<1, D>(dq, {{scale, scale}}, q_tile, warp_row, head_of<P>(a.dq, b, T, h, D), a.dq.ld,
                   first_row + warp_row, T);
}

// Grid: key blocks (the first have the most queries), kv heads, sequences.
template <typename P, int D>
__global__ void __launch_bounds__(kThreads, 2) attention_dkdv_kernel(Attention a, float scale) {
  constexpr int kRows = Tiles<D>::kGradRows, kQueries = Tiles<D>::kStreamed;
  const int T = static_cast<int>(a.T), group = a.H / a.K, kv = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int first_key = static_cast<int>(blockIdx.x) * kRows;
  const int warp_row = warp_index() * 16;
  P* k_tile = reinterpret_cast<P*>(smem);  // [kRows][D]
  P* v_tile = k_tile + kRows * D;          // [kRows][D]
  P* q_tiles = v_tile + kRows * D;         // two of q [kQueries][D], d_o [kQueries][D]
  float* statistics = reinterpret_cast<float*>(q_tiles + 4 * kQueries * D);  // two of lse, delta

  // Stages: the query tiles from the diagonal on, for one head of the group after the other.
  const int first_tile = first_key / kQueries;
  const int tiles = (T + kQueries - 1) / kQueries - first_tile;
  const auto start_stage = [&](int stage) {
    const int h = kv * group + stage / tiles, first = (first_tile + stage % tiles) * kQueries;
    P* q_tile = q_tiles + stage % 2 * 2 * kQueries * D;
    start_tile<kQueries, D>(q_tile, head_of<P>(a.q, b, T, h, D), a.q.ld, first, T);
    start_tile<kQueries, D>(q_tile + kQueries * D, head_of<P>(a.d_o, b, T, h, D), a.d_o.ld, first,
                            T);
    if (threadIdx.x < 2 * kQueries) {
      const int query = first + static_cast<int>(threadIdx.x) % kQueries;
      const bool valid = query < T;
      // Of queries beyond T, lse, delta and d_o are 0: P is finite and multiplies zeros.
      const float* of_head = (threadIdx.x < kQueries ? a.lse : a.delta) + (b * a.H + h) * T;
      copy_async<4>(statistics + stage % 2 * 2 * kQueries + threadIdx.x,
                    of_head + (valid ? query : 0), valid);
    }
    copy_async_commit();
  };
  start_tile<kRows, D>(k_tile, head_of<P>(a.k, b, T, kv, D), a.k.ld, first_key, T);
  start_tile<kRows, D>(v_tile, head_of<P>(a.v, b, T, kv, D), a.v.ld, first_key, T);
  start_stage(0);

  Fragments<1, D> dk = {}, dv = {};
  const int stages = group * tiles;
  for (int stage = 0; stage < stages; ++stage) {
    if (stage + 1 < stages) start_stage(stage + 1);
    if (stage + 1 < stages)
      copy_async_wait<1>();
    else
      copy_async_wait<0>();
    __syncthreads();
    P* q_tile = q_tiles + stage % 2 * 2 * kQueries * D;
    P* d_o_tile = q_tile + kQueries * D;
    const float* lse = statistics + stage % 2 * 2 * kQueries;
    const float* delta = lse + kQueries;
    const int first_query = (first_tile + stage % tiles) * kQueries;
    const int key = first_key + warp_row + lane_index() / 4;
    const bool masks = first_query < first_key + warp_row + 15;

    Fragments<1, kQueries> s = {}, ds = {};  // [keys][queries]
    multiply_rows<1, kQueries, D>(s, k_tile, warp_row, q_tile);
    multiply_rows<1, kQueries, D>(ds, v_tile, warp_row, d_o_tile);
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = 8 * n + lane_index() % 4 * 2 + i % 2;
        float p = exp2_fast(fmaf(s[0][n][i], scale * kLog2E, -lse[query] * kLog2E));
        if (masks && key + i / 2 * 8 > first_query + query) p = 0;
        s[0][n][i] = p;
        ds[0][n][i] = score_gradient(p, ds[0][n][i], delta[query]);
      }
    multiply_scores<1, kQueries, D>(dv, s, d_o_tile);
    multiply_scores<1, kQueries, D>(dk, ds, q_tile);
    __syncthreads();
  }
  write_rows<1, D>(dk, {{scale, scale}}, k_tile, warp_row, head_of<P>(a.dk, b, T, kv, D), a.dk.ld,
                   first_key + warp_row, T);
  write_rows<1, D>(dv, {{1.f, 1.f}}, v_tile, warp_row, head_of<P>(a.dv, b, T, kv, D), a.dv.ld,
                   first_key + warp_row, T);
}

// f(Tag<P>, Width<D>) for the cases that have kernels.
template <typename F>
void with_case(const Attention& a, F&& f) {
  const auto with_dim = [&]<typename P>(Tag<P> p) {
    if (a.D == 64) return f(p, Width<64>{});
    return f(p, Width<128>{});
  };
  if (a.q.type == Type::bf16) return with_dim(Tag<__nv_bfloat16>{});
  return with_dim(Tag<__half>{});
}

Launch over_rows(cudaStream_t stream, const Attention& a, int rows, int heads,
                 size_t shared_bytes) {
  return {stream,
          dim3(static_cast<unsigned>(ceil_div(a.T, rows)), static_cast<unsigned>(heads),
               static_cast<unsigned>(a.B)),
          dim3(kThreads), shared_bytes};
}

float scale_of(const Attention& a) { return 1.f / std::sqrt(static_cast<float>(a.D)); }

}  // namespace

bool attention_on_tensor_cores(const Attention& a) {
  return a.q.type != Type::f32 && (a.D == 64 || a.D == 128) &&
         rows_aligned({a.q, a.k, a.v, a.o, a.d_o, a.dq, a.dk, a.dv});
}

void attention_tensor(cudaStream_t stream, const Attention& a) {
  with_case(a, [&]<typename P, int D>(Tag<P>, Width<D>) {
    using S = Tiles<D>;
    const size_t bytes = (S::kForwardRows + 4 * S::kStreamed) * D * sizeof(P);
    launch(over_rows(stream, a, S::kForwardRows, a.H, bytes), attention_kernel<P, D>, a,
           scale_of(a));
  });
}

void attention_tensor_grad(cudaStream_t stream, const Attention& a) {
  with_case(a, [&]<typename P, int D>(Tag<P>, Width<D>) {
    using S = Tiles<D>;
    const size_t bytes = (2 * S::kGradRows + 4 * S::kStreamed) * D * sizeof(P);
    const size_t statistics = 4 * S::kStreamed * sizeof(float);
    launch(over_rows(stream, a, S::kGradRows, a.H, bytes), attention_dq_kernel<P, D>, a,
           scale_of(a));
    launch(over_rows(stream, a, S::kGradRows, a.K, bytes + statistics), attention_dkdv_kernel<P, D>,
           a, scale_of(a));
  });
}

}  // namespace qshard::cuda
