// DType, Shape and Tensor: a typed view of memory that someone else owns.
//
// A Tensor is row-major with contiguous rows; `ld` is the distance in elements between two rows of
// a 2-D tensor (its leading dimension), so that a range of columns is a view too. Copying a Tensor
// copies the view. Nothing here allocates; see Buffer in device/device.h for memory with an owner.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "base/check.h"

namespace qshard {

enum class DType : uint8_t { f32, bf16, fp16, f64, i32, u32, u16, u8 };

size_t dtype_size(DType dtype);            // bytes of one element
std::string_view dtype_name(DType dtype);  // "f32", "bf16", …
DType parse_dtype(std::string_view name);  // throws a usage error that lists the names

// bf16 and fp16 values are stored as 16-bit patterns; arithmetic on them happens in f32.
struct bf16_t {
  uint16_t bits;
};
struct fp16_t {
  uint16_t bits;
};

template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<bf16_t>() {
  return DType::bf16;
}
template <>
constexpr DType dtype_of<fp16_t>() {
  return DType::fp16;
}
template <>
constexpr DType dtype_of<double>() {
  return DType::f64;
}
template <>
constexpr DType dtype_of<int32_t>() {
  return DType::i32;
}
template <>
constexpr DType dtype_of<uint32_t>() {
  return DType::u32;
}
template <>
constexpr DType dtype_of<uint16_t>() {
  return DType::u16;
}
template <>
constexpr DType dtype_of<uint8_t>() {
  return DType::u8;
}

// Up to four dimensions.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  template <typename It>
  Shape(It first, It last) {
    for (; first != last; ++first) push_back(*first);
  }
  void push_back(int64_t dim);
  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[i]; }
  int64_t& operator[](int i) { return dims_[i]; }
  int64_t numel() const;
  int64_t row_numel() const;  // elements of one index of dimension 0
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + rank_; }
  bool operator==(const Shape& other) const;
  std::string str() const;  // "[512, 64]"

 private:
  std::array<int64_t, 4> dims_{};
  int rank_ = 0;
};

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  Shape shape;
  int64_t ld = 0;  // elements between rows (2-D); equals shape[1] when contiguous

  Tensor() = default;
  Tensor(void* memory, DType type, Shape dims)
      : data(memory), dtype(type), shape(dims), ld(dims.rank() ? dims.row_numel() : 1) {}
  template <typename T>
  static Tensor of(T* memory, Shape dims) {
    using Value = std::remove_const_t<T>;
    return Tensor(const_cast<Value*>(memory), dtype_of<Value>(), dims);
  }

  explicit operator bool() const { return data != nullptr; }
  int64_t numel() const { return shape.numel(); }
  size_t bytes() const { return static_cast<size_t>(numel()) * dtype_size(dtype); }
  bool contiguous() const { return shape.rank() < 1 || shape[0] <= 1 || ld == shape.row_numel(); }
  int64_t rows() const { return shape[0]; }
  int64_t cols() const { return shape[1]; }

  // The elements as T; throws when T is not this tensor's dtype.
  template <typename T>
  T* as() const {
    QS_CHECK(dtype == dtype_of<T>(), "tensor holds {}, asked for {}", dtype_name(dtype),
             dtype_name(dtype_of<T>()));
    return static_cast<T*>(data);
  }

  Tensor row_range(int64_t begin, int64_t end) const;  // rows [begin, end) of dimension 0
  Tensor col_range(int64_t begin, int64_t end) const;  // columns [begin, end) of a 2-D tensor
  Tensor reshape(Shape to) const;                      // same number of elements, contiguous
};

// One matrix of all rows when the given 2-D tensors lie one directly after the other in memory
// (same dtype and columns); otherwise an empty Tensor. Lets q/k/v and gate/up run as one product.
Tensor concat_rows_if_adjacent(std::span<const Tensor> parts);

}  // namespace qshard
