#include "device_kernels.h"

#include <cuda_bf16.h>

#include "cuda/ptx.cuh"

namespace qshard::cuda {
extern __shared__ __align__(128) unsigned char smem[];
}

namespace cudasim_test {

using qshard::cuda::smem;

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), int blocks, int threads, size_t shared,
                   cudaStream_t stream, A... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS)
    block_sums_kernel(float* sums, const float* x, Fault fault) {
  __shared__ float tree[THREADS];
  const int i = static_cast<int>(threadIdx.x);
  for (int round = 0; round < 2; ++round) {
    if (fault != Fault::shared_uninitialised || i != 5)
      tree[i] = x[blockIdx.x * THREADS + threadIdx.x];
    if (fault == Fault::divergent_barrier && i < 32) {
      __syncthreads();
    } else if (fault != Fault::missing_barrier_before_read) {
      __syncthreads();
    }
    if (fault == Fault::early_exit_before_barrier && i >= 128) return;
    for (int half = THREADS / 2; half > 0; half /= 2) {
      if (i < half) tree[i] += tree[i + half];
      __syncthreads();
    }
    if (i == 100 && round == 0) sums[blockIdx.x] = tree[0];
    if (fault != Fault::missing_barrier_before_write) __syncthreads();
  }
}

cudaError_t block_sums(float* sums, const float* x, int blocks, Fault fault, cudaStream_t stream) {
  return launch(block_sums_kernel, blocks, THREADS, 0, stream, sums, x, fault);
}

__global__ void atomic_sum_kernel(float* total, const float* x, int n, Fault fault) {
  float sum = 0;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n;
       i += static_cast<int>(gridDim.x * blockDim.x))
    sum += x[i];
  const unsigned lanes = fault == Fault::divergent_shuffle && threadIdx.x % 32 < 16 ? 0xFFFFu : ~0u;
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(lanes, sum, distance);
  if (threadIdx.x % 32 != 0) return;
  if (fault == Fault::plain_add)
    *total += sum;
  else
    atomicAdd(total, sum);
}

cudaError_t atomic_sum(float* total, const float* x, int n, Fault fault, cudaStream_t stream) {
  return launch(atomic_sum_kernel, 4, 64, 0, stream, total, x, n, fault);
}

__global__ void scale_kernel(float* y, const float* x, float a, int n, Fault fault) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int end = fault == Fault::tail_off_by_one ? n + 1 : n;
  if (fault == Fault::misaligned_vector) {
    if (i == 0) *reinterpret_cast<float4*>(y) = *reinterpret_cast<const float4*>(x + 1);
    return;
  }
  if (i < end) y[i] = a * x[i];
}

cudaError_t scale(float* y, const float* x, float a, int n, Fault fault, cudaStream_t stream) {
  return launch(scale_kernel, n / 128 + 1, 128, 0, stream, y, x, a, n, fault);
}

constexpr int TILE = 128;  // vectors of 16 bytes, one a thread

__global__ void staged_copy_kernel(float4* y, const float4* x, int tiles, Fault fault) {
  float4* buffer = reinterpret_cast<float4*>(smem);
  const int i = static_cast<int>(threadIdx.x);
  qshard::cuda::copy_async<16>(&buffer[i], &x[i], true);
  qshard::cuda::copy_async_commit();
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles)
      qshard::cuda::copy_async<16>(&buffer[(tile + 1) % 2 * TILE + i], &x[(tile + 1) * TILE + i],
                                   true);
    qshard::cuda::copy_async_commit();
    if (fault != Fault::missing_copy_wait) qshard::cuda::copy_async_wait<1>();
    if (fault != Fault::missing_copy_barrier) __syncthreads();
    const int other = TILE - 1 - i;  // of another thread's copy
    const int shift = fault == Fault::shared_past_end && tile % 2 == 1 ? 1 : 0;
    y[tile * TILE + other] = buffer[tile % 2 * TILE + other + shift];
    __syncthreads();
  }
  qshard::cuda::copy_async_wait<0>();
}

cudaError_t staged_copy(float* y, const float* x, int tiles, Fault fault, cudaStream_t stream) {
  return launch(staged_copy_kernel, 1, TILE, 2 * TILE * sizeof(float4), stream,
                reinterpret_cast<float4*>(y), reinterpret_cast<const float4*>(x), tiles, fault);
}

template <class P>
__global__ void mma_kernel(float* d, const uint16_t* a, const uint16_t* b) {
  __shared__ __align__(16) uint16_t sa[16 * 16];
  __shared__ __align__(16) uint16_t sb[16 * 8];
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) sa[i] = a[i];
  for (int i = lane; i < 128; i += 32) sb[i] = b[i];
  __syncwarp();
  uint32_t fa[4], fb[4];
  qshard::cuda::load_matrices(fa, &sa[lane % 16 * 16 + lane / 16 * 8]);
  qshard::cuda::load_matrices_transposed(fb, &sb[lane % 16 * 8]);
  float sums[4] = {};
  const uint32_t first[2] = {fb[0], fb[1]};
  qshard::cuda::mma_16x8x16<P>(sums, fa, first);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

cudaError_t mma_product(float* d, const uint16_t* a, const uint16_t* b, bool bf16, cudaStream_t s) {
  return bf16 ? launch(mma_kernel<__nv_bfloat16>, 1, 32, 0, s, d, a, b)
              : launch(mma_kernel<__half>, 1, 32, 0, s, d, a, b);
}

__global__ void mma_tf32_kernel(float* d, const float* a, const float* b) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  uint32_t fa[4], fb[2];
  for (int i = 0; i < 4; ++i) fa[i] = __float_as_uint(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
  for (int i = 0; i < 2; ++i) fb[i] = __float_as_uint(b[(t + i * 4) * 8 + g]);
  float sums[4] = {};
  cudasim::mma_m16n8k8_tf32(sums, fa, fb, sums);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = sums[i];
}

cudaError_t mma_tf32_product(float* d, const float* a, const float* b, cudaStream_t stream) {
  return launch(mma_tf32_kernel, 1, 32, 0, stream, d, a, b);
}

__global__ void warp_functions_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned all = 0xFFFFFFFFu;
  int column = 0;
  const auto put = [&](int value) { out[column++ * 32 + lane] = value; };
  put(__shfl_sync(all, lane, 3));
  put(__shfl_sync(all, lane, 5, 8));
  put(__shfl_xor_sync(all, lane, 4));
  put(__shfl_up_sync(all, lane, 2));
  put(__shfl_up_sync(all, lane, 2, 8));
  put(__shfl_down_sync(all, lane, 2));
  put(__shfl_down_sync(all, lane, 2, 8));
  put(static_cast<int>(__ballot_sync(all, lane % 3 == 0)));
  put(__any_sync(all, lane == 7) * 2 + __all_sync(all, lane != 7));
  put(__reduce_max_sync(all, -lane) + static_cast<int>(__reduce_add_sync(all, 2u)));
}

cudaError_t warp_functions(int* out, cudaStream_t stream) {
  return launch(warp_functions_kernel, 1, 32, 0, stream, out);
}

__global__ void read_host_kernel(float* y, const float* value) { y[threadIdx.x] = *value; }

cudaError_t read_host(float* y, const float* host_value, cudaStream_t stream) {
  return launch(read_host_kernel, 1, 32, 0, stream, y, host_value);
}

}  // namespace cudasim_test
