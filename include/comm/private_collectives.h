// What the transports with private buffers share: packed shards, full buffers of which the layers
// use a pool, gradient slots, the order of calls and the count of bytes. A transport derives from
// it and moves bytes, in the verbs at the end.
//
// A rank's shard of a unit is packed: its rows of all pieces one after the other, see
// UnitTable::packed_at(). What a reduction brings is packed alike, one or more `parts` of it, and
// is summed in their order.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "comm/unit_table.h"

namespace qshard {

class PrivateCollectives : public Collectives {
 public:
  int add_unit(const UnitSpec& spec) final { return table_.add(spec); }
  void finish_setup() final;
  Tensor shard(int unit, int piece) final;
  void publish(int unit) final;
  void gather_start(int unit) final;
  void* gather_wait(int unit) final;
  void reshard(int unit) final;
  float* grad_buffer(int unit) final;
  void reduce_start(int unit) final;
  void reduce_wait(int unit, std::span<const Tensor> dst, Factor scale, bool accumulate) final;

 protected:
  // received_parts: parts that received() holds. Buffers come from `memory` or, without one, from
  // the backend's device.
  PrivateCollectives(std::string transport, const World& world, Backend& backend, int full_buffers,
                     int received_parts, std::shared_ptr<Device> memory = nullptr);

  const UnitTable& table() const { return table_; }
  int full_count() const { return static_cast<int>(full_.size()); }
  int slot_count() const { return static_cast<int>(slots_.size()); }
  // All buffers, for a transport that registers them: shards and full buffers; gradient slots.
  std::vector<Tensor> gather_buffers() const;
  std::vector<Tensor> reduce_buffers() const;

  char* shard_data(int unit) const;  // packed
  char* full_data(int full) const;
  char* shard_rows(int unit, int piece) const;           // own rows, in param dtype
  char* full_rows(int unit, int full, int piece) const;  // all ranks' rows, from rank 0's on
  char* gradient(int unit, int slot) const;              // full and not packed, in reduce dtype
  Tensor gradient_rows(int unit, int slot, int rank, int piece) const;
  char* received(int slot) const;  // packed parts in reduce dtype, where start_reduce() puts them
  Tensor received_rows(int unit, int slot, int part, int piece) const;

  // The verbs of Collectives after their checks, with the buffers that they concern.
  virtual void allocated() {}  // the end of finish_setup()
  virtual void published(int) {}
  virtual void start_gather(int unit, int full) = 0;
  virtual void wait_gather(int unit, int full) = 0;
  virtual void release_full(int) {}
  virtual void start_reduce(int unit, int slot) = 0;
  virtual void wait_reduce(int unit, int slot) = 0;
  virtual std::vector<Tensor> parts(int unit, int slot, int piece) = 0;  // own rows to be summed

  Backend& backend_;
  const int rank_, ranks_;

 private:
  struct Unit {
    Buffer shard;
    int full = -1;  // full buffer that it holds, or owns
  };
  struct Slot {
    Buffer sum, rounded, received;  // f32 gradient; in reduce dtype; packed parts
  };
  int take_full_buffer(int unit);

  UnitTable table_;
  const std::shared_ptr<Device> memory_;
  const std::string transport_;
  const int full_buffers_, received_parts_;
  std::vector<Unit> units_;
  std::vector<Slot> slots_;
  std::vector<Buffer> full_;
  std::deque<int> free_;  // of the pool, the one that was released longest ago first
};

}  // namespace qshard
