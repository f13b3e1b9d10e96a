#include "comm/traced_collectives.h"

namespace qshard {
namespace {

class TracedCollectives final : public Collectives {
 public:
  TracedCollectives(std::unique_ptr<Collectives> inner, const World& world, Trace& trace,
                    UnitObserver* observer)
      : inner_(std::move(inner)),
        ranks_(world.size()),
        nodes_(world.nodes()),
        trace_(trace),
        observer_(observer) {}

  std::string name() const override { return inner_->name(); }

  int add_unit(const UnitSpec& spec) override {
    units_.push_back({spec, 0, 0, 0, nullptr});
    return inner_->add_unit(spec);
  }
  void finish_setup() override {
    inner_->finish_setup();
    for (size_t u = 0; u < units_.size(); ++u) {
      Unit& unit = units_[u];
      for (size_t p = 0; p < unit.spec.pieces.size(); ++p)
        unit.shard_bytes +=
            static_cast<int64_t>(inner_->shard(static_cast<int>(u), static_cast<int>(p)).bytes());
      for (const Piece& piece : unit.spec.pieces) unit.shard_elements += piece.count;
      hold(unit, unit.shard_bytes);
    }
  }
  Tensor shard(int unit, int piece) override { return inner_->shard(unit, piece); }
  void publish(int unit) override { inner_->publish(unit); }

  void gather_start(int unit) override {
    call(unit, Lane::gather, "all-gather start", [&] {
      inner_->gather_start(unit);
      hold(units_[unit], full_bytes(units_[unit]));
    });
  }
  void* gather_wait(int unit) override {
    void* full = nullptr;
    call(unit, Lane::gather, "all-gather wait", [&] { full = inner_->gather_wait(unit); });
    if (observer_) observer_->gathered(units_[unit].spec.name, full);
    return full;
  }
  void reshard(int unit) override {
    call(unit, Lane::gather, "reshard", [&] {
      inner_->reshard(unit);
      hold(units_[unit], units_[unit].shard_bytes);
    });
  }

  float* grad_buffer(int unit) override {
    Unit& u = units_[unit];
    if (u.gradient) return inner_->grad_buffer(unit);
    call(unit, Lane::reduce, "gradient buffer", [&] {
      u.gradient = inner_->grad_buffer(unit);
      trace_.held += gradient_bytes(u);
    });
    return u.gradient;
  }
  void reduce_start(int unit) override {
    Unit& u = units_[unit];
    if (observer_) observer_->before_reduce(u.spec.name, u.gradient);
    call(unit, Lane::reduce, "reduce-scatter start", [&] { inner_->reduce_start(unit); });
    u.gradient = nullptr;
  }
  void reduce_wait(int unit, std::span<const Tensor> dst, Factor scale, bool accumulate) override {
    call(unit, Lane::reduce, "reduce-scatter wait", [&] {
      inner_->reduce_wait(unit, dst, scale, accumulate);
      trace_.held -= gradient_bytes(units_[unit]);
    });
  }

 private:
  struct Unit {
    UnitSpec spec;
    int64_t shard_bytes = 0, shard_elements = 0, held = 0;  // held: of its parameters
    float* gradient = nullptr;
  };

  // Parameters and gradient in full: the rows of all ranks, padding included.
  int64_t full_bytes(const Unit& unit) const { return ranks_ * unit.shard_bytes; }
  int64_t gradient_bytes(const Unit& unit) const {
    return ranks_ * unit.shard_elements * static_cast<int64_t>(dtype_size(DType::f32));
  }
  void hold(Unit& unit, int64_t bytes) {
    trace_.held += bytes - unit.held;
    unit.held = bytes;
  }

  template <typename Fn>
  void call(int unit, Lane lane, const char* verb, Fn action) {
    Unit& u = units_[unit];
    const Traffic before = inner_->traffic();
    Span span = trace_.begin(lane, verb, u.spec.name);
    span.unit_before = u.held;
    span.ranks = ranks_;
    span.nodes = nodes_;
    action();
    traffic_ = inner_->traffic();
    trace_.logical_bytes += logical(traffic_) - logical(before);
    trace_.copied_bytes += copied(traffic_) - copied(before);
    span.unit_after = u.held;
    trace_.end(span);
  }
  static int64_t logical(const Traffic& t) {
    return t.gather_logical_bytes + t.reduce_logical_bytes;
  }
  static int64_t copied(const Traffic& t) { return t.gather_copied_bytes + t.reduce_copied_bytes; }

  std::unique_ptr<Collectives> inner_;
  const int ranks_, nodes_;
  Trace& trace_;
  UnitObserver* observer_;
  std::vector<Unit> units_;
};

}  // namespace

std::unique_ptr<Collectives> make_traced_collectives(std::unique_ptr<Collectives> inner,
                                                     const World& world, Trace& trace,
                                                     UnitObserver* observer) {
  return std::make_unique<TracedCollectives>(std::move(inner), world, trace, observer);
}

}  // namespace qshard
