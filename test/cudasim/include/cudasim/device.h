// The device language for a host compiler: qualifiers, indices, barriers, warp collectives, atomics
// and the intrinsics that the kernels use. What is missing here is refused by the compiler.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <type_traits>

#include "cudasim/site.h"

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
#define __grid_constant__
// One block runs at a time, on one OS thread: its shared memory is that thread's.
#define __shared__ thread_local

// Of the thread that runs; rewritten at each switch.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cudasim {

int block_barrier(const char* name, int value, Site site);
void warp_sync(uint32_t mask, Site site);
// Replaces `value` by that of the source lane.
void warp_shuffle(const char* name, uint32_t mask, void* value, size_t bytes, int source_lane,
                  Site site);
enum class WarpFold : uint8_t { bit_or, bit_and, add, max_signed, max_unsigned };
uint32_t warp_fold(const char* name, uint32_t mask, uint32_t value, WarpFold fold, Site site);
int lane_index();

// Before an atomic read-modify-write of `bytes` at `address`.
void note_atomic(void* address, size_t bytes);
[[noreturn]] void trap();

// The source lane of a shuffle stays within its segment of `width` lanes, else it is the own lane.
inline int within_segment(int lane, int source, int width) {
  return source / width == lane / width ? source : lane;
}

template <class T, class Update>
__attribute__((no_sanitize("thread"))) T atomic_update(T* address, Update update) {
  note_atomic(address, sizeof(T));
  const T old = *address;
  *address = update(old);
  return old;
}

}  // namespace cudasim

// --- barriers and fences
inline void __syncthreads(CUDASIM_SITE) {
  cudasim::block_barrier("__syncthreads", 0, {file, line});
}
inline int __syncthreads_count(int predicate, CUDASIM_SITE) {
  return cudasim::block_barrier("__syncthreads_count", predicate != 0, {file, line});
}
inline int __syncthreads_or(int predicate, CUDASIM_SITE) {
  return cudasim::block_barrier("__syncthreads_or", predicate != 0, {file, line}) != 0;
}
inline int __syncthreads_and(int predicate, CUDASIM_SITE) {
  return cudasim::block_barrier("__syncthreads_and", predicate == 0, {file, line}) == 0;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, CUDASIM_SITE) {
  cudasim::warp_sync(mask, {file, line});
}
// Fences order a thread's own accesses, which the simulator executes in program order. They do not
// make a hand-over between blocks legal here: the tracker reports that as a race.
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __threadfence_system() {}

// --- warp collectives
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDASIM_SITE) {
  const int lane = cudasim::lane_index();
  const int from = lane / width * width + (source & (width - 1));
  cudasim::warp_shuffle("__shfl_sync", mask, &value, sizeof(T), from, {file, line});
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDASIM_SITE) {
  const int lane = cudasim::lane_index();
  // Lanes of a higher segment cannot be read, those of a lower one can.
  const int from = (lane ^ lane_mask) / width > lane / width ? lane : lane ^ lane_mask;
  cudasim::warp_shuffle("__shfl_xor_sync", mask, &value, sizeof(T), from, {file, line});
  return value;
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDASIM_SITE) {
  const int lane = cudasim::lane_index();
  const int from = lane % width < static_cast<int>(delta) ? lane : lane - static_cast<int>(delta);
  cudasim::warp_shuffle("__shfl_up_sync", mask, &value, sizeof(T), from, {file, line});
  return value;
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDASIM_SITE) {
  const int lane = cudasim::lane_index();
  const int from = cudasim::within_segment(lane, lane + static_cast<int>(delta), width);
  cudasim::warp_shuffle("__shfl_down_sync", mask, &value, sizeof(T), from, {file, line});
  return value;
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDASIM_SITE) {
  const unsigned bit = predicate ? 1u << cudasim::lane_index() : 0u;
  return cudasim::warp_fold("__ballot_sync", mask, bit, cudasim::WarpFold::bit_or, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, CUDASIM_SITE) {
  return cudasim::warp_fold("__any_sync", mask, predicate != 0, cudasim::WarpFold::bit_or,
                            {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDASIM_SITE) {
  return cudasim::warp_fold("__all_sync", mask, predicate != 0, cudasim::WarpFold::bit_and,
                            {file, line}) != 0;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, CUDASIM_SITE) {
  return cudasim::warp_fold("__reduce_add_sync", mask, value, cudasim::WarpFold::add, {file, line});
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, CUDASIM_SITE) {
  return cudasim::warp_fold("__reduce_max_sync", mask, value, cudasim::WarpFold::max_unsigned,
                            {file, line});
}
inline int __reduce_max_sync(unsigned mask, int value, CUDASIM_SITE) {
  return static_cast<int>(cudasim::warp_fold("__reduce_max_sync", mask,
                                             static_cast<unsigned>(value),
                                             cudasim::WarpFold::max_signed, {file, line}));
}

// --- atomics
template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return cudasim::atomic_update(address, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicSub(T* address, std::type_identity_t<T> value) {
  return cudasim::atomic_update(address, [=](T old) { return static_cast<T>(old - value); });
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>, "CUDA has atomicMax for integers only");
  return cudasim::atomic_update(address, [=](T old) { return std::max(old, value); });
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>, "CUDA has atomicMin for integers only");
  return cudasim::atomic_update(address, [=](T old) { return std::min(old, value); });
}
template <class T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return cudasim::atomic_update(address, [=](T old) { return old | value; });
}
template <class T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return cudasim::atomic_update(address, [=](T old) { return old & value; });
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return cudasim::atomic_update(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return cudasim::atomic_update(address, [=](T old) { return old == expected ? value : old; });
}

// --- memory accesses with cache hints
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T __ldlu(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}
template <class T>
void __stcg(T* address, std::type_identity_t<T> value) {
  *address = value;
}
template <class T>
void __stwt(T* address, std::type_identity_t<T> value) {
  *address = value;
}

// --- arithmetic. Fast approximations are computed exactly: their error is not modelled.
using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float* s, float* c) { sincosf(x, s, c); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ using Product = unsigned __int128;
  return static_cast<unsigned long long>(static_cast<Product>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift & 31)) >> 32);
}
[[noreturn]] inline void __trap() { cudasim::trap(); }
