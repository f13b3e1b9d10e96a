#include "cpu/few_rows.h"

#include "cpu/micro_kernel.h"

namespace qshard::cpu {
namespace {

// Rows of w that dx is summed over at once: as many streams from memory.
constexpr int64_t kDepth = 16;

// --- y[N,O] = x[N,I] · wᵀ, as rows of w times columns of xᵀ

// Rows n … of x, columns [begin, end), as [columns, kVecs·kLanes] with zeros for missing rows.
template <int kVecs>
void pack_panel(const Tensor& x, int64_t n, int64_t begin, int64_t end, float* panel) {
  constexpr int64_t width = kVecs * kLanes;
  for (int64_t first = 0; first < width; first += kLanes)
    for_each_vec(end - begin, [&](int64_t i, auto lanes) {
      Vec block[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) {
        const int64_t row = n + first + j;
        block[j] = row < x.rows() ? load(x.as<float>() + row * x.ld + begin + i, lanes) : Vec{};
      }
      transpose_block(block);
      for (int64_t j = 0; j < lanes.count; ++j)
        store(panel + (i + j) * width + first, block[j], Full{});
    });
}

// out[rows, kVecs·kLanes] = rows of w times a panel.
template <int kRows, int kVecs>
void multiply_weights(int64_t rows, int64_t I, const float* w, int64_t ldw, const float* panel,
                      float* out) {
  constexpr int64_t width = kVecs * kLanes;
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    const float* next = w + (row + kRows) * ldw;
    multiply_tile<SingleF32, Left::plain, Output::overwrite, kRows, kVecs>(
        I, w + row * ldw, ldw, panel, width, out + row * width, width, Full{},
        [&](int64_t k) { __builtin_prefetch(next + k * kRows); });
  }
  if constexpr (kRows > 1)
    if (row < rows)
      multiply_weights<1, kVecs>(rows - row, I, w + row * ldw, ldw, panel, out + row * width);
}

// Rows n … of y, columns o … o + rows, at most kLanes.
template <int kVecs>
void linear_block(const Tensor& w, const float* panel, int64_t o, int64_t rows, const Tensor& y,
                  int64_t n) {
  constexpr int64_t width = kVecs * kLanes;
  float products[kLanes * width];
  multiply_weights<kTileRows, kVecs>(rows, w.cols(), w.as<float>() + o * w.ld, w.ld, panel,
                                     products);
  for_each_vec(rows, [&](int64_t, auto lanes) {
    for (int64_t first = 0; first < width; first += kLanes) {
      Vec block[kLanes];
      for (int64_t j = 0; j < kLanes; ++j)
        block[j] = j < rows ? load(products + j * width + first, Full{}) : Vec{};
      transpose_block(block);
      for (int64_t j = 0; j < std::min<int64_t>(kLanes, y.rows() - n - first); ++j)
        store(y.as<float>() + (n + first + j) * y.ld + o, block[j], lanes);
    }
  });
}

// --- dx[N,I] = dy[N,O] · w

struct Block {  // of w
  const float* w;
  int64_t ld, rows;
};

// sums[rows, kLanes] (+)= `rows` columns of a panel times a vector of columns of w
template <Output kOutput, int kRows, typename Lanes>
QS_INLINE void dgrad_rows(const Block& b, const float* panel, int64_t rows, float* sums,
                          Lanes lanes) {
  for (; rows >= kRows; rows -= kRows, panel += kRows, sums += kRows * kLanes) {
    const float* below = b.w + b.rows * b.ld;
    multiply_tile<SingleF32, Left::transposed, kOutput, kRows, 1>(
        b.rows, panel, kLanes, b.w, b.ld, sums, kLanes, lanes,
        [&](int64_t k) { __builtin_prefetch(below + k * b.ld); });
  }
  if constexpr (kRows > 1) dgrad_rows<kOutput, kRows / 2>(b, panel, rows, sums, lanes);
}

// sums [columns / kLanes][N][kLanes] (+)= columns [begin, end) of dy · rows o … o + depth of w
template <Output kOutput>
void dgrad_block(const Tensor& dy, const Tensor& w, int64_t o, int64_t depth, int64_t begin,
                 int64_t end, float* sums) {
  const int64_t N = dy.rows();
  for (int64_t n = 0; n < N; n += kLanes) {
    const int64_t rows = std::min<int64_t>(kLanes, N - n);
    float panel[kDepth * kLanes];
    pack_panel<1>(dy, n, o, o + depth, panel);
    for_each_vec(end - begin, [&](int64_t i, auto lanes) {
      const Block block{w.as<float>() + o * w.ld + begin + i, w.ld, depth};
      dgrad_rows<kOutput, kLanes>(block, panel, rows, sums + (begin + i) * N + n * kLanes, lanes);
    });
  }
}

void copy_sums(const float* sums, const Tensor& dx, int64_t begin, int64_t end, bool add) {
  const int64_t N = dx.rows();
  for (int64_t n = 0; n < N; ++n)
    for_each_vec(end - begin, [&](int64_t i, auto lanes) {
      float* to = dx.as<float>() + n * dx.ld + begin + i;
      const Vec sum = load(sums + (begin + i) * N + n * kLanes, Full{});
      store(to, add ? load(to, lanes) + sum : sum, lanes);
    });
}

// --- dw[O,I] = dyᵀ · x

template <Output kOutput, int kVecs, int kRows, typename Lanes>
QS_INLINE void wgrad_rows(const Tensor& dy, const Tensor& x, const Tensor& dw, int64_t o,
                          int64_t end, int64_t i, Lanes lanes) {
  for (; o + kRows <= end; o += kRows)
    multiply_tile<SingleF32, Left::transposed, kOutput, kRows, kVecs>(
        x.rows(), dy.as<float>() + o, dy.ld, x.as<float>() + i, x.ld,
        dw.as<float>() + o * dw.ld + i, dw.ld, lanes);
  if constexpr (kRows > 1) wgrad_rows<kOutput, kVecs, kRows / 2>(dy, x, dw, o, end, i, lanes);
}

// Rows [o, end) of dw, kTileRows or less.
template <Output kOutput>
void wgrad_block(const Tensor& dy, const Tensor& x, const Tensor& dw, int64_t o, int64_t end) {
  const int64_t I = x.cols();
  int64_t i = 0;
  for (; i + kPanel <= I; i += kPanel)
    wgrad_rows<kOutput, kTileVecs, kTileRows>(dy, x, dw, o, end, i, Full{});
  // What is left may be part of a vector, which is not streamed.
  constexpr Output rest = kOutput == Output::stream ? Output::overwrite : kOutput;
  for_each_vec(I - i, [&](int64_t j, auto lanes) {
    wgrad_rows<rest, 1, kTileRows>(dy, x, dw, o, end, i + j, lanes);
  });
}

// A gradient is read next by the ranks that sum it, after more of it was written than caches hold.
bool may_stream(const Tensor& dw) { return aligned_to_stream(dw.data) && dw.ld % kLanes == 0; }

}  // namespace

void linear_few_rows(const Team& team, Tensor x, Tensor w, Tensor y, std::vector<float>& scratch) {
  const int64_t N = x.rows(), I = x.cols(), O = w.rows();
  scratch.resize(static_cast<size_t>((N + kLanes - 1) / kLanes * kLanes * I));
  float* packed = scratch.data();
  const auto is_wide = [N](int64_t n) { return N - n > kLanes; };
  for (int64_t n = 0; n < N; n += kPanel)
    (is_wide(n) ? pack_panel<kTileVecs> : pack_panel<1>)(x, n, 0, I, packed + n * I);
  static_assert(kTileVecs == 2);  // a panel is wide, or one vector
  team.ranges(O, kLanes, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; o += kLanes)
      for (int64_t n = 0; n < N; n += kPanel) {
        const auto multiply = is_wide(n) ? linear_block<kTileVecs> : linear_block<1>;
        multiply(w, packed + n * I, o, std::min<int64_t>(kLanes, end - o), y, n);
      }
  });
}

void linear_dgrad_few_rows(const Team& team, Tensor dy, Tensor w, Tensor dx, bool accumulate,
                           std::vector<float>& scratch) {
  const int64_t N = dy.rows(), O = dy.cols(), I = w.cols();
  scratch.resize(static_cast<size_t>((I + kLanes - 1) / kLanes * kLanes * N));
  float* sums = scratch.data();
  team.ranges(I, kLanes, [&](int64_t begin, int64_t end) {
    for (int64_t o = 0; o < O; o += kDepth) {
      const auto multiply =
          o == 0 ? dgrad_block<Output::overwrite> : dgrad_block<Output::add_whole>;
      multiply(dy, w, o, std::min(kDepth, O - o), begin, end, sums);
    }
    copy_sums(sums, dx, begin, end, accumulate);
  });
}

void linear_wgrad_few_rows(const Team& team, Tensor dy, Tensor x, Tensor dw, bool accumulate) {
  const auto multiply = accumulate       ? wgrad_block<Output::add>
                        : may_stream(dw) ? wgrad_block<Output::stream>
                                         : wgrad_block<Output::overwrite>;
  team.ranges(dw.rows(), kTileRows, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; o += kTileRows)
      multiply(dy, x, dw, o, std::min<int64_t>(end, o + kTileRows));
    stream_done();
  });
}

}  // namespace qshard::cpu
