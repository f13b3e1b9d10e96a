// AdamW, sums, casts and initial values: element-wise work on contiguous pieces.
//
// Bytes moved in device memory per element, all at the minimum:
//   adamw              16 + 12, + 2 for the new parameter in P
//   add_sum            4        the 8 KiB of partial sums stay in L2
//   cast               size of both types
//   sum_parts          size of all parts + 4, + 4 when accumulating
//   fill, init_normal  size of the type
#include <Random123/philox.h>
#include <Random123/boxmuller.hpp>

#include "cuda/kernel.cuh"
#include "cuda/kernels.h"

namespace qshard::cuda {
namespace {

// PyTorch's AdamW; the factors are computed on the host in double.
template <typename P, int W>
__global__ void __launch_bounds__(kElementThreads) adamw_kernel(AdamW a) {
  const AdamWFactors f = a.on_device ? *a.on_device : a.factors;
  for_each_chunk<W>(1, a.n, [&]<int N>(int64_t, int64_t i, Width<N>) {
    float p[N], g[N], m[N], v[N];
    load<N, Memory::device_once>(a.p + i, p);
    load<N, Memory::device_once>(a.g + i, g);
    load<N, Memory::device_once>(a.m + i, m);
    load<N, Memory::device_once>(a.v + i, v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float grad = g[j] * f.grad_scale;
      m[j] += (grad - m[j]) * (1.f - a.beta1);
      v[j] = v[j] * a.beta2 + grad * grad * (1.f - a.beta2);
      p[j] = p[j] * f.decay - m[j] / (sqrtf(v[j]) * f.root_scale + a.eps) * f.step_size;
    }
    store<N, Memory::device_once>(a.m + i, m);
    store<N, Memory::device_once>(a.v + i, v);
    store<N, Memory::device_once>(a.p + i, p);
    if (a.p_out.data) store<N>(a.p_out.as<P>() + i, p);
  });
}

// --- Σ x or Σ x² in f64: at most kSumBlocks partial sums whose elements depend on n and alignment
// alone, then their sum.
constexpr int kSumThreads = 256;

template <Summand kSummand>
__device__ __forceinline__ double summand(float x) {
  return kSummand == Summand::square ? double{x} * double{x} : double{x};
}

template <Summand kSummand, int W>
__global__ void __launch_bounds__(kSumThreads)
    partial_sums_kernel(const float* x, int64_t n, double* parts) {
  double sum = 0;
  const int64_t first = (int64_t{blockIdx.x} * kSumThreads + threadIdx.x) * W;
  for (int64_t i = first; i < n; i += int64_t{kSumBlocks} * kSumThreads * W) {
    float v[W] = {};
    if (i + W <= n) {
      load<W>(x + i, v);
    } else {
      for (int j = 0; i + j < n; ++j) v[j] = x[i + j];
    }
#pragma unroll
    for (int j = 0; j < W; ++j) sum += summand<kSummand>(v[j]);
  }
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kSumBlocks)
    add_partial_sums_kernel(const double* parts, int count, double* total) {
  const int i = static_cast<int>(threadIdx.x);
  const double sum = sum_over_block(i < count ? parts[i] : 0.0);
  if (threadIdx.x == 0) *total += sum;
}

template <typename From, typename To, int W>
__global__ void __launch_bounds__(kElementThreads) cast_kernel(View from, View to) {
  for_each_chunk<W>(from.rows, from.cols, [&]<int N>(int64_t row, int64_t c, Width<N>) {
    float v[N];
    load<N, Memory::device_once>(from.as<From>() + row * from.ld + c, v);
    store<N>(to.as<To>() + row * to.ld + c, v);
  });
}

template <typename P, int W>
__global__ void __launch_bounds__(kElementThreads) sum_parts_kernel(SumParts a) {
  const float scale = value_of(a.scale);
  for_each_chunk<W>(1, a.n, [&]<int N>(int64_t, int64_t i, Width<N>) {
    float sum[N] = {}, v[N];
    for (int part = 0; part < a.count; ++part) {
      load<N, Memory::device_once>(static_cast<const P*>(a.parts[part]) + i, v);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += v[j];
    }
    float out[N] = {};
    if (a.accumulate) load<N>(a.out + i, out);
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] += sum[j] * scale;
    store<N>(a.out + i, out);
  });
}

template <typename T, int W>
__global__ void __launch_bounds__(kElementThreads) fill_kernel(View out, float value) {
  for_each_chunk<W>(1, out.cols, [&]<int N>(int64_t, int64_t i, Width<N>) {
    float v[N];
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = value;
    store<N>(out.as<T>() + i, v);
  });
}

// Element j of the tensor is number j % 4 of Philox block j / 4, as on the CPU; a thread has a
// block.
__global__ void __launch_bounds__(kElementThreads) init_normal_kernel(InitNormal a) {
  const int64_t block =
      a.first / 4 + int64_t{blockIdx.x} * kElementThreads + static_cast<int64_t>(threadIdx.x);
  const int64_t last = a.first + a.n;
  if (4 * block >= last) return;
  const auto index = static_cast<uint64_t>(block);
  const r123::Philox4x32::ctr_type counter{
      {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
       static_cast<uint32_t>(a.stream), static_cast<uint32_t>(a.stream >> 32)}};
  const r123::Philox4x32::key_type key{
      {static_cast<uint32_t>(a.seed), static_cast<uint32_t>(a.seed >> 32)}};
  const auto random = r123::Philox4x32()(counter, key);
  const auto x = r123::boxmuller(random[0], random[1]), y = r123::boxmuller(random[2], random[3]);
  const float normal[4] = {x.x, x.y, y.x, y.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t j = 4 * block + i;
    if (j >= a.first && j < last) a.out[j - a.first] = a.std * normal[i];
  }
}

bool aligned(std::initializer_list<const void*> pieces) {
  return std::all_of(pieces.begin(), pieces.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

}  // namespace

void adamw(cudaStream_t stream, const AdamW& a) {
  if (a.n == 0) return;
  with_type(a.p_out.data ? a.p_out.type : Type::f32, [&]<typename P>(Tag<P>) {
    with_width<kWidth<P>>(aligned({a.p, a.g, a.m, a.v, a.p_out.data}), [&]<int W>(Width<W>) {
      launch(over_elements(stream, 1, a.n, W), adamw_kernel<P, W>, a);
    });
  });
}

void add_sum(cudaStream_t stream, const float* x, int64_t n, Summand summand, double* parts,
             double* total) {
  if (n == 0) return;
  with_width<4>(aligned({x}), [&]<int W>(Width<W>) {
    const int64_t chunks = (n + kSumThreads * W - 1) / (kSumThreads * W);
    const int blocks = static_cast<int>(std::min<int64_t>(kSumBlocks, chunks));
    launch({stream, dim3(blocks), dim3(kSumThreads)},
           summand == Summand::square ? partial_sums_kernel<Summand::square, W>
                                      : partial_sums_kernel<Summand::value, W>,
           x, n, parts);
    launch({stream, dim3(1), dim3((blocks + 31) / 32 * 32)}, add_partial_sums_kernel, parts, blocks,
           total);
  });
}

void cast(cudaStream_t stream, View from, View to) {
  if (from.rows == 0 || from.cols == 0) return;
  with_type(from.type, [&]<typename From>(Tag<From>) {
    with_type(to.type, [&]<typename To>(Tag<To>) {
      with_width<kWidth<From, To>>(rows_aligned({from, to}), [&]<int W>(Width<W>) {
        launch(over_elements(stream, from.rows, from.cols, W), cast_kernel<From, To, W>, from, to);
      });
    });
  });
}

void sum_parts(cudaStream_t stream, const SumParts& a) {
  if (a.n == 0) return;
  const bool vectors = aligned({a.out}) && std::all_of(a.parts, a.parts + a.count,
                                                       [](const void* p) { return aligned({p}); });
  with_type(a.type, [&]<typename P>(Tag<P>) {
    with_width<kWidth<P>>(vectors, [&]<int W>(Width<W>) {
      launch(over_elements(stream, 1, a.n, W), sum_parts_kernel<P, W>, a);
    });
  });
}

void fill(cudaStream_t stream, View out, float value) {
  if (out.cols == 0) return;
  with_type(out.type, [&]<typename T>(Tag<T>) {
    with_width<kWidth<T>>(aligned({out.data}), [&]<int W>(Width<W>) {
      launch(over_elements(stream, 1, out.cols, W), fill_kernel<T, W>, out, value);
    });
  });
}

void init_normal(cudaStream_t stream, const InitNormal& a) {
  if (a.n == 0) return;
  const int64_t blocks = ceil_div(a.first + a.n, 4) - a.first / 4;
  launch({stream, dim3(static_cast<unsigned>(ceil_div(blocks, kElementThreads))),
          dim3(kElementThreads)},
         init_normal_kernel, a);
}

}  // namespace qshard::cuda
