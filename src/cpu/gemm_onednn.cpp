#include "cpu/gemm.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <dnnl.hpp>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "cpu/arguments.h"
#include "cpu/few_rows.h"
#include "cpu/ops_cpu.h"
#include "cpu/vec.h"

namespace qshard::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// A matrix of a product as oneDNN sees it: element (i, j) lies at i·row + j·col.
struct Operand {
  void* data;
  DType dtype;
  int64_t row, col;
};
Operand plain(const Tensor& t) { return {t.data, t.dtype, t.ld, 1}; }
Operand transposed(const Tensor& t) { return {t.data, t.dtype, 1, t.ld}; }

// c[m,n] (+)= a[m,k] · b[k,n]
struct Product {
  int64_t m, n, k;
  Operand a, b, c;
  bool accumulate;
};

dnnl::memory::data_type onednn_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return dnnl::memory::data_type::bf16;
    case DType::fp16:
      return dnnl::memory::data_type::f16;
    default:
      return dnnl::memory::data_type::f32;
  }
}

dnnl::memory::desc descriptor(int64_t rows, int64_t cols, const Operand& x) {
  return {{rows, cols}, onednn_type(x.dtype), dnnl::memory::dims{x.row, x.col}};
}

void clear(const Operand& c, int64_t rows, int64_t cols) {
  const auto size = static_cast<int64_t>(dtype_size(c.dtype));
  for (int64_t i = 0; i < rows; ++i)
    std::memset(static_cast<char*>(c.data) + i * c.row * size, 0, static_cast<size_t>(cols * size));
}

dnnl::matmul::primitive_desc matmul_desc(const dnnl::engine& engine, const dnnl::memory::desc& a,
                                         const dnnl::memory::desc& b, const dnnl::memory::desc& c,
                                         const dnnl::primitive_attr& attr) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, a, b, c, attr};
#else
  return {dnnl::matmul::desc(a, b, c), attr, engine};
#endif
}

bool cpu_multiplies_bf16() { return __builtin_cpu_supports("avx512bf16"); }

// oneDNN 3 has fp16 products for CPUs with fp16 arithmetic; its reference loops are slower than f32
// products of converted operands.
bool onednn_multiplies_fp16(const dnnl::engine& engine) {
  using dnnl::memory;
  const memory::desc square({64, 64}, memory::data_type::f16, memory::dims{64, 1});
  try {
    const std::string kernel = matmul_desc(engine, square, square, square, {}).impl_info_str();
    return !kernel.starts_with("ref");
  } catch (const dnnl::error&) {
    return false;
  }
}

void expect_output(const char* op, const char* name, const Tensor& t, DType param,
                   const Shape& shape) {
  expect(op, name, t, t.dtype == DType::f32 ? DType::f32 : param, shape);
}

void expect_products_of(const char* op, DType param) {
  if (param != DType::f32 && param != DType::bf16 && param != DType::fp16)
    fail_dtype(op, "an operand", param, "f32, bf16 or fp16");
}

// [Note: products and threads]
// Left to share a product among threads, oneDNN may cut the summed dimension: the result then
// depends on the number of threads (seen with 1 × 512 × 3000 and 32 × 64 × 2048). So the output is
// cut here into tiles that depend on the shape only, and each tile is a product of one thread. On
// one thread, against one call for the whole: x·wᵀ takes 1–7 % longer, the gradients -5–4 % (Zen 4,
// small30m).
constexpr int64_t kTileHeight = 256, kTileWidth = 512;

// Operands are converted block by block: 32 MiB of f32 at most, whatever the size of the product.
constexpr int64_t kBlockHeight = 1024, kBlockWidth = 2048, kBlockDepth = 2048;

struct Cut {  // of n rows or columns into equal parts; the last one may be shorter
  Cut(int64_t n, int64_t largest) : total(n), parts((n + largest - 1) / largest) {
    constexpr int64_t vector = 16;
    step = ((n + parts - 1) / parts + vector - 1) / vector * vector;
    parts = (n + step - 1) / step;
  }
  int64_t total, parts, step;
  int64_t size(int64_t part) const { return std::min(step, total - part * step); }
};

Operand offset(const Operand& x, int64_t row, int64_t col) {
  const int64_t elements = row * x.row + col * x.col;
  return {static_cast<char*>(x.data) + elements * static_cast<int64_t>(dtype_size(x.dtype)),
          x.dtype, x.row, x.col};
}

Product block_of(const Product& p, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  Product block = p;
  block.m = rows, block.n = cols;
  block.a = offset(p.a, row, 0);
  block.b = offset(p.b, 0, col);
  block.c = offset(p.c, row, col);
  return block;
}

// oneDNN asks OpenMP for the number of threads of the calling thread.
class OneThread {
 public:
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }

 private:
  int before_ = omp_get_max_threads();
};

}  // namespace

struct Gemm::Impl {
  Impl(int threads, bool native)
      : team(threads),
        native_bf16(native && cpu_multiplies_bf16()),
        native_fp16(native && onednn_multiplies_fp16(engine)),
        scratchpads(static_cast<size_t>(threads)) {}

  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  Team team;
  bool native_bf16, native_fp16;
  std::vector<std::vector<std::byte>> scratchpads;  // of each thread
  std::vector<float> a_f32, b_f32, c_f32;           // blocks of converted operands
  std::vector<float> few_rows_scratch;

  // Making a kernel costs 0.2–0.45 ms, and a run uses a few dozen. The key is all that oneDNN's
  // choice depends on. The bound only matters if shapes change all the time.
  using Key = std::array<int64_t, 12>;
  struct Kernel {
    dnnl::matmul::primitive_desc desc;
    dnnl::matmul run;
  };
  static constexpr size_t kMaxKernels = 512;
  std::map<Key, Kernel> kernels;

  bool native(DType dtype) const {
    return dtype == DType::f32 || (dtype == DType::bf16 ? native_bf16 : native_fp16);
  }
  void multiply(const Product& p);
  void multiply_converted(Product block);
  void multiply_tiles(const Product& p);
  void multiply_matmul(const Product& p, int thread);
  void make_kernel(const Product& p);
  template <typename F>
  void for_each_row(int64_t rows, F&& body) const {
    team.ranges(rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }
  Operand as_f32(const Operand& x, int64_t rows, int64_t cols, std::vector<float>& scratch) const;
};

Gemm::Gemm(int threads, bool native) : impl_(std::make_unique<Impl>(threads, native)) {}
Gemm::~Gemm() = default;

std::string Gemm::describe(DType dtype) const {
  const std::string name(dtype_name(dtype));
  return impl_->native(dtype) ? name : fmt::format("f32 (oneDNN has no fast {} here)", name);
}

void Gemm::linear(Tensor x, Tensor w, Tensor y) {
  expect_rank("linear", "x", x, 2);
  expect_rank("linear", "w", w, 2);
  expect_products_of("linear", x.dtype);
  const int64_t N = x.rows(), I = x.cols(), O = w.rows();
  expect("linear", "x", x, x.dtype, {N, I});
  expect("linear", "w", w, x.dtype, {O, I});
  expect_output("linear", "y", y, x.dtype, {N, O});
  if (x.dtype == DType::f32 && I > 0 && kFewRowsOfLinear.contain(N))
    return linear_few_rows(impl_->team, x, w, y, impl_->few_rows_scratch);
  impl_->multiply({N, O, I, plain(x), transposed(w), plain(y), false});
}

void Gemm::linear_dgrad(Tensor dy, Tensor w, Tensor dx, bool accumulate) {
  expect_rank("linear_dgrad", "dy", dy, 2);
  expect_rank("linear_dgrad", "w", w, 2);
  expect_products_of("linear_dgrad", dy.dtype);
  const int64_t N = dy.rows(), O = dy.cols(), I = w.cols();
  expect("linear_dgrad", "dy", dy, dy.dtype, {N, O});
  expect("linear_dgrad", "w", w, dy.dtype, {O, I});
  expect_output("linear_dgrad", "dx", dx, dy.dtype, {N, I});
  if (dy.dtype == DType::f32 && O > 0 && kFewRowsOfDgrad.contain(N))
    return linear_dgrad_few_rows(impl_->team, dy, w, dx, accumulate, impl_->few_rows_scratch);
  impl_->multiply({N, I, O, plain(dy), plain(w), plain(dx), accumulate});
}

void Gemm::linear_wgrad(Tensor dy, Tensor x, Tensor dw, bool accumulate) {
  expect_rank("linear_wgrad", "dy", dy, 2);
  expect_rank("linear_wgrad", "x", x, 2);
  expect_products_of("linear_wgrad", dy.dtype);
  const int64_t N = dy.rows(), O = dy.cols(), I = x.cols();
  expect("linear_wgrad", "dy", dy, dy.dtype, {N, O});
  expect("linear_wgrad", "x", x, dy.dtype, {N, I});
  expect("linear_wgrad", "dw", dw, DType::f32, {O, I});
  if (dy.dtype == DType::f32 && kFewRowsOfWgrad.contain(N))
    return linear_wgrad_few_rows(impl_->team, dy, x, dw, accumulate);
  impl_->multiply({O, I, N, transposed(dy), plain(x), plain(dw), accumulate});
}

void Gemm::Impl::multiply(const Product& p) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) return p.accumulate ? void() : clear(p.c, p.m, p.n);
  if (native(p.a.dtype)) return multiply_tiles(p);
  for (int64_t col = 0; col < p.n; col += kBlockWidth)
    for (int64_t row = 0; row < p.m; row += kBlockHeight)
      multiply_converted(block_of(p, row, std::min(kBlockHeight, p.m - row), col,
                                  std::min(kBlockWidth, p.n - col)));
}

void Gemm::Impl::multiply_converted(Product p) {
  const Operand c = p.c;
  if (c.dtype != DType::f32) {
    c_f32.resize(static_cast<size_t>(p.m * p.n));
    p.c = p.accumulate ? as_f32(c, p.m, p.n, c_f32) : Operand{c_f32.data(), DType::f32, p.n, 1};
  }
  for (int64_t first = 0; first < p.k; first += kBlockDepth) {
    Product part = p;
    part.k = std::min(kBlockDepth, p.k - first);
    part.a = as_f32(offset(p.a, 0, first), p.m, part.k, a_f32);
    part.b = as_f32(offset(p.b, first, 0), part.k, p.n, b_f32);
    part.accumulate = p.accumulate || first > 0;
    multiply_tiles(part);
  }
  if (c.dtype == DType::f32) return;
  with_dtype("a product", "its result", c.dtype, [&]<typename T>(T) {
    for_each_row(p.m, [&](int64_t i) {
      const float* from = c_f32.data() + i * p.n;
      T* to = static_cast<T*>(c.data) + i * c.row;
      for_each_vec(p.n,
                   [&](int64_t j, auto lanes) { store(to + j, load(from + j, lanes), lanes); });
    });
  });
}

namespace {

// sgemm is the faster one for the gradients (plain b), matmul for x·wᵀ.
bool uses_sgemm(const Product& p) { return p.a.dtype == DType::f32 && p.b.col == 1; }

void multiply_sgemm(const Product& p) {
  const bool a_transposed = p.a.col != 1;
  const dnnl::status status =
      dnnl::sgemm(a_transposed ? 'T' : 'N', 'N', p.m, p.n, p.k, 1.f, static_cast<float*>(p.a.data),
                  a_transposed ? p.a.col : p.a.row, static_cast<float*>(p.b.data), p.b.row,
                  p.accumulate ? 1.f : 0.f, static_cast<float*>(p.c.data), p.c.row);
  QS_CHECK(status == dnnl::status::success, "oneDNN refused an f32 product {} x {} x {}: status {}",
           p.m, p.n, p.k, static_cast<int>(status));
}

Product tile_of(const Product& p, const Cut& rows, const Cut& cols, int64_t row, int64_t col) {
  return block_of(p, row * rows.step, rows.size(row), col * cols.step, cols.size(col));
}

}  // namespace

void Gemm::Impl::multiply_tiles(const Product& p) {
  const OneThread one_thread;
  const Cut rows(p.m, kTileHeight), cols(p.n, kTileWidth);
  if (uses_sgemm(p)) {
    team.tasks(rows.parts * cols.parts, [&](int64_t task, int) {
      multiply_sgemm(tile_of(p, rows, cols, task / cols.parts, task % cols.parts));
    });
    return;
  }
  // The kernels of whole and of edge tiles, made before threads look for them.
  if (kernels.size() + 4 > kMaxKernels) kernels.clear();
  for (int64_t row : {int64_t{0}, rows.parts - 1})
    for (int64_t col : {int64_t{0}, cols.parts - 1}) make_kernel(tile_of(p, rows, cols, row, col));
  team.tasks(rows.parts * cols.parts, [&](int64_t task, int thread) {
    multiply_matmul(tile_of(p, rows, cols, task / cols.parts, task % cols.parts), thread);
  });
}

namespace {

std::array<int64_t, 12> key_of(const Product& p) {
  return {p.m,
          p.n,
          p.k,
          p.a.row,
          p.a.col,
          p.b.row,
          p.b.col,
          p.c.row,
          p.accumulate,
          static_cast<int64_t>(p.a.dtype),
          static_cast<int64_t>(p.b.dtype),
          static_cast<int64_t>(p.c.dtype)};
}

}  // namespace

void Gemm::Impl::multiply_matmul(const Product& p, int thread) {
  const Kernel& k = kernels.find(key_of(p))->second;
  // Scratch of our own: the library's belongs to the thread that made the kernel.
  std::vector<std::byte>& scratch = scratchpads[static_cast<size_t>(thread)];
  if (scratch.size() < k.desc.scratchpad_desc().get_size())
    scratch.resize(k.desc.scratchpad_desc().get_size());
  k.run.execute(stream, {{DNNL_ARG_SRC, dnnl::memory(k.desc.src_desc(), engine, p.a.data)},
                         {DNNL_ARG_WEIGHTS, dnnl::memory(k.desc.weights_desc(), engine, p.b.data)},
                         {DNNL_ARG_DST, dnnl::memory(k.desc.dst_desc(), engine, p.c.data)},
                         {DNNL_ARG_SCRATCHPAD,
                          dnnl::memory(k.desc.scratchpad_desc(), engine, scratch.data())}});
}

void Gemm::Impl::make_kernel(const Product& p) {
  const Key key = key_of(p);
  if (kernels.contains(key)) return;
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (p.accumulate) {
    dnnl::post_ops add;
    add.append_sum(1.f);
    attr.set_post_ops(add);
  }
  const auto a = descriptor(p.m, p.k, p.a), b = descriptor(p.k, p.n, p.b);
  const auto c = descriptor(p.m, p.n, p.c);
  try {
    const dnnl::matmul::primitive_desc desc = matmul_desc(engine, a, b, c, attr);
    kernels.emplace(key, Kernel{desc, dnnl::matmul(desc)});
  } catch (const dnnl::error& e) {
    fail("oneDNN has no product {} x {} x {} of {}: {} (status {})", p.m, p.n, p.k,
         dtype_name(p.a.dtype), e.what(), static_cast<int>(e.status));
  }
}

// Keeps the storage order: the copy of a transposed operand is transposed.
Operand Gemm::Impl::as_f32(const Operand& x, int64_t rows, int64_t cols,
                           std::vector<float>& scratch) const {
  const bool is_transposed = x.col != 1;
  const int64_t lines = is_transposed ? cols : rows, length = is_transposed ? rows : cols;
  const int64_t line_distance = is_transposed ? x.col : x.row;
  scratch.resize(static_cast<size_t>(lines * length));
  with_dtype("a product", "an operand", x.dtype, [&]<typename T>(T) {
    for_each_row(lines, [&](int64_t line) {
      const T* from = static_cast<const T*>(x.data) + line * line_distance;
      float* to = scratch.data() + line * length;
      for_each_vec(length,
                   [&](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
    });
  });
  return {scratch.data(), DType::f32, is_transposed ? 1 : length, is_transposed ? length : 1};
}

std::string gemm_library() {
  const dnnl_version_t* version = dnnl_version();
  return fmt::format("oneDNN {}.{}.{}", version->major, version->minor, version->patch);
}

double CpuOps::measure_peak(DType param_dtype, double seconds) {
  // Operands of 4–8 MB: the rate is that of the cores, not of the memory.
  constexpr int64_t M = 1024, N = 2048, K = 1024;
  Buffer x(device_, param_dtype, {M, K}, Segment::workspace, "peak x");
  Buffer w(device_, param_dtype, {N, K}, Segment::workspace, "peak w");
  Buffer y(device_, param_dtype, {M, N}, Segment::workspace, "peak y");
  Buffer dx(device_, param_dtype, {M, K}, Segment::workspace, "peak dx");
  fill(x, 0.5f);
  fill(w, 0.5f);
  linear(x, w, y);  // makes the kernels and starts the threads
  linear_dgrad(y, w, dx, false);

  double shortest = std::numeric_limits<double>::infinity();
  const auto measure = [&](auto&& product) {
    const Clock::time_point start = Clock::now();
    product();
    const std::chrono::duration<double> spent = Clock::now() - start;
    shortest = std::min(shortest, spent.count());
  };
  const Clock::time_point begin = Clock::now();
  do {  // which of the two is faster depends on the type, see uses_sgemm
    measure([&] { linear(x, w, y); });
    measure([&] { linear_dgrad(y, w, dx, false); });
  } while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds);
  return 2.0 * M * N * K / shortest;
}

}  // namespace qshard::cpu
