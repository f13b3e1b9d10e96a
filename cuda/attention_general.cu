// Causal attention with grouped kv heads for any type and any even head_dim: plain f32 FMAs on
// tiles in shared memory. It is the path of f32 and of unusual shapes, made for exactness rather
// than speed: each product of two numbers reads one or two of them from shared memory.
//
// Scheme, names and determinism as in [Note: Tensor-core attention]: three kernels, online softmax,
// no sums across blocks, memory linear in T.
#include <cmath>

#include "cuda/kernel.cuh"
#include "cuda/kernels.h"

namespace qshard::cuda {
namespace {

// A block is kSide × kSide threads on tiles of kTile rows, so a thread has kTile/kSide rows and
// columns of a tile of scores. kTile = 32 where shared memory allows, 16 for a large head_dim.
constexpr int kSide = 16, kThreads = kSide * kSide;

// kTile rows of D floats in shared memory, padded against bank conflicts.
template <int kTile>
class Rows {
 public:
  static size_t floats(int D) { return static_cast<size_t>(kTile * (D + 1)); }
  // Takes its memory from the front of `memory`.
  __device__ Rows(float*& memory, int D) : data_(memory), D_(D) { memory += kTile * (D + 1); }
  __device__ float& at(int row, int d) const { return data_[row * (D_ + 1) + d]; }

  // Rows [first, first + kTile) of a head; zeros from T on.
  template <typename P>
  __device__ void load(const P* head, int64_t ld, int64_t first, int64_t T) const {
    for (int i = static_cast<int>(threadIdx.x); i < kTile * D_; i += kThreads) {
      const int row = i / D_, d = i % D_;
      at(row, d) = first + row < T ? to_float(head[(first + row) * ld + d]) : 0.f;
    }
  }
  template <typename P>
  __device__ void write(P* head, int64_t ld, int64_t first, int64_t T) const {
    for (int i = static_cast<int>(threadIdx.x); i < kTile * D_; i += kThreads) {
      const int row = i / D_, d = i % D_;
      if (first + row < T) head[(first + row) * ld + d] = from_float<P>(at(row, d));
    }
  }
  __device__ void clear() const {
    for (int i = static_cast<int>(threadIdx.x); i < kTile * (D_ + 1); i += kThreads) data_[i] = 0;
  }

 private:
  float* data_;
  int D_;
};

// f(row, column) for this thread's elements of a tile of scores.
template <int kTile, typename F>
__device__ __forceinline__ void for_each_score(F&& f) {
  for (int i = static_cast<int>(threadIdx.x) / kSide; i < kTile; i += kSide)
    for (int j = static_cast<int>(threadIdx.x) % kSide; j < kTile; j += kSide) f(i, j);
}

template <int kTile>
__device__ __forceinline__ float dot(const Rows<kTile>& a, int i, const Rows<kTile>& b, int j,
                                     int D) {
  float sum = 0;
  for (int d = 0; d < D; ++d) sum = fmaf(a.at(i, d), b.at(j, d), sum);
  return sum;
}

// out[i][d] = out[i][d]·keep[i] + Σ_j weight(i, j)·b[j][d]
template <int kTile, typename Weight>
__device__ __forceinline__ void add_product(const Rows<kTile>& out, Weight&& weight,
                                            const Rows<kTile>& b, int D,
                                            const float* keep = nullptr) {
  for (int i = static_cast<int>(threadIdx.x) / kSide; i < kTile; i += kSide)
    for (int d = static_cast<int>(threadIdx.x) % kSide; d < D; d += kSide) {
      float sum = keep ? out.at(i, d) * keep[i] : out.at(i, d);
      for (int j = 0; j < kTile; ++j) sum = fmaf(weight(i, j), b.at(j, d), sum);
      out.at(i, d) = sum;
    }
}

template <typename P>
__device__ __forceinline__ P* head_of(const View& x, int64_t b, int64_t T, int h, int D) {
  return x.as<P>() + b * T * x.ld + int64_t{h} * D;
}

template <typename P, int kTile>
__global__ void __launch_bounds__(kThreads) general_kernel(Attention a, float scale) {
  __shared__ float scores[kTile][kTile + 1], max[kTile], sum[kTile], keep[kTile];
  const int h = static_cast<int>(blockIdx.y), kv = h / (a.H / a.K), D = a.D;
  const int64_t b = blockIdx.z, first_row = int64_t{blockIdx.x} * kTile;
  float* memory = reinterpret_cast<float*>(smem);
  const Rows<kTile> q(memory, D), k(memory, D), v(memory, D), o(memory, D);
  q.load(head_of<P>(a.q, b, a.T, h, D), a.q.ld, first_row, a.T);
  o.clear();
  if (threadIdx.x < kTile) max[threadIdx.x] = -INFINITY, sum[threadIdx.x] = 0;

  for (int64_t first_key = 0; first_key <= first_row; first_key += kTile) {
    __syncthreads();  // the tiles of the turn before have been read
    k.load(head_of<P>(a.k, b, a.T, kv, D), a.k.ld, first_key, a.T);
    v.load(head_of<P>(a.v, b, a.T, kv, D), a.v.ld, first_key, a.T);
    __syncthreads();
    for_each_score<kTile>([&](int i, int j) {
      const bool seen = first_key + j <= first_row + i;
      scores[i][j] = seen ? dot(q, i, k, j, D) * scale : -INFINITY;
    });
    __syncthreads();
    if (threadIdx.x < kTile) {  // a thread a row
      float* row = scores[threadIdx.x];
      float top = max[threadIdx.x], total = 0;
      for (int j = 0; j < kTile; ++j) top = fmaxf(top, row[j]);
      for (int j = 0; j < kTile; ++j) total += row[j] = expf(row[j] - top);
      keep[threadIdx.x] = expf(max[threadIdx.x] - top);
      sum[threadIdx.x] = sum[threadIdx.x] * keep[threadIdx.x] + total;
      max[threadIdx.x] = top;
    }
    __syncthreads();
    add_product(
        o, [&](int i, int j) { return scores[i][j]; }, v, D, keep);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kTile * D; i += kThreads)
    o.at(i / D, i % D) /= sum[i / D];
  if (threadIdx.x < kTile && first_row + threadIdx.x < a.T)
    a.lse[(b * a.H + h) * a.T + first_row + threadIdx.x] =
        max[threadIdx.x] + logf(sum[threadIdx.x]);
  o.write(head_of<P>(a.o, b, a.T, h, D), a.o.ld, first_row, a.T);
}

// One tile of queries against one of keys: P and dS·scale, from tiles in shared memory.
template <int kTile>
struct ScoreTiles {
  float p[kTile][kTile + 1], ds[kTile][kTile + 1];
  float lse[kTile], delta[kTile];  // of the queries

  __device__ void compute(const Rows<kTile>& q, const Rows<kTile>& k, const Rows<kTile>& v,
                          const Rows<kTile>& d_o, int64_t first_query, int64_t first_key, int64_t T,
                          int D, float scale) {
    for_each_score<kTile>([&](int i, int j) {
      const bool seen = first_key + j <= first_query + i && first_query + i < T;
      const float weight = seen ? expf(dot(q, i, k, j, D) * scale - lse[i]) : 0.f;
      p[i][j] = weight;
      ds[i][j] = weight * (dot(d_o, i, v, j, D) - delta[i]) * scale;
    });
  }
};

template <typename P, int kTile>
__global__ void __launch_bounds__(kThreads) general_dq_kernel(Attention a, float scale) {
  __shared__ ScoreTiles<kTile> scores;
  const int h = static_cast<int>(blockIdx.y), kv = h / (a.H / a.K), D = a.D;
  const int64_t b = blockIdx.z, first_row = int64_t{blockIdx.x} * kTile;
  float* memory = reinterpret_cast<float*>(smem);
  const Rows<kTile> q(memory, D), d_o(memory, D), k(memory, D), v(memory, D), dq(memory, D);
  q.load(head_of<P>(a.q, b, a.T, h, D), a.q.ld, first_row, a.T);
  d_o.load(head_of<P>(a.d_o, b, a.T, h, D), a.d_o.ld, first_row, a.T);
  k.load(head_of<P>(a.o, b, a.T, h, D), a.o.ld, first_row, a.T);  // for delta only
  dq.clear();
  __syncthreads();
  if (threadIdx.x < kTile) {
    const int64_t row = first_row + threadIdx.x, at = (b * a.H + h) * a.T + row;
    const int i = static_cast<int>(threadIdx.x);
    scores.delta[i] = dot(d_o, i, k, i, D);
    scores.lse[i] = row < a.T ? a.lse[at] : 0.f;
    if (row < a.T) a.delta[at] = scores.delta[i];
  }
  for (int64_t first_key = 0; first_key <= first_row; first_key += kTile) {
    __syncthreads();
    k.load(head_of<P>(a.k, b, a.T, kv, D), a.k.ld, first_key, a.T);
    v.load(head_of<P>(a.v, b, a.T, kv, D), a.v.ld, first_key, a.T);
    __syncthreads();
    scores.compute(q, k, v, d_o, first_row, first_key, a.T, D, scale);
    __syncthreads();
    add_product(
        dq, [&](int i, int j) { return scores.ds[i][j]; }, k, D);
  }
  __syncthreads();
  dq.write(head_of<P>(a.dq, b, a.T, h, D), a.dq.ld, first_row, a.T);
}

template <typename P, int kTile>
__global__ void __launch_bounds__(kThreads) general_dkdv_kernel(Attention a, float scale) {
  __shared__ ScoreTiles<kTile> scores;
  const int kv = static_cast<int>(blockIdx.y), group = a.H / a.K, D = a.D;
  const int64_t b = blockIdx.z, first_key = int64_t{blockIdx.x} * kTile;
  float* memory = reinterpret_cast<float*>(smem);
  const Rows<kTile> k(memory, D), v(memory, D), q(memory, D), d_o(memory, D), dk(memory, D),
      dv(memory, D);
  k.load(head_of<P>(a.k, b, a.T, kv, D), a.k.ld, first_key, a.T);
  v.load(head_of<P>(a.v, b, a.T, kv, D), a.v.ld, first_key, a.T);
  dk.clear();
  dv.clear();
  for (int h = kv * group; h < (kv + 1) * group; ++h)
    for (int64_t first_query = first_key; first_query < a.T; first_query += kTile) {
      __syncthreads();
      q.load(head_of<P>(a.q, b, a.T, h, D), a.q.ld, first_query, a.T);
      d_o.load(head_of<P>(a.d_o, b, a.T, h, D), a.d_o.ld, first_query, a.T);
      if (threadIdx.x < kTile) {
        const int64_t query = first_query + threadIdx.x, at = (b * a.H + h) * a.T + query;
        scores.lse[threadIdx.x] = query < a.T ? a.lse[at] : 0.f;
        scores.delta[threadIdx.x] = query < a.T ? a.delta[at] : 0.f;
      }
      __syncthreads();
      scores.compute(q, k, v, d_o, first_query, first_key, a.T, D, scale);
      __syncthreads();
      add_product(
          dv, [&](int i, int j) { return scores.p[j][i]; }, d_o, D);
      add_product(
          dk, [&](int i, int j) { return scores.ds[j][i]; }, q, D);
    }
  __syncthreads();
  dk.write(head_of<P>(a.dk, b, a.T, kv, D), a.dk.ld, first_key, a.T);
  dv.write(head_of<P>(a.dv, b, a.T, kv, D), a.dv.ld, first_key, a.T);
}

// f(Tag<P>, Width<kTile>) with the largest tile whose `tiles` tiles of rows fit an SM of 8.0.
template <typename F>
void with_tile(const Attention& a, int tiles, F&& f) {
  constexpr size_t kShared = (163 << 10) - sizeof(ScoreTiles<32>) - 1024;
  with_type(a.q.type, [&]<typename P>(Tag<P> p) {
    if (tiles * Rows<32>::floats(a.D) * sizeof(float) <= kShared)
      f(p, Width<32>{}, tiles * Rows<32>::floats(a.D) * sizeof(float));
    else
      f(p, Width<16>{}, tiles * Rows<16>::floats(a.D) * sizeof(float));
  });
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

void attention_general(cudaStream_t stream, const Attention& a) {
  with_tile(a, 4, [&]<typename P, int kTile>(Tag<P>, Width<kTile>, size_t bytes) {
    launch(over_rows(stream, a, kTile, a.H, bytes), general_kernel<P, kTile>, a, scale_of(a));
  });
}

void attention_general_grad(cudaStream_t stream, const Attention& a) {
  with_tile(a, 5, [&]<typename P, int kTile>(Tag<P>, Width<kTile>, size_t bytes) {
    launch(over_rows(stream, a, kTile, a.H, bytes), general_dq_kernel<P, kTile>, a, scale_of(a));
  });
  with_tile(a, 6, [&]<typename P, int kTile>(Tag<P>, Width<kTile>, size_t bytes) {
    launch(over_rows(stream, a, kTile, a.K, bytes), general_dkdv_kernel<P, kTile>, a, scale_of(a));
  });
}

}  // namespace qshard::cuda
