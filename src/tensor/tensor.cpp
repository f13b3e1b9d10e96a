#include "tensor/tensor.h"

#include <algorithm>

namespace qshard {
namespace {

struct DTypeInfo {
  DType dtype;
  size_t size;
  std::string_view name;
};
constexpr DTypeInfo kDTypes[] = {{DType::f32, 4, "f32"},   {DType::bf16, 2, "bf16"},
                                 {DType::fp16, 2, "fp16"}, {DType::f64, 8, "f64"},
                                 {DType::i32, 4, "i32"},   {DType::u32, 4, "u32"},
                                 {DType::u16, 2, "u16"},   {DType::u8, 1, "u8"}};

const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<int>(dtype)]; }

}  // namespace

size_t dtype_size(DType dtype) { return info(dtype).size; }
std::string_view dtype_name(DType dtype) { return info(dtype).name; }

DType parse_dtype(std::string_view name) {
  for (const DTypeInfo& d : kDTypes)
    if (d.name == name) return d.dtype;
  fail_usage("unknown dtype '{}': expected f32, bf16 or fp16", name);
}

Shape::Shape(std::initializer_list<int64_t> dims) {
  for (int64_t d : dims) push_back(d);
}

void Shape::push_back(int64_t dim) {
  QS_CHECK(rank_ < static_cast<int>(dims_.size()), "a tensor has at most {} dimensions",
           dims_.size());
  QS_CHECK(dim >= 0, "negative dimension {}", dim);
  dims_[rank_++] = dim;
}

int64_t Shape::numel() const {
  int64_t n = 1;
  for (int64_t d : *this) n *= d;
  return n;
}

int64_t Shape::row_numel() const {
  int64_t n = 1;
  for (int i = 1; i < rank_; ++i) n *= dims_[i];
  return n;
}

bool Shape::operator==(const Shape& other) const {
  return std::equal(begin(), end(), other.begin(), other.end());
}

std::string Shape::str() const {
  std::string text = "[";
  for (int64_t dim : *this) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

Tensor Tensor::row_range(int64_t begin, int64_t end) const {
  QS_CHECK(0 <= begin && begin <= end && end <= shape[0], "rows [{}, {}) of a tensor {}", begin,
           end, shape.str());
  Tensor t = *this;
  t.data = static_cast<char*>(data) + begin * ld * static_cast<int64_t>(dtype_size(dtype));
  t.shape[0] = end - begin;
  return t;
}

Tensor Tensor::col_range(int64_t begin, int64_t end) const {
  QS_CHECK(shape.rank() == 2 && 0 <= begin && begin <= end && end <= shape[1],
           "columns [{}, {}) of a tensor {}", begin, end, shape.str());
  Tensor t = *this;
  t.data = static_cast<char*>(data) + begin * static_cast<int64_t>(dtype_size(dtype));
  t.shape[1] = end - begin;
  return t;
}

Tensor Tensor::reshape(Shape to) const {
  QS_CHECK(contiguous() && to.numel() == numel(), "cannot view a tensor {} as {}", shape.str(),
           to.str());
  return Tensor(data, dtype, to);
}

Tensor concat_rows_if_adjacent(std::span<const Tensor> parts) {
  Tensor all = parts.front();
  for (const Tensor& part : parts.subspan(1)) {
    const char* end = static_cast<char*>(all.data) + all.bytes();
    if (!all.contiguous() || !part.contiguous() || part.data != end || part.dtype != all.dtype ||
        part.cols() != all.cols())
      return {};
    all.shape[0] += part.rows();
  }
  return all;
}

}  // namespace qshard
