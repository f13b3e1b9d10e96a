// How the host reads and writes f32 values of a Device or of its host(): in place where the memory
// is the host's, once copies under way have ended, otherwise through one page-locked buffer, as
// large as the largest piece asked for.
#pragma once

#include <functional>
#include <span>

#include "device/device.h"

namespace qshard {

class Staging {
 public:
  Staging() = default;               // for host memory
  explicit Staging(Device& device);  // which outlives it

  // The values of a contiguous tensor, to be read until the next call.
  std::span<const float> read(const Tensor& t);
  // Lets `fill` set the values of a contiguous tensor, all of them.
  void write(const Tensor& t, const std::function<void(std::span<float>)>& fill);

 private:
  float* room(int64_t n);
  Device* device_ = nullptr;  // null: in place
  Buffer buffer_;
};

}  // namespace qshard
