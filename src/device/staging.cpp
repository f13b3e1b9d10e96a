#include "device/staging.h"

namespace qshard {
namespace {

std::span<float> values_of(const Tensor& t) {
  QS_CHECK(t.contiguous(), "{} with rows {} apart must be contiguous", t.shape.str(), t.ld);
  return {t.as<float>(), static_cast<size_t>(t.numel())};
}

}  // namespace

Staging::Staging(Device& device) : device_(device.is_host() ? nullptr : &device) {}

float* Staging::room(int64_t n) {
  if (!buffer_.tensor() || buffer_->numel() < n) {
    buffer_.reset();  // before the larger one is made
    buffer_ = Buffer(device_->host(), DType::f32, {n}, Segment::workspace, "staging");
  }
  return buffer_->as<float>();
}

std::span<const float> Staging::read(const Tensor& t) {
  const std::span<float> values = values_of(t);
  if (!device_ || values.empty()) return values;
  if (device_->in_host_memory(values.data())) {
    device_->wait_for_copies();
    return values;
  }
  float* const here = room(t.numel());
  device_->copy(here, values.data(), values.size_bytes());
  return {here, values.size()};
}

void Staging::write(const Tensor& t, const std::function<void(std::span<float>)>& fill) {
  const std::span<float> values = values_of(t);
  if (!device_ || values.empty()) return fill(values);
  if (device_->in_host_memory(values.data())) {
    device_->wait_for_copies();
    return fill(values);
  }
  float* const here = room(t.numel());
  fill({here, values.size()});
  device_->copy(values.data(), here, values.size_bytes());
}

}  // namespace qshard
