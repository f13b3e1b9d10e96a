#include "device/device.h"

#include <algorithm>
#include <numeric>

namespace qshard {

std::string_view segment_name(Segment segment) {
  constexpr std::string_view names[] = {"shards",      "moments",   "params",       "gradients",
                                        "activations", "workspace", "communication"};
  return names[static_cast<int>(segment)];
}

std::unique_ptr<Recording> Device::record(const std::function<void()>&) {
  fail("{} records nothing", name());
}

int Device::watch(std::function<void()> watcher) {
  watchers_[next_watcher_] = std::move(watcher);
  return next_watcher_++;
}

void Device::account(Segment segment, int64_t bytes) {
  held_[static_cast<int>(segment)] += bytes;
  peak_ = std::max(peak_, bytes_held());
}

int64_t Device::bytes_held() const {
  return std::accumulate(held_.begin(), held_.end(), int64_t{0});
}

Buffer::Buffer(Device& device, DType dtype, Shape shape, Segment segment, std::string name)
    : device_(&device), tensor_(nullptr, dtype, shape), segment_(segment), name_(std::move(name)) {
  tensor_.data = device.allocate(tensor_.bytes());
  QS_CHECK(tensor_.data || tensor_.bytes() == 0, "out of memory on {}: {} needs {} bytes ({} {})",
           device.name(), name_, tensor_.bytes(), dtype_name(dtype), shape.str());
  device.account(segment_, static_cast<int64_t>(tensor_.bytes()));
}

void Buffer::reset() noexcept {
  if (!device_) return;
  device_->account(segment_, -static_cast<int64_t>(tensor_.bytes()));
  device_->release(tensor_.data, tensor_.bytes());
  device_ = nullptr;
  tensor_ = Tensor();
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(tensor_, other.tensor_);
  std::swap(segment_, other.segment_);
  std::swap(name_, other.name_);
}

}  // namespace qshard
