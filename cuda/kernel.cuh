// What the kernels share: launching, conversion to f32 in registers, accesses of W elements, sums
// over warps and blocks.
//
// Blocks have a multiple of 32 threads. All sums have a fixed order, so results are bitwise
// repeatable.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda/check_cuda.h"
#include "cuda/ptx.cuh"
#include "cuda/view.h"
#include "device/factors.h"

namespace qshard::cuda {

extern __shared__ __align__(128) unsigned char smem[];

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// --- launching
struct Launch {
  cudaStream_t stream;
  dim3 grid, block;
  size_t shared_bytes = 0;
};

inline constexpr size_t kSharedWithoutAsking = 48 << 10;

template <typename... Params, typename... Args>
void launch(const Launch& l, void (*kernel)(Params...), Args&&... args) {
  if (l.shared_bytes > kSharedWithoutAsking)
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(l.shared_bytes)));
  cudaLaunchConfig_t config = {};
  config.gridDim = l.grid;
  config.blockDim = l.block;
  config.dynamicSmemBytes = l.shared_bytes;
  config.stream = l.stream;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// Element-wise kernels: a thread has one chunk of W columns; grid y runs over the rows.
inline constexpr int kElementThreads = 128;
inline constexpr int64_t kMaxGridY = 65535;

inline Launch over_elements(cudaStream_t stream, int64_t rows, int64_t cols, int width) {
  const int64_t blocks = ceil_div(ceil_div(cols, width), kElementThreads);
  return {stream,
          dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(std::min(rows, kMaxGridY))),
          dim3(kElementThreads)};
}

// body(row, column, Width) for this thread's chunks; a row's last, incomplete one goes singly.
template <int W, typename F>
__device__ __forceinline__ void for_each_chunk(int64_t rows, int64_t cols, F&& body) {
  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * W;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    if (col + W <= cols) {
      body(row, col, Width<W>{});
    } else {
#pragma unroll 1
      for (int64_t c = col; c < cols; ++c) body(row, c, Width<1>{});
    }
  }
}

// --- f32 in registers, T in memory
__device__ __forceinline__ float value_of(const Factor& f) {
  return f.on_device ? *f.on_device : f.value;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16(x);
  else
    return __float2half(x);
}

// x as it reads back after being stored as a T.
template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

enum class Memory { device, device_once, shared };  // once: not touched again by this kernel

template <Memory kMemory>
__device__ __forceinline__ uint4 load_bits(const void* p) {
  if constexpr (kMemory == Memory::device) return load_16(p);
  if constexpr (kMemory == Memory::device_once) return load_16_once(p);
  return *static_cast<const uint4*>(p);
}
template <Memory kMemory>
__device__ __forceinline__ void store_bits(void* p, uint4 bits) {
  if constexpr (kMemory == Memory::device)
    store_16(p, bits);
  else if constexpr (kMemory == Memory::device_once)
    store_16_once(p, bits);
  else
    *static_cast<uint4*>(p) = bits;
}

// W elements at p as f32. W > 1: p is aligned to 16 bytes.
template <int W, Memory kMemory = Memory::device, typename T>
__device__ __forceinline__ void load(const T* p, float (&x)[W]) {
  if constexpr (W == 1) {
    x[0] = to_float(*p);
  } else {
    constexpr int kEach = 16 / sizeof(T);
    static_assert(W % kEach == 0);
#pragma unroll
    for (int part = 0; part < W / kEach; ++part) {
      const uint4 bits = load_bits<kMemory>(p + part * kEach);
      T values[kEach];
      std::memcpy(static_cast<void*>(values), &bits, 16);
#pragma unroll
      for (int i = 0; i < kEach; ++i) x[part * kEach + i] = to_float(values[i]);
    }
  }
}

template <int W, Memory kMemory = Memory::device, typename T>
__device__ __forceinline__ void store(T* p, const float (&x)[W]) {
  if constexpr (W == 1) {
    *p = from_float<T>(x[0]);
  } else {
    constexpr int kEach = 16 / sizeof(T);
    static_assert(W % kEach == 0);
#pragma unroll
    for (int part = 0; part < W / kEach; ++part) {
      T values[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) values[i] = from_float<T>(x[part * kEach + i]);
      uint4 bits;
      std::memcpy(&bits, static_cast<const void*>(values), 16);
      store_bits<kMemory>(p + part * kEach, bits);
    }
  }
}

// --- sums
inline constexpr unsigned kAllLanes = 0xffffffffu;

// Over groups of `lanes` neighbouring lanes (a power of two), to each of them.
template <typename T>
__device__ __forceinline__ T sum_over_lanes(T x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

// Over the block, to every thread. Contains barriers: all threads call it.
template <typename T>
__device__ T sum_over_block(T x) {
  __shared__ T of_warp[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = sum_over_lanes(x, 32);
  __syncthreads();  // an earlier call's values have been read
  if (lane == 0) of_warp[warp] = x;
  __syncthreads();
  return sum_over_lanes(lane < blockDim.x / 32 ? of_warp[lane] : T{0}, 32);
}

}  // namespace qshard::cuda
