// See [Note: CPU attention] in cpu/attention.h.
#include "cpu/attention.h"

#include <cmath>
#include <utility>

#include "cpu/arguments.h"
#include "cpu/micro_kernel.h"
#include "cpu/ops_cpu.h"

namespace qshard::cpu {
namespace {

constexpr int64_t kQueryRows =
    64;                           // rows of a query block: with D 64 its operands fit in L1 and L2
constexpr int64_t kRowStep = 16;  // rows of a last, shorter block are padded to this
static_assert(kRowStep % kTileRows == 0 && kRowStep % 2 == 0 && kQueryRows % kPanel == 0);

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
constexpr int64_t round_down(int64_t n, int64_t step) { return n / step * step; }

// Padded sizes. Rows of scores are not a power of two apart: those would share cache sets (20 %).
struct Sizes {
  explicit Sizes(const AttentionShape& s)
      : T(s.T),
        D(s.D),
        keys(round_up(s.T, kQueryRows)),
        dims(round_up(s.D, kPanel)),
        score_ld(keys + 16) {}
  int64_t T, D, keys, dims, score_ld;

  int64_t packed() const { return keys * dims; }
  int64_t scores() const { return kQueryRows * score_ld; }
  int64_t block() const { return kQueryRows * dims; }
  int64_t floats() const { return 5 * packed() + 4 * scores() + 5 * block(); }
};

// Scratch of one task. Operands are in units, so pairs fill only half of their space.
struct Scratch {
  Scratch(const Sizes& s, float* at) {
    const auto take = [&](int64_t floats) { return std::exchange(at, at + floats); };
    keys_t = take(s.packed());
    values_t = take(s.packed());
    rows = take(s.packed());
    dk = take(s.packed());
    dv = take(s.packed());
    scores = take(s.scores());
    d_scores = take(s.scores());
    score_pairs = take(s.scores());
    d_score_pairs = take(s.scores());
    q = take(s.block());
    d_o = take(s.block());
    q_rows = take(s.block());
    d_o_rows = take(s.block());
    out = take(s.block());
  }
  float *keys_t, *values_t;            // panels [keys/kPanel][dims units][kPanel]
  float* rows;                         // [keys units][dims]: V in forward, K in backward
  float *dk, *dv;                      // [keys][dims]
  float *scores, *d_scores;            // [kQueryRows][score_ld]
  float *score_pairs, *d_score_pairs;  // [kQueryRows/2][score_ld]: rows 2i and 2i+1 side by side
  float *q, *d_o;                      // [kQueryRows][dims units]
  float *q_rows, *d_o_rows;            // [kQueryRows units][dims]
  float* out;                          // [kQueryRows][dims]: the block of o or dq
};

template <typename T>
struct Rows {  // one head's [T, D] in a [N, …] tensor
  T* data;
  int64_t ld;
  T* row(int64_t t) const { return data + t * ld; }
  Rows from(int64_t t) const { return {row(t), ld}; }
};

// The next kLanes units of a row that has `elements` left; zeros behind its end.
template <typename Unit, typename P>
QS_INLINE Vec load_units(const P* row, int64_t elements) {
  if constexpr (Unit::kPerUnit == 2) {
    Vec units{};
    if (elements >= 2 * kLanes)
      std::memcpy(&units, row, sizeof units);
    else if (elements > 0)
      std::memcpy(&units, row, static_cast<size_t>(elements) * sizeof(P));
    return units;
  } else {
    if (elements >= kLanes) return load(row, Full{});
    return elements > 0 ? load(row, Part{elements}) : Vec{};
  }
}

// Two rows of 16-bit values as one row of pairs.
QS_INLINE Vec interleave(VecH first, VecH second) {
  return from_bits(__builtin_convertvector(first, VecU) | __builtin_convertvector(second, VecU)
                                                              << 16);
}

QS_INLINE VecH load_halves(const bf16_t* row, int64_t elements) {
  if (elements >= kLanes) return load_raw<VecH>(row, Full{});
  return elements > 0 ? load_raw<VecH>(row, Part{elements}) : VecH{};
}

#ifdef __AVX512BF16__
// Flushes subnormals to zero, as the products do.
QS_INLINE VecH to_bf16(Vec x) { return (VecH)_mm512_cvtneps_pbh((__m512)x); }
#endif

// One (sequence, kv head) and the query heads that share it.
template <typename P, typename Unit>
class HeadGroup {
 public:
  HeadGroup(const AttentionShape& s, float* scratch)
      : size_(s), scratch_(size_, scratch), scale_(1.f / std::sqrt(static_cast<float>(s.D))) {}

  void pack_for_forward(Rows<P> k, Rows<P> v) {
    pack_columns(k, scratch_.keys_t);
    pack_rows(v, size_.T, size_.keys, scratch_.rows);
  }

  void forward(Rows<P> q, Rows<P> o, float* lse) {
    for (int64_t first = 0; first < size_.T; first += kQueryRows)
      forward_block(first, q.from(first), o.from(first), lse + first);
  }

  void pack_for_backward(Rows<P> k, Rows<P> v) {
    pack_columns(k, scratch_.keys_t);
    pack_columns(v, scratch_.values_t);
    pack_rows(k, size_.T, size_.keys, scratch_.rows);
    std::fill_n(scratch_.dk, size_.packed(), 0.f);
    std::fill_n(scratch_.dv, size_.packed(), 0.f);
  }

  struct QueryHead {
    Rows<P> q, o, d_o, dq;
    const float* lse;
    QueryHead from(int64_t t) const {
      return {q.from(t), o.from(t), d_o.from(t), dq.from(t), lse + t};
    }
  };
  void backward(const QueryHead& head) {  // adds to dk and dv
    for (int64_t first = 0; first < size_.T; first += kQueryRows)
      backward_block(first, head.from(first));
  }

  void store_dk_dv(Rows<P> dk, Rows<P> dv) {
    store_rows(scratch_.dk, size_.T, dk);
    store_rows(scratch_.dv, size_.T, dv);
  }

 private:
  static constexpr int kPer = Unit::kPerUnit;

  // --- packing
  // x[T, D] as panels of kPanel keys, transposed: the right operand of scores.
  void pack_columns(Rows<P> x, float* panels) {
    const int64_t units = size_.dims / kPer;
    for (int64_t t = 0; t < size_.keys; t += kLanes) {
      float* panel = panels + round_down(t, kPanel) * units + t % kPanel;
      for (int64_t unit = 0; unit < units; unit += kLanes) {
        Vec block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          block[i] = t + i < size_.T
                         ? load_units<Unit>(x.row(t + i) + unit * kPer, size_.D - unit * kPer)
                         : Vec{};
        transpose_block(block);
        for (int i = 0; i < kLanes; ++i) {
          if (unit + i < units) store(panel + (unit + i) * kPanel, block[i], Full{});
        }
      }
    }
  }

  // x[count, D] as [padded units][dims]: the right operand where tokens are summed over.
  void pack_rows(Rows<P> x, int64_t count, int64_t padded, float* out) {
    for (int64_t t = 0; t < padded; t += kPer, out += size_.dims)
      for (int64_t d = 0; d < size_.dims; d += kLanes) {
        const int64_t left = size_.D - d;
        if constexpr (kPer == 2) {
          const VecH first = load_halves(x.row(t) + d, t < count ? left : 0);
          const VecH second = load_halves(x.row(t + 1) + d, t + 1 < count ? left : 0);
          store(out + d, interleave(first, second), Full{});
        } else {
          store(out + d, load_units<Unit>(x.row(t) + d, t < count ? left : 0), Full{});
        }
      }
  }

  // x[count, D] as [padded][dims units]: the left operand of scores.
  void pack_left(Rows<P> x, int64_t count, int64_t padded, float* out) {
    const int64_t units = size_.dims / kPer;
    for (int64_t t = 0; t < padded; ++t, out += units)
      for (int64_t unit = 0; unit < units; unit += kLanes)
        store(out + unit,
              load_units<Unit>(x.row(t) + unit * kPer, t < count ? size_.D - unit * kPer : 0),
              Full{});
  }

  void store_rows(const float* from, int64_t count, Rows<P> to) {
    for (int64_t t = 0; t < count; ++t)
      for_each_vec(size_.D, [&](int64_t d, auto lanes) {
        store(to.row(t) + d, load(from + t * size_.dims + d, lanes), lanes);
      });
  }

  // --- products
  // out[r, n] = left[r] · panel column n, for keys up to the diagonal of the last row; of a tile
  // that the diagonal crosses, what lies above it is computed and not used.
  void multiply_scores(const float* left, const float* panels, int64_t first, int64_t rows,
                       float* out) {
    const int64_t units = size_.dims / kPer, used = size_.D / kPer;
    for (int64_t n = 0; n < first + rows; n += kPanel)
      for (int64_t r = round_down(std::max<int64_t>(0, n - first), kTileRows); r < rows;
           r += kTileRows)
        multiply_tile<Unit, Left::plain, Output::overwrite>(
            used, left + r * units, units, panels + n * units, kPanel, out + r * size_.score_ld + n,
            size_.score_ld);
  }

  // out[r] = Σ_n weights[r, n] · rows[n] over the keys that row r's tile may see.
  void multiply_rows(const float* weights, int64_t first, int64_t rows) {
    for (int64_t r = 0; r < rows; r += kTileRows)
      for (int64_t d = 0; d < size_.dims; d += kPanel)
        multiply_tile<Unit, Left::plain, Output::overwrite>(
            (first + r + kTileRows) / kPer, weights + r * size_.score_ld, size_.score_ld,
            scratch_.rows + d, size_.dims, scratch_.out + r * size_.dims + d, size_.dims);
  }

  // sum[n] += Σ_r weights[r, n] · rows_of[r] over the rows at or below key n.
  void add_transposed(const float* weights, const float* rows_of, int64_t first, int64_t rows,
                      float* sum) {
    for (int64_t d = 0; d < size_.dims; d += kPanel)
      for (int64_t n = 0; n < first + rows; n += kTileRows) {
        const int64_t r = round_down(std::max<int64_t>(0, n - first), kRowStep);
        multiply_tile<Unit, Left::transposed, Output::add>(
            (rows - r) / kPer, weights + r / kPer * size_.score_ld + n, size_.score_ld,
            rows_of + r / kPer * size_.dims + d, size_.dims, sum + n * size_.dims + d, size_.dims);
      }
  }

  // --- forward
  void forward_block(int64_t first, Rows<P> q, Rows<P> o, float* lse) {
    const int64_t count = std::min(kQueryRows, size_.T - first), rows = round_up(count, kRowStep);
    float inverse_sum[kQueryRows];
    pack_left(q, count, rows, scratch_.q);
    multiply_scores(scratch_.q, scratch_.keys_t, first, rows, scratch_.scores);
    for (int64_t r = 0; r < count; ++r) {
      float* row = scratch_.scores + r * size_.score_ld;
      const int64_t read = first + round_down(r, kTileRows) + kTileRows;  // by multiply_rows
      const float sum = softmax_row(row, first + r + 1, read, &lse[r]);
      inverse_sum[r] = 1.f / sum;
      to_units(row, read);
    }
    multiply_rows(scratch_.scores, first, rows);
    for (int64_t r = 0; r < count; ++r)
      for_each_vec(size_.D, [&](int64_t d, auto lanes) {
        const Vec sum = load(scratch_.out + r * size_.dims + d, lanes);
        store(o.row(r) + d, sum * inverse_sum[r], lanes);
      });
  }

  // Scores of n keys become exp(scale·(s − max)), zeros up to `read`; returns their sum.
  float softmax_row(float* s, int64_t n, int64_t read, float* lse) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const int64_t whole = round_up(n, kLanes);
    std::fill(s + n, s + whole, -infinity);
    Vec highest = splat(-infinity);
    for (int64_t j = 0; j < whole; j += kLanes) highest = max(load(s + j, Full{}), highest);
    const float shift = lane_max(highest) * scale_;
    Vec sums{};
    for (int64_t j = 0; j < whole; j += kLanes) {
      const Vec e = exp(load(s + j, Full{}) * scale_ - shift);
      store(s + j, e, Full{});
      sums += e;
    }
    if (whole < read) std::fill(s + whole, s + read, 0.f);
    const float sum = lane_sum(sums);
    *lse = shift + std::log(sum);
    return sum;
  }

  // A row of f32 becomes a row of units, in place.
  void to_units([[maybe_unused]] float* row, [[maybe_unused]] int64_t n) {
#ifdef __AVX512BF16__
    if constexpr (kPer == 2) {
      for (int64_t j = 0; j < n; j += 2 * kLanes) {
        const Vec low = load(row + j, Full{}), high = load(row + j + kLanes, Full{});
        const auto pairs = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        std::memcpy(row + j / 2, &pairs, sizeof pairs);
      }
    }
#endif
  }

  // --- backward
  void backward_block(int64_t first, const QueryHead& head) {
    const int64_t count = std::min(kQueryRows, size_.T - first), rows = round_up(count, kRowStep);
    pack_left(head.q, count, rows, scratch_.q);
    pack_left(head.d_o, count, rows, scratch_.d_o);
    multiply_scores(scratch_.q, scratch_.keys_t, first, rows, scratch_.scores);
    multiply_scores(scratch_.d_o, scratch_.values_t, first, rows, scratch_.d_scores);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t read = first + round_down(r, kRowStep) + kRowStep;  // by add_transposed
      float* p = scratch_.scores + r * size_.score_ld;
      float* ds = scratch_.d_scores + r * size_.score_ld;
      const int64_t n = r < count ? first + r + 1 : 0;
      if (n > 0) softmax_grad_row(p, ds, n, head.lse[r], dot(head.d_o.row(r), head.o.row(r)));
      std::fill(p + n, p + read, 0.f);
      std::fill(ds + n, ds + read, 0.f);
    }
    const float *weights = scratch_.scores, *d_weights = scratch_.d_scores;
    const float *q_rows = scratch_.q, *d_o_rows = scratch_.d_o;
    if constexpr (kPer == 2) {
      pack_rows(head.q, count, rows, scratch_.q_rows);
      pack_rows(head.d_o, count, rows, scratch_.d_o_rows);
      pair_score_rows(first, rows);
      weights = scratch_.score_pairs, d_weights = scratch_.d_score_pairs;
      q_rows = scratch_.q_rows, d_o_rows = scratch_.d_o_rows;
    }
    multiply_rows(scratch_.d_scores, first, rows);
    store_rows(scratch_.out, count, head.dq);
    add_transposed(weights, d_o_rows, first, rows, scratch_.dv);
    add_transposed(d_weights, q_rows, first, rows, scratch_.dk);
  }

  float dot(const P* a, const P* b) {
    Vec sum{};
    for_each_vec(size_.D,
                 [&](int64_t d, auto lanes) { sum += load(a + d, lanes) * load(b + d, lanes); });
    return lane_sum(sum);
  }

  // p: scores become probabilities; ds: gradients of the probabilities become those of q·k.
  void softmax_grad_row(float* p, float* ds, int64_t n, float lse, float delta) {
    for (int64_t j = 0; j < n; j += kLanes) {
      const Vec probability = exp(load(p + j, Full{}) * scale_ - lse);
      store(p + j, probability, Full{});
      store(ds + j, probability * (load(ds + j, Full{}) - delta) * scale_, Full{});
    }
  }

  // Rows of p and ds side by side in pairs, for add_transposed; ds also as units, for
  // multiply_rows.
  void pair_score_rows([[maybe_unused]] int64_t first, [[maybe_unused]] int64_t rows) {
#ifdef __AVX512BF16__
    for (int64_t r = 0; r < rows; r += 2) {
      const int64_t read = first + round_down(r, kRowStep) + kRowStep, ld = size_.score_ld;
      const auto pair = [&](const float* from, float* to) {
        for (int64_t j = 0; j < read; j += kLanes)
          store(to + j,
                interleave(to_bf16(load(from + j, Full{})), to_bf16(load(from + ld + j, Full{}))),
                Full{});
      };
      float* ds = scratch_.d_scores + r * ld;
      pair(scratch_.scores + r * ld, scratch_.score_pairs + r / 2 * ld);
      pair(ds, scratch_.d_score_pairs + r / 2 * ld);
      to_units(ds, read);
      to_units(ds + ld, read);
    }
#endif
  }

  Sizes size_;
  Scratch scratch_;
  float scale_;
};

template <typename P>
Rows<P> head_rows(const Tensor& t, const AttentionShape& s, int64_t batch, int64_t head) {
  return {t.as<P>() + batch * s.T * t.ld + head * s.D, t.ld};
}

// Calls f(P{}, Unit{}) for the storage and the product unit of this run.
template <typename F>
void with_units(DType dtype, [[maybe_unused]] Bf16Products products, F&& f) {
  if (dtype == DType::f32) return f(float{}, SingleF32{});
  if (dtype == DType::fp16) return f(fp16_t{}, SingleF32{});
#ifdef __AVX512BF16__
  if (products == Bf16Products::native) return f(bf16_t{}, PairBf16{});
#endif
  f(bf16_t{}, SingleF32{});
}

}  // namespace

int64_t attention_scratch(const AttentionShape& s, int threads) {
  return std::min<int64_t>(threads, s.B * s.K) * Sizes(s).floats();
}

void attention_forward(const Team& team, const AttentionForward& a, const AttentionShape& s,
                       float* scratch, Bf16Products products) {
  const int64_t group = s.H / s.K;
  with_units(a.q.dtype, products, [&]<typename P, typename Unit>(P, Unit) {
    team.tasks(s.B * s.K, [&](int64_t task, int thread) {
      const int64_t b = task / s.K, kv = task % s.K;
      HeadGroup<P, Unit> heads(s, scratch + thread * Sizes(s).floats());
      heads.pack_for_forward(head_rows<P>(a.k, s, b, kv), head_rows<P>(a.v, s, b, kv));
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
        heads.forward(head_rows<P>(a.q, s, b, h), head_rows<P>(a.o, s, b, h),
                      a.lse.as<float>() + (b * s.H + h) * s.T);
    });
  });
}

void attention_backward(const Team& team, const AttentionBackward& a, const AttentionShape& s,
                        float* scratch, Bf16Products products) {
  const int64_t group = s.H / s.K;
  with_units(a.q.dtype, products, [&]<typename P, typename Unit>(P, Unit) {
    team.tasks(s.B * s.K, [&](int64_t task, int thread) {
      const int64_t b = task / s.K, kv = task % s.K;
      HeadGroup<P, Unit> heads(s, scratch + thread * Sizes(s).floats());
      heads.pack_for_backward(head_rows<P>(a.k, s, b, kv), head_rows<P>(a.v, s, b, kv));
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
        heads.backward({head_rows<P>(a.q, s, b, h), head_rows<P>(a.o, s, b, h),
                        head_rows<P>(a.d_o, s, b, h), head_rows<P>(a.dq, s, b, h),
                        a.lse.as<float>() + (b * s.H + h) * s.T});
      heads.store_dk_dv(head_rows<P>(a.dk, s, b, kv), head_rows<P>(a.dv, s, b, kv));
    });
  });
}

namespace {

void expect_attention(const char* op, const AttentionShape& s, DType dtype) {
  QS_CHECK(s.B >= 0 && s.T >= 1 && s.K >= 1 && s.H % s.K == 0 && s.D >= 2 && s.D % 2 == 0,
           "{}: B {} T {} H {} K {} D {}: H must be a multiple of K and D even", op, s.B, s.T, s.H,
           s.K, s.D);
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::fp16)
    fail_dtype(op, "q", dtype, "f32, bf16 or fp16");
}

}  // namespace

void CpuOps::attention(Tensor q, Tensor k, Tensor v, AttentionShape s, Tensor o, Tensor lse) {
  const char* op = "attention";
  expect_attention(op, s, q.dtype);
  const Shape query{s.B * s.T, s.H * s.D}, kv{s.B * s.T, s.K * s.D};
  expect(op, "q", q, q.dtype, query);
  expect(op, "k", k, q.dtype, kv);
  expect(op, "v", v, q.dtype, kv);
  expect(op, "o", o, q.dtype, query);
  expect_contiguous(op, "lse", lse, DType::f32, {s.B, s.H, s.T});
  float* scratch = workspace(attention_scratch(s, team_.threads()));
  attention_forward(team_, {q, k, v, o, lse}, s, scratch);
}

void CpuOps::attention_grad(Tensor q, Tensor k, Tensor v, Tensor o, Tensor d_o, Tensor lse,
                            AttentionShape s, Tensor dq, Tensor dk, Tensor dv) {
  const char* op = "attention_grad";
  expect_attention(op, s, q.dtype);
  const Shape query{s.B * s.T, s.H * s.D}, kv{s.B * s.T, s.K * s.D};
  expect(op, "q", q, q.dtype, query);
  expect(op, "k", k, q.dtype, kv);
  expect(op, "v", v, q.dtype, kv);
  expect(op, "o", o, q.dtype, query);
  expect(op, "d_o", d_o, q.dtype, query);
  expect_contiguous(op, "lse", lse, DType::f32, {s.B, s.H, s.T});
  expect(op, "dq", dq, q.dtype, query);
  expect(op, "dk", dk, q.dtype, kv);
  expect(op, "dv", dv, q.dtype, kv);
  float* scratch = workspace(attention_scratch(s, team_.threads()));
  attention_backward(team_, {q, k, v, o, d_o, lse, dq, dk, dv}, s, scratch);
}

}  // namespace qshard::cpu
