// A transport that passes everything on to another one: tests derive from it what goes wrong.
#pragma once

#include <memory>
#include <utility>

#include "comm/collectives.h"

namespace qshard {

class Forwarding : public Collectives {
 public:
  explicit Forwarding(std::unique_ptr<Collectives> inner) : inner_(std::move(inner)) {}
  std::string name() const override { return inner_->name(); }
  int add_unit(const UnitSpec& spec) override { return inner_->add_unit(spec); }
  void finish_setup() override { inner_->finish_setup(); }
  Tensor shard(int unit, int piece) override { return inner_->shard(unit, piece); }
  void publish(int unit) override { inner_->publish(unit); }
  void gather_start(int unit) override { inner_->gather_start(unit), count(); }
  void* gather_wait(int unit) override { return inner_->gather_wait(unit); }
  void reshard(int unit) override { inner_->reshard(unit); }
  float* grad_buffer(int unit) override { return inner_->grad_buffer(unit); }
  void reduce_start(int unit) override { inner_->reduce_start(unit), count(); }
  void reduce_wait(int unit, std::span<const Tensor> dst, Factor scale, bool accumulate) override {
    inner_->reduce_wait(unit, dst, scale, accumulate), count();
  }

 protected:
  virtual void count() { traffic_ = inner_->traffic(); }
  std::unique_ptr<Collectives> inner_;
};

}  // namespace qshard
