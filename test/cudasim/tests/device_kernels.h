// Small kernels, each with the faults that can be planted in it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cudasim_test {

enum class Fault : int {
  none,
  missing_barrier_before_read,
  missing_barrier_before_write,
  divergent_barrier,
  early_exit_before_barrier,
  plain_add,
  missing_copy_wait,
  missing_copy_barrier,
  tail_off_by_one,
  shared_past_end,
  shared_uninitialised,
  divergent_shuffle,
  misaligned_vector,
};

// sums[block] = Σ of the block's 256 elements of x, by a tree in shared memory, twice.
cudaError_t block_sums(float* sums, const float* x, int blocks, Fault fault, cudaStream_t stream);
// *total += Σ x[0…n)
cudaError_t atomic_sum(float* total, const float* x, int n, Fault fault, cudaStream_t stream);
// y[i] = a·x[i] for i < n
cudaError_t scale(float* y, const float* x, float a, int n, Fault fault, cudaStream_t stream);
// y = x through double-buffered cp.async tiles of 128 × 16 bytes
cudaError_t staged_copy(float* y, const float* x, int tiles, Fault fault, cudaStream_t stream);
// d[16,8] = a[16,K] · b[K,8], row-major, with ldmatrix and mma. 16-bit elements as raw bits.
cudaError_t mma_product(float* d, const uint16_t* a, const uint16_t* b, bool bf16, cudaStream_t s);
cudaError_t mma_tf32_product(float* d, const float* a, const float* b, cudaStream_t stream);
// out[i] = lane results of each warp collective, 32 × 10 values
cudaError_t warp_functions(int* out, cudaStream_t stream);
// y[i] = *host_value, which is host memory
cudaError_t read_host(float* y, const float* host_value, cudaStream_t stream);

}  // namespace cudasim_test
