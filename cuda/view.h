// What a launcher takes: typed memory as plain data, and the steps from run-time types and
// alignment to template parameters. ops_cuda.cpp has checked shapes and types before.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace qshard::cuda {

enum class Type : uint8_t { f32, bf16, fp16 };

// rows × cols elements, `ld` elements between rows. Empty when data is null.
struct View {
  void* data = nullptr;
  Type type = Type::f32;
  int64_t rows = 0, cols = 0, ld = 0;

  template <typename T>
  __host__ __device__ T* as() const {
    return static_cast<T*>(data);
  }
  int64_t element_size() const { return type == Type::f32 ? 4 : 2; }
};

template <typename T>
struct Tag {
  using type = T;
};

template <typename F>
void with_type(Type type, F&& f) {
  switch (type) {
    case Type::f32:
      return f(Tag<float>{});
    case Type::bf16:
      return f(Tag<__nv_bfloat16>{});
    case Type::fp16:
      return f(Tag<__half>{});
  }
}

// The residual stream is f32 or has the parameters' type.
template <typename F>
void with_types(Type residual, Type param, F&& f) {
  with_type(param, [&](auto p) { return residual == Type::f32 ? f(Tag<float>{}, p) : f(p, p); });
}

// Elements that a thread moves at a time: the 16-bit operands in one access of 16 bytes, f32 ones
// beside them in two.
template <typename... T>
inline constexpr int kWidth = ((sizeof(T) == 2) || ...) ? 8 : 4;

// Whether every row of the given views begins at a multiple of 16 bytes.
inline bool rows_aligned(std::initializer_list<View> views) {
  for (const View& v : views)
    if (v.data && (reinterpret_cast<uintptr_t>(v.data) % 16 != 0 ||
                   (v.rows > 1 && v.ld * v.element_size() % 16 != 0)))
      return false;
  return true;
}

template <int W>
struct Width {};

// f(Width<W>), or f(Width<1>) where accesses of 16 bytes are not possible.
template <int W, typename F>
void with_width(bool aligned, F&& f) {
  if (aligned)
    f(Width<W>{});
  else
    f(Width<1>{});
}

}  // namespace qshard::cuda
