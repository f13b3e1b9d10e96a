// The register-blocked product of attention and of few rows: c[kRows, kVecs·kLanes] (+)= a · b, in
// 32-bit units along the summed dimension, which is summed in its order. A unit is one f32
// (SingleF32) or two neighbouring bf16 (PairBf16).
//
// a[i, k] lies at a[i·lda + k], or at a[k·lda + i] when a is transposed; b[k, j] at b[k·ldb + j].
#pragma once

#include "cpu/vec.h"

namespace qshard::cpu {

// Accumulators must fit the registers: 8 × 2 of 32 with AVX-512, 4 × 2 of 16 otherwise.
inline constexpr int kTileRows = kLanes == 16 ? 8 : 4;
inline constexpr int kTileVecs = 2;
inline constexpr int kPanel = kTileVecs * kLanes;

struct SingleF32 {
  using Element = float;
  static constexpr int kPerUnit = 1;
  static QS_INLINE Vec multiply_add(Vec c, float a, Vec b) { return c + a * b; }
};

#ifdef __AVX512BF16__
struct PairBf16 {
  using Element = bf16_t;
  static constexpr int kPerUnit = 2;
  static QS_INLINE Vec multiply_add(Vec c, float a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)splat_bits(a), (__m512bh)b);
  }
  // A pair's bits may be any f32, signalling NaN included: no arithmetic on it.
  static QS_INLINE __m512 splat_bits(float pair) { return _mm512_set1_ps(pair); }
};
#endif

enum class Left { plain, transposed };
// add: the sum goes on from what is there. add_whole: it is added up from zero, then to what is
// there. stream: see stream() in vec.h.
enum class Output { overwrite, add, add_whole, stream };

struct NoPrefetch {
  QS_INLINE void operator()(int64_t /*k*/) const {}
};

// `ahead(k)` is called in each round, to prefetch. Lanes other than Full go with kVecs = 1.
template <typename Unit, Left kLeft, Output kOutput, int kRows = kTileRows, int kVecs = kTileVecs,
          typename Lanes = Full, typename Ahead = NoPrefetch>
QS_INLINE void multiply_tile(int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb,
                             float* c, int64_t ldc, Lanes lanes = {}, Ahead ahead = {}) {
  Vec sum[kRows][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j)
      sum[i][j] = kOutput == Output::add ? load(c + i * ldc + j * kLanes, lanes) : Vec{};
  for (int64_t k = 0; k < K; ++k) {
    ahead(k);
    Vec right[kVecs];
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j) right[j] = load(b + k * ldb + j * kLanes, lanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const float left = kLeft == Left::plain ? a[i * lda + k] : a[k * lda + i];
#pragma GCC unroll 2
      for (int j = 0; j < kVecs; ++j) sum[i][j] = Unit::multiply_add(sum[i][j], left, right[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j) {
      float* to = c + i * ldc + j * kLanes;
      if constexpr (kOutput == Output::stream)
        stream(to, sum[i][j]);
      else if constexpr (kOutput == Output::add_whole)
        store(to, load(to, lanes) + sum[i][j], lanes);
      else
        store(to, sum[i][j], lanes);
    }
}

// Transposes a block of kLanes × kLanes units. Each round interleaves vector i with vector
// i + kLanes/2; after log2(kLanes) rounds rows have become columns.
QS_INLINE void transpose_block(Vec (&v)[kLanes]) {
  VecI low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i / 2 + (i % 2) * kLanes;
    high[i] = low[i] + kLanes / 2;
  }
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = __builtin_shuffle(v[i], v[i + kLanes / 2], low);
      next[2 * i + 1] = __builtin_shuffle(v[i], v[i + kLanes / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) v[i] = next[i];
  }
}

}  // namespace qshard::cpu
