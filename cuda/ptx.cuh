// Everything that is PTX or close to it: tensor-core products, ldmatrix, asynchronous copies,
// accesses of 16 bytes with cache hints, the fast exponential. Kernels contain none.
//
// The second half is the same interface on the simulator (test/cudasim), which executes these by
// their documented fragment layouts. A call there is identified by its place, hence the default
// arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace qshard::cuda {

#ifdef __CUDACC__

// d[16,8] += a[16,16] · b[16,8], f32 += bf16·bf16 or fp16·fp16. A lane's fragments (g = lane / 4,
// t = lane % 4): a[0…3] hold rows g, g+8, g, g+8 and columns 2t, 2t, 2t+8, 2t+8 (each with its
// right neighbour); b[0], b[1] rows 2t, 2t+8 (each with the next) of column g; d[0…3] rows g, g,
// g+8, g+8 and columns 2t, 2t+1, 2t, 2t+1.
template <typename P>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                           const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                    const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8×8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8 (16
// bytes, aligned). r[m] holds elements 2t and 2t+1 of row g of matrix m.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Starts a copy of kBytes from global to shared memory; writes zeros where not valid (the source
// must be an address of the allocation all the same).
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  static_assert(kBytes == 4 || kBytes == 16);
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the last kGroups of this thread's groups have arrived.
template <int kGroups>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// 2^x to about 2 ulp; subnormal results are flushed to zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / y to 2 ulp; 0 where y is above 2^126.
__device__ __forceinline__ float divide_fast(float x, float y) { return __fdividef(x, y); }

// 16 bytes of device memory, in one instruction (the compiler splits some plain accesses). _once:
// data that this kernel touches once, evicted first.
__device__ __forceinline__ uint4 load_16(const void* p) {
  return __ldca(static_cast<const uint4*>(p));
}
__device__ __forceinline__ uint4 load_16_once(const void* p) {
  return __ldcs(static_cast<const uint4*>(p));
}
__device__ __forceinline__ void store_16(void* p, uint4 x) { __stwb(static_cast<uint4*>(p), x); }
__device__ __forceinline__ void store_16_once(void* p, uint4 x) {
  __stcs(static_cast<uint4*>(p), x);
}

#else  // on the simulator

template <typename P>
inline void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                        CUDASIM_SITE) {
  if constexpr (std::is_same_v<P, __nv_bfloat16>)
    cudasim::mma_m16n8k16_bf16(d, a, b, d, file, line);
  else
    cudasim::mma_m16n8k16_fp16(d, a, b, d, file, line);
}
inline void load_matrices(uint32_t (&r)[4], const void* row, CUDASIM_SITE) {
  cudasim::ldmatrix(r, 4, false, row, file, line);
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row, CUDASIM_SITE) {
  cudasim::ldmatrix(r, 4, true, row, file, line);
}
template <int kBytes>
inline void copy_async(void* to, const void* from, bool valid) {
  static_assert(kBytes == 4 || kBytes == 16);
  cudasim::cp_async(to, from, kBytes, valid ? kBytes : 0);
}
inline void copy_async_commit() { cudasim::cp_async_commit(); }
template <int kGroups>
inline void copy_async_wait() {
  cudasim::cp_async_wait(kGroups);
}
inline float exp2_fast(float x) { return exp2f(x); }
inline float divide_fast(float x, float y) { return x / y; }
inline uint4 load_16(const void* p) { return *static_cast<const uint4*>(p); }
inline uint4 load_16_once(const void* p) { return *static_cast<const uint4*>(p); }
inline void store_16(void* p, uint4 x) { *static_cast<uint4*>(p) = x; }
inline void store_16_once(void* p, uint4 x) { *static_cast<uint4*>(p) = x; }

#endif

}  // namespace qshard::cuda
