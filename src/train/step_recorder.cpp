#include "train/step_recorder.h"

#include <cmath>

#include "io/safetensors.h"

namespace qshard {

// Row by row: a range of columns is a view.
std::vector<float> host_values(Device& device, const Tensor& t) {
  std::vector<float> values(t.numel());
  if (values.empty()) return values;
  const int64_t rows = t.contiguous() ? 1 : t.rows(), row = t.numel() / rows;
  const size_t row_bytes = static_cast<size_t>(row) * dtype_size(t.dtype);
  std::vector<std::byte> bytes(row_bytes);
  for (int64_t r = 0; r < rows; ++r) {
    const char* from = static_cast<const char*>(t.data) + r * t.ld * int64_t(dtype_size(t.dtype));
    device.copy(bytes.data(), from, row_bytes);
    to_f32(t.dtype, bytes.data(), row, values.data() + r * row);
  }
  return values;
}

void StepRecorder::start(const std::string& layer, const std::string& unit,
                         const UnitLayout& layout, DType param_dtype, double loss_scale) {
  loss_scale_ = static_cast<float>(loss_scale);
  param_dtype_ = param_dtype;
  layer_ = layer;
  unit_ = unit;
  layout_ = &layout;
  tensors_.clear();
  parameters_.clear();
  gradients_.clear();
  magnitudes_.clear();
}

Recorded StepRecorder::read(const Tensor& t) const {
  const int64_t rows = t.shape[0];
  return {rows, rows ? t.numel() / rows : 0, host_values(device_, t)};
}

// Products whose weights are not adjacent come one by one: their columns stand side by side.
static void append_columns(Recorded& to, const Recorded& part) {
  Recorded joined{to.rows, to.cols + part.cols, {}};
  for (int64_t r = 0; r < to.rows; ++r)
    for (const Recorded* source : {static_cast<const Recorded*>(&to), &part})
      joined.values.insert(joined.values.end(), source->values.begin() + r * source->cols,
                           source->values.begin() + (r + 1) * source->cols);
  to = std::move(joined);
}

void StepRecorder::after(const Span& span, std::span<const OpTensor> tensors) {
  if (!layout_ || span.unit != layer_ || span.phase != "forward" || span.micro_batch != 0) return;
  for (const OpTensor& t : tensors) {
    if (t.role == std::string_view("weight")) continue;
    const std::string key = span.step + "/" + span.name + "/" + t.name;
    auto [entry, first] = tensors_.try_emplace(key);
    if (first)
      entry->second = read(t.tensor);
    else if (t.role == std::string_view("out"))
      append_columns(entry->second, read(t.tensor));
  }
}

void StepRecorder::gathered(const std::string& unit, const void* full) {
  if (!layout_ || unit != unit_ || !parameters_.empty()) return;
  for (int i = 0; i < layout_->size(); ++i) {
    const Shape& shape = layout_->params()[i].shape;
    const auto* from = static_cast<const char*>(full) +
                       (*layout_)[i].offset * static_cast<int64_t>(dtype_size(param_dtype_));
    parameters_.push_back(
        host_values(device_, Tensor(const_cast<char*>(from), param_dtype_, shape)));
  }
}

void StepRecorder::before_reduce(const std::string& unit, const float* gradient) {
  if (!layout_ || unit != unit_) return;
  gradients_.resize(layout_->size());
  magnitudes_.resize(layout_->size());
  for (int i = 0; i < layout_->size(); ++i) {
    std::vector<float> part = host_values(
        device_, Tensor::of(gradient + (*layout_)[i].offset, layout_->params()[i].shape));
    for (float& g : part) g /= loss_scale_;
    gradients_[i].resize(part.size());
    magnitudes_[i].resize(part.size());
    for (size_t j = 0; j < part.size(); ++j) {
      gradients_[i][j] += part[j];
      magnitudes_[i][j] += std::abs(part[j]);
    }
  }
}

const Recorded& StepRecorder::tensor(const std::string& key) const {
  const auto found = tensors_.find(key);
  QS_CHECK(found != tensors_.end(), "no operator of {} left {}", layer_, key);
  return found->second;
}

}  // namespace qshard
