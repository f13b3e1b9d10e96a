// Vectors of f32 lanes in GCC's vector extension: as wide as the target of the compilation.
//
// load/store convert from and to the storage types f32, bf16 and fp16 (to nearest, ties to even; a
// NaN stays a NaN). `Full` moves kLanes elements, `Part` the first `count`; the other lanes load as
// zero. for_each_vec() runs a loop body over both, so that a loop is written once:
//
//   for_each_vec(n, [&](int64_t i, auto lanes) { store(y + i, load(x + i, lanes) * w, lanes); });
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "tensor/tensor.h"

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define QS_INLINE inline __attribute__((always_inline))

namespace qshard::cpu {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecU __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecH __attribute__((vector_size(2 * kLanes)));
typedef double VecD __attribute__((vector_size(4 * kLanes)));  // half as many lanes

#ifdef __AVX512F__
// The unmasked forms of some intrinsics make GCC 12 warn about its own header.
inline constexpr __mmask16 kAllLanes = 0xffff;
#endif
#if defined(__AVX512F__) || defined(__F16C__)
inline constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#endif

struct Full {
  static constexpr int64_t count = kLanes;
};
struct Part {
  int64_t count;  // 1 … kLanes-1
};

template <typename F>
QS_INLINE void for_each_vec(int64_t n, F&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Full{});
  if (i < n) body(i, Part{n - i});
}

// --- bits
QS_INLINE VecU bits_of(Vec x) { return (VecU)x; }
QS_INLINE Vec from_bits(VecU u) { return (Vec)u; }
QS_INLINE Vec splat(float x) { return x - Vec{}; }
QS_INLINE VecU select(VecI mask, VecU yes, VecU no) { return mask ? yes : no; }
QS_INLINE Vec select(VecI mask, Vec yes, Vec no) { return mask ? yes : no; }

// --- 16-bit formats
QS_INLINE Vec widen(VecH h, bf16_t) { return from_bits(__builtin_convertvector(h, VecU) << 16); }

QS_INLINE VecH narrow(Vec x, bf16_t) {
  const VecU u = bits_of(x);
  const VecU rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const VecU quiet = u | 0x00400000u;
  return __builtin_convertvector(select(x != x, quiet, rounded) >> 16, VecH);
}

// fp16 has 5 exponent bits of bias 15. Shifted into place they read as an f32 that is 2^112 too
// small, subnormals included, so one exact multiplication widens everything but infinity and NaN.
QS_INLINE Vec widen_fp16_by_parts(VecH h) {
  const VecU u = __builtin_convertvector(h, VecU);
  const VecU magnitude = (u & 0x7fffu) << 13;
  const VecU finite = bits_of(from_bits(magnitude) * 0x1p112f);
  const VecU special = magnitude | 0x7f800000u;
  const VecI is_special = (VecI)(magnitude >= 0x0f800000u);
  return from_bits(select(is_special, special, finite) | ((u & 0x8000u) << 16));
}

QS_INLINE VecH narrow_fp16_by_parts(Vec x) {
  const VecU u = bits_of(x);
  const VecU magnitude = u & 0x7fffffffu;
  const VecU normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the unit of fp16 is 2^-24, which is the unit of an f32 near 0.5.
  const VecU small = bits_of(from_bits(magnitude) + 0.5f) - bits_of(splat(0.5f));
  VecU h = select((VecI)(magnitude < 0x38800000u), small, normal);
  h = select((VecI)(magnitude >= 0x477ff000u), VecU{} + 0x7c00u, h);  // 65520 and more: infinity
  h = select(x != x, VecU{} + 0x7e00u, h);
  return __builtin_convertvector(h | ((u >> 16) & 0x8000u), VecH);
}

#if defined(__AVX512F__)
QS_INLINE Vec widen(VecH h, fp16_t) { return (Vec)_mm512_maskz_cvtph_ps(kAllLanes, (__m256i)h); }
QS_INLINE VecH narrow(Vec x, fp16_t) {
  return (VecH)_mm512_maskz_cvtps_ph(kAllLanes, (__m512)x, kNearestEven);
}
#elif defined(__AVX2__) && defined(__F16C__)
QS_INLINE Vec widen(VecH h, fp16_t) { return (Vec)_mm256_cvtph_ps((__m128i)h); }
QS_INLINE VecH narrow(Vec x, fp16_t) { return (VecH)_mm256_cvtps_ph((__m256)x, kNearestEven); }
#else
QS_INLINE Vec widen(VecH h, fp16_t) { return widen_fp16_by_parts(h); }
QS_INLINE VecH narrow(Vec x, fp16_t) { return narrow_fp16_by_parts(x); }
#endif

// --- loads and stores
template <typename V, typename T>
QS_INLINE V load_raw(const T* p, Full) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename V, typename T>
QS_INLINE V load_raw(const T* p, Part part) {
  V v{};
  std::memcpy(&v, p, static_cast<size_t>(part.count) * sizeof(T));
  return v;
}
template <typename V, typename T, typename Lanes>
QS_INLINE void store_raw(T* p, V v, Lanes lanes) {
  std::memcpy(p, &v, static_cast<size_t>(lanes.count) * sizeof(T));
}

template <typename Lanes>
QS_INLINE Vec load(const float* p, Lanes lanes) {
  return load_raw<Vec>(p, lanes);
}
template <typename Half, typename Lanes>
QS_INLINE Vec load(const Half* p, Lanes lanes) {
  return widen(load_raw<VecH>(p, lanes), Half{});
}
template <typename Lanes>
QS_INLINE void store(float* p, Vec v, Lanes lanes) {
  store_raw(p, v, lanes);
}
template <typename Half, typename Lanes>
QS_INLINE void store(Half* p, Vec v, Lanes lanes) {
  store_raw(p, narrow(v, Half{}), lanes);
}

// Past the caches, to an address that is a multiple of a vector's size: what this core will not
// read soon need not be read before it is written. stream_done() before another thread or process
// reads.
QS_INLINE void stream(float* p, Vec v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#else
  store(p, v, Full{});
#endif
}
inline bool aligned_to_stream(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Vec) == 0;
}
QS_INLINE void stream_done() {
#if defined(__AVX512F__) || defined(__AVX2__)
  _mm_sfence();
#endif
}

// One element, by the same rules.
template <typename T>
QS_INLINE float load_one(const T* p) {
  return load(p, Part{1})[0];
}
template <typename T>
QS_INLINE void store_one(T* p, float x) {
  store(p, splat(x), Part{1});
}

// --- f64, in halves: GCC 12 puts vectors wider than the registers into memory
struct Doubles {
  VecD low, high;
};
QS_INLINE Doubles to_double(Vec x) {
  typedef float Half __attribute__((vector_size(2 * kLanes)));
  Half half[2];
  std::memcpy(half, &x, sizeof x);
  return {__builtin_convertvector(half[0], VecD), __builtin_convertvector(half[1], VecD)};
}

// --- over the lanes of one vector, in a fixed order
QS_INLINE float lane_sum(Vec v) {
  float lane[kLanes];
  std::memcpy(lane, &v, sizeof v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}
QS_INLINE double lane_sum(const Doubles& v) {
  double sum = 0;
  for (const VecD& half : {v.low, v.high})
    for (int i = 0; i < kLanes / 2; ++i) sum += half[i];
  return sum;
}
QS_INLINE float lane_max(Vec v) {
  float max = v[0];
  for (int i = 1; i < kLanes; ++i) max = v[i] > max ? v[i] : max;
  return max;
}
QS_INLINE Vec max(Vec a, Vec b) { return select(a > b, a, b); }

// Square root, exactly rounded.
QS_INLINE Vec sqrt(Vec x) {
#ifdef __AVX512F__
  return (Vec)_mm512_maskz_sqrt_ps(kAllLanes, (__m512)x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// e^x to 1.1 ulp (measured over all f32), subnormal results included; 0 at -inf, inf above 88.73.
//
// x = n·ln 2 + r with |r| <= ln(2)/2; ln 2 is split so that n·ln2_high is exact. e^r is its Taylor
// polynomial to r^7 (next term below 2^-27). 2^n is applied in two halves, because n may leave the
// range of a normal exponent by up to the mantissa's length.
QS_INLINE Vec exp(Vec x) {
  constexpr float log2_e = 1.44269504088896341f;
  constexpr float ln2_high = 0.693359375f;  // 10 bits
  constexpr float ln2_low = -2.12194440e-4f;
  constexpr float to_integer = 12582912.f;  // 1.5·2^23: adding it rounds to an integer
  const Vec low = splat(-104.f), high = splat(89.f);
  x = select(x < low, low, x);
  x = select(x > high, high, x);
  const Vec shifted = x * log2_e + to_integer;
  const Vec n = shifted - to_integer;
  const Vec r = (x - n * ln2_high) - n * ln2_low;
  Vec p = splat(1.f / 5040);
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
#ifdef __AVX512F__
  return (Vec)_mm512_maskz_scalef_ps(kAllLanes, (__m512)p, (__m512)n);
#else
  const VecI exponent = (VecI)bits_of(shifted) - std::bit_cast<int32_t>(to_integer);
  const VecI half = exponent >> 1;
  const Vec scale_1 = (Vec)((half + 127) << 23), scale_2 = (Vec)((exponent - half + 127) << 23);
  return p * scale_1 * scale_2;
#endif
}

}  // namespace qshard::cpu
