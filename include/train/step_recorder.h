// Host copies, as f32, of what passes through one unit in a step: the operators' tensors of its
// first forward, its gathered parameters, and its full gradient before the reduction.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "comm/traced_collectives.h"
#include "device/traced_ops.h"
#include "fsdp/shard_layout.h"

namespace qshard {

// Values of a tensor, row-major; rows of all columns of the products that make it up.
struct Recorded {
  int64_t rows = 0, cols = 0;
  std::vector<float> values;
};

class StepRecorder final : public OpObserver, public UnitObserver {
 public:
  explicit StepRecorder(Device& device) : device_(device) {}

  // From now on records the layer of this name and the unit that holds it. `layout` is the unit's.
  // Gradients are divided by the scale of the loss.
  void start(const std::string& layer, const std::string& unit, const UnitLayout& layout,
             DType param_dtype, double loss_scale = 1);

  void after(const Span& span, std::span<const OpTensor> tensors) override;
  void gathered(const std::string& unit, const void* full) override;
  void before_reduce(const std::string& unit, const float* gradient) override;

  // By "step/operator/tensor", e.g. "6 o_proj/linear/y"; throws when there is none.
  const Recorded& tensor(const std::string& key) const;
  // Full parameter as first gathered; Σ over reductions of this rank's full gradient, and of its
  // magnitude.
  const std::vector<float>& parameter(int i) const { return parameters_.at(i); }
  const std::vector<float>& gradient(int i) const { return gradients_.at(i); }
  double loss_scale() const { return loss_scale_; }
  const std::vector<float>& magnitude(int i) const { return magnitudes_.at(i); }

 private:
  Recorded read(const Tensor& tensor) const;

  Device& device_;
  std::string layer_, unit_;
  const UnitLayout* layout_ = nullptr;
  DType param_dtype_ = DType::f32;
  float loss_scale_ = 1;
  std::map<std::string, Recorded> tensors_;
  std::vector<std::vector<float>> parameters_, gradients_, magnitudes_;
};

// The elements as f32 on the host.
std::vector<float> host_values(Device& device, const Tensor& tensor);

}  // namespace qshard
