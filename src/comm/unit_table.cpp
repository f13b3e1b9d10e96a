#include "comm/unit_table.h"

#include <algorithm>
#include <climits>

namespace qshard {
namespace {

constexpr int kRingSlots = 2;  // one is written while the other is reduced
constexpr const char* kParamsNames[] = {"sharded", "gathering", "gathered"};
constexpr const char* kGradNames[] = {"idle", "being written", "being reduced"};

void check_pieces(const UnitSpec& spec, int ranks) {
  int64_t end = 0;
  for (const Piece& piece : spec.pieces) {
    QS_CHECK(piece.offset >= end && piece.count >= 0,
             "unit '{}': piece at element {} with {} elements a rank begins before {}, the end of "
             "the piece before it",
             spec.name, piece.offset, piece.count, end);
    QS_CHECK(piece.offset * dtype_size(spec.param_dtype) % 64 == 0,
             "unit '{}': piece at element {} of {} is not aligned to 64 bytes", spec.name,
             piece.offset, dtype_name(spec.param_dtype));
    QS_CHECK(piece.count <= INT_MAX,
             "unit '{}': {} elements a rank in one piece, at most {}: use more ranks", spec.name,
             piece.count, INT_MAX);
    end = piece.offset + piece.count * ranks;
  }
  QS_CHECK(end <= spec.elements, "unit '{}': pieces end at element {} of a buffer of {}", spec.name,
           end, spec.elements);
}

}  // namespace

UnitTable::UnitTable(std::string transport, int ranks)
    : transport_(std::move(transport)), ranks_(ranks) {}

int UnitTable::add(const UnitSpec& spec) {
  QS_CHECK(!finished_, "{}: add_unit('{}') after finish_setup", transport_, spec.name);
  QS_CHECK(spec.reduce_dtype == DType::f32 || spec.rounds(),
           "unit '{}': reduce_dtype {}, expected f32, bf16 or fp16", spec.name,
           dtype_name(spec.reduce_dtype));
  check_pieces(spec, ranks_);

  Unit& unit = units_.emplace_back();
  unit.spec = spec;
  constexpr int64_t kLine = 32;  // elements: 64 bytes of the smallest dtype
  for (const Piece& piece : spec.pieces) {
    unit.packed_at.push_back(unit.packed_elements);
    unit.packed_elements += (piece.count + kLine - 1) / kLine * kLine;
  }
  return size() - 1;
}

void UnitTable::finish() {
  QS_CHECK(!finished_, "{}: finish_setup called twice", transport_);
  finished_ = true;
  const auto shared = std::count_if(units_.begin(), units_.end(),
                                    [](const Unit& u) { return !u.spec.own_grad_buffer; });
  ring_ = std::min(kRingSlots, static_cast<int>(shared));
  slots_.resize(ring_);
  auto cover = [](GradSlot& slot, const Unit& unit) {
    const DType moved = unit.spec.reduce_dtype;
    slot.elements = std::max(slot.elements, unit.spec.elements);
    if (unit.spec.rounds())
      slot.rounded_elements = std::max(slot.rounded_elements, unit.spec.elements);
    slot.packed_elements = std::max(slot.packed_elements, unit.packed_elements);
    slot.packed_bytes = std::max(slot.packed_bytes, bytes_of(unit.packed_elements, moved));
  };
  for (Unit& unit : units_) {
    if (unit.spec.own_grad_buffer) {
      unit.slot = static_cast<int>(slots_.size());
      cover(slots_.emplace_back(), unit);
    } else {
      for (int s = 0; s < ring_; ++s) cover(slots_[s], unit);
    }
  }
}

const UnitTable::Unit& UnitTable::find(int unit) const {
  QS_CHECK(finished_, "{}: finish_setup has not been called", transport_);
  QS_CHECK(0 <= unit && unit < size(), "{}: unit {} of {}", transport_, unit, size());
  return units_[unit];
}

const Piece& UnitTable::piece(int unit, int piece) const {
  const UnitSpec& s = spec(unit);
  QS_CHECK(0 <= piece && piece < static_cast<int>(s.pieces.size()), "unit '{}': piece {} of {}",
           s.name, piece, s.pieces.size());
  return s.pieces[piece];
}

int64_t UnitTable::shard_elements(int unit) const {
  int64_t total = 0;
  for (const Piece& piece : spec(unit).pieces) total += piece.count;
  return total;
}

int64_t UnitTable::peer_elements(int unit) const { return (ranks_ - 1) * shard_elements(unit); }

void UnitTable::expect(const Unit& unit, Params wanted, const char* verb, const char* fix) const {
  QS_CHECK(unit.params == wanted, "{}: {}('{}') while its parameters are {}, expected {}: {}",
           transport_, verb, unit.spec.name, kParamsNames[static_cast<int>(unit.params)],
           kParamsNames[static_cast<int>(wanted)], fix);
}

void UnitTable::expect(const Unit& unit, Grad wanted, const char* verb, const char* fix) const {
  QS_CHECK(unit.grad == wanted, "{}: {}('{}') while its gradient is {}, expected {}: {}",
           transport_, verb, unit.spec.name, kGradNames[static_cast<int>(unit.grad)],
           kGradNames[static_cast<int>(wanted)], fix);
}

void UnitTable::publish(int unit) const {
  expect(find(unit), Params::sharded, "publish", "call reshard first");
}

void UnitTable::gather_start(int unit) {
  Unit& u = find(unit);
  expect(u, Params::sharded, "gather_start", "call reshard between two gathers");
  u.params = Params::gathering;
}

void UnitTable::gather_wait(int unit) {
  Unit& u = find(unit);
  expect(u, Params::gathering, "gather_wait", "call gather_start once before it");
  u.params = Params::gathered;
}

void UnitTable::reshard(int unit) {
  Unit& u = find(unit);
  expect(u, Params::gathered, "reshard", "call gather_wait before it");
  u.params = Params::sharded;
}

GradUse UnitTable::grad_buffer(int unit) {
  Unit& u = find(unit);
  if (u.grad == Grad::writing) return use(u);
  expect(u, Grad::idle, "grad_buffer", "call reduce_wait before it");
  const int next = u.spec.own_grad_buffer ? u.slot : next_in_ring_;
  GradSlot& slot = slots_[next];
  QS_CHECK(slot.holder < 0,
           "{}: grad_buffer('{}') needs the buffer that '{}' still holds: call reduce_wait('{}') "
           "first, or give one of them an own buffer",
           transport_, u.spec.name, spec(slot.holder).name, spec(slot.holder).name);
  if (!u.spec.own_grad_buffer) next_in_ring_ = (next_in_ring_ + 1) % ring_;
  u.slot = next;
  slot.holder = unit;
  ++slot.rounds;
  u.grad = Grad::writing;
  GradUse now = use(u);
  now.first = true;
  return now;
}

GradUse UnitTable::reduce_start(int unit) {
  Unit& u = find(unit);
  expect(u, Grad::writing, "reduce_start", "call grad_buffer before it");
  u.grad = Grad::reducing;
  return use(u);
}

GradUse UnitTable::reduce_wait(int unit, std::span<const Tensor> dst) const {
  const Unit& u = find(unit);
  expect(u, Grad::reducing, "reduce_wait", "call reduce_start once before it");
  QS_CHECK(dst.size() == u.spec.pieces.size(), "reduce_wait('{}'): {} destinations for {} pieces",
           u.spec.name, dst.size(), u.spec.pieces.size());
  for (size_t p = 0; p < dst.size(); ++p)
    QS_CHECK(dst[p].dtype == DType::f32 && dst[p].contiguous() &&
                 dst[p].numel() == u.spec.pieces[p].count,
             "reduce_wait('{}'): destination {} is {} {}, expected contiguous f32 of {} elements",
             u.spec.name, p, dtype_name(dst[p].dtype), dst[p].shape.str(), u.spec.pieces[p].count);
  return use(u);
}

void UnitTable::reduce_done(int unit) {
  Unit& u = find(unit);
  slots_[u.slot].holder = -1;
  u.grad = Grad::idle;
}

}  // namespace qshard
