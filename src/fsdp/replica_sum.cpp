#include "fsdp/replica_sum.h"

#include "fsdp/shard_layout.h"

namespace qshard {

ReplicaSum::ReplicaSum(const std::string& unit, int64_t elements, DType reduce_dtype, int ranks,
                       Backend& backend, Collectives& replicas)
    : backend_(backend), replicas_(replicas), dtype_(reduce_dtype), elements_(elements) {
  const std::string name = unit + kNameSuffix;
  const UnitLayout layout({{name, {elements}}}, ranks);
  own_elements_ = layout[0].piece().count;
  id_ = replicas.add_unit({name, layout.pieces(), layout.elements(), reduce_dtype, reduce_dtype,
                           /*own_full_buffer=*/false, /*own_grad_buffer=*/false});
}

void ReplicaSum::attach() {
  if (dtype_ != DType::f32)
    own_ = Buffer(*backend_.device, DType::f32, {own_elements_}, Segment::communication,
                  "own part of a gradient's sum");
}

void ReplicaSum::start(const Tensor& gradient) {
  backend_.ops->cast(gradient, Tensor::of(replicas_.grad_buffer(id_), gradient.shape));
  replicas_.reduce_start(id_);
}

void ReplicaSum::gather(float scale) {
  const Tensor shard = replicas_.shard(id_, 0);
  const Tensor sum = dtype_ == DType::f32 ? shard : own_.tensor();
  replicas_.reduce_wait(id_, {&sum, 1}, scale, false);
  if (dtype_ != DType::f32) backend_.ops->cast(sum, shard);
  replicas_.publish(id_);
  replicas_.gather_start(id_);
}

void ReplicaSum::finish(const Tensor& gradient, Factor scale) {
  const Tensor sum(replicas_.gather_wait(id_), dtype_, gradient.shape);
  backend_.ops->sum_parts({&sum, 1}, scale, gradient, false);
  replicas_.reshard(id_);
}

}  // namespace qshard
