#include "comm/private_collectives.h"

#include <algorithm>

namespace qshard {
namespace {

char* at(const Buffer& buffer, int64_t element, DType dtype) {
  return static_cast<char*>(buffer->data) + bytes_of(element, dtype);
}

}  // namespace

PrivateCollectives::PrivateCollectives(std::string transport, const World& world, Backend& backend,
                                       int full_buffers, int received_parts,
                                       std::shared_ptr<Device> memory)
    : backend_(backend),
      rank_(world.rank()),
      ranks_(world.size()),
      table_(transport, world.size()),
      memory_(std::move(memory)),
      transport_(std::move(transport)),
      full_buffers_(full_buffers),
      received_parts_(received_parts) {
  QS_CHECK(full_buffers >= 1, "{} full buffers: at least 1", full_buffers);
}

// --- memory

void PrivateCollectives::finish_setup() {
  table_.finish();
  Device& memory = memory_ ? *memory_ : *backend_.device;
  int64_t pooled_bytes = 0;
  const auto add_full = [&](int64_t bytes, const std::string& name) {
    full_.emplace_back(memory, DType::u8, Shape{bytes}, Segment::params, name);
    return static_cast<int>(full_.size()) - 1;
  };
  for (int u = 0; u < table_.size(); ++u) {
    const UnitSpec& spec = table_.spec(u);
    const int64_t bytes = bytes_of(spec.elements, spec.param_dtype);
    Unit& unit = units_.emplace_back();
    unit.shard = Buffer(memory, spec.param_dtype, {table_.packed_elements(u)}, Segment::shards,
                        spec.name + " shard");
    if (spec.own_full_buffer)
      unit.full = add_full(bytes, spec.name);
    else
      pooled_bytes = std::max(pooled_bytes, bytes);
  }
  for (int i = 0; i < full_buffers_ && pooled_bytes > 0; ++i)
    free_.push_back(add_full(pooled_bytes, "pooled unit"));
  for (const GradSlot& slot : table_.slots()) {
    Slot& s = slots_.emplace_back();
    s.sum = Buffer(memory, DType::f32, {slot.elements}, Segment::gradients, "unit gradient");
    s.rounded = Buffer(memory, DType::u16, {slot.rounded_elements}, Segment::gradients,
                       "rounded unit gradient");
    s.received = Buffer(memory, DType::u8, {slot.packed_bytes * received_parts_},
                        Segment::communication, "received gradient rows");
  }
  allocated();
}

std::vector<Tensor> PrivateCollectives::gather_buffers() const {
  std::vector<Tensor> buffers(full_.begin(), full_.end());
  for (const Unit& unit : units_) buffers.push_back(unit.shard);
  return buffers;
}

std::vector<Tensor> PrivateCollectives::reduce_buffers() const {
  std::vector<Tensor> buffers;
  for (const Slot& slot : slots_)
    for (const Buffer* buffer : {&slot.sum, &slot.rounded, &slot.received})
      buffers.push_back(*buffer);
  return buffers;
}

char* PrivateCollectives::shard_data(int unit) const {
  return at(units_[unit].shard, 0, DType::u8);
}

char* PrivateCollectives::full_data(int full) const { return at(full_[full], 0, DType::u8); }

char* PrivateCollectives::shard_rows(int unit, int piece) const {
  return at(units_[unit].shard, table_.packed_at(unit)[piece], table_.spec(unit).param_dtype);
}

char* PrivateCollectives::full_rows(int unit, int full, int piece) const {
  return at(full_[full], table_.piece(unit, piece).offset, table_.spec(unit).param_dtype);
}

char* PrivateCollectives::gradient(int unit, int slot) const {
  const Slot& s = slots_[slot];
  return at(table_.spec(unit).rounds() ? s.rounded : s.sum, 0, DType::u8);
}

Tensor PrivateCollectives::gradient_rows(int unit, int slot, int rank, int piece) const {
  const Piece& p = table_.piece(unit, piece);
  const DType dtype = table_.spec(unit).reduce_dtype;
  return Tensor(gradient(unit, slot) + bytes_of(p.offset + rank * p.count, dtype), dtype,
                {p.count});
}

char* PrivateCollectives::received(int slot) const {
  return at(slots_[slot].received, 0, DType::u8);
}

Tensor PrivateCollectives::received_rows(int unit, int slot, int part, int piece) const {
  const DType dtype = table_.spec(unit).reduce_dtype;
  const int64_t first = part * table_.packed_elements(unit) + table_.packed_at(unit)[piece];
  return Tensor(received(slot) + bytes_of(first, dtype), dtype, {table_.piece(unit, piece).count});
}

// --- parameters

Tensor PrivateCollectives::shard(int unit, int piece) {
  const Piece& p = table_.piece(unit, piece);
  return Tensor(shard_rows(unit, piece), table_.spec(unit).param_dtype, {p.count});
}

void PrivateCollectives::publish(int unit) {
  table_.publish(unit);
  published(unit);
}

int PrivateCollectives::take_full_buffer(int unit) {
  if (table_.spec(unit).own_full_buffer) return units_[unit].full;
  QS_CHECK(!free_.empty(),
           "{}: gather_start('{}'): all {} full buffers are in use: reshard a unit first or gather "
           "fewer ahead",
           transport_, table_.spec(unit).name, full_buffers_);
  const int full = free_.front();
  free_.pop_front();
  return full;
}

void PrivateCollectives::gather_start(int unit) {
  table_.gather_start(unit);
  units_[unit].full = take_full_buffer(unit);
  start_gather(unit, units_[unit].full);
  const int64_t bytes = bytes_of(table_.peer_elements(unit), table_.spec(unit).param_dtype);
  ++traffic_.gathers;
  traffic_.gather_logical_bytes += bytes;
  traffic_.gather_copied_bytes += bytes;
}

void* PrivateCollectives::gather_wait(int unit) {
  table_.gather_wait(unit);
  const int full = units_[unit].full;
  wait_gather(unit, full);
  return full_[full]->data;
}

void PrivateCollectives::reshard(int unit) {
  table_.reshard(unit);
  const int full = units_[unit].full;
  release_full(full);
  if (!table_.spec(unit).own_full_buffer) free_.push_back(full);
}

// --- gradients

float* PrivateCollectives::grad_buffer(int unit) {
  return slots_[table_.grad_buffer(unit).slot].sum->as<float>();
}

void PrivateCollectives::reduce_start(int unit) {
  const UnitSpec& spec = table_.spec(unit);
  const int index = table_.reduce_start(unit).slot;
  const Slot& slot = slots_[index];
  if (spec.rounds())
    backend_.ops->cast(Tensor(slot.sum->data, DType::f32, {spec.elements}),
                       Tensor(slot.rounded->data, spec.reduce_dtype, {spec.elements}));
  start_reduce(unit, index);
  const int64_t bytes = bytes_of(table_.peer_elements(unit), spec.reduce_dtype);
  ++traffic_.reduces;
  traffic_.reduce_logical_bytes += bytes;
  traffic_.reduce_copied_bytes += bytes;
}

void PrivateCollectives::reduce_wait(int unit, std::span<const Tensor> dst, Factor scale,
                                     bool accumulate) {
  const int slot = table_.reduce_wait(unit, dst).slot;
  wait_reduce(unit, slot);
  for (size_t p = 0; p < dst.size(); ++p)
    if (dst[p].numel() > 0)
      backend_.ops->sum_parts(parts(unit, slot, static_cast<int>(p)), scale, dst[p], accumulate);
  table_.reduce_done(unit);
}

}  // namespace qshard
