// What every transport keeps about its units: their specs, the state of each one's parameters and
// gradient, and who holds which gradient slot. Its verbs are named after those of Collectives and
// throw on a call out of order, naming transport, unit and the call that is missing; so transports
// move bytes and never check. Nothing here communicates or owns the memory of a buffer.
//
// Gradient slots: units with own_grad_buffer have one each; all others share a ring of two, in the
// order of grad_buffer calls, which is the same on every rank. The n-th use of a slot (from 0) is
// its round n, so ranks can agree on a slot's content by counting.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/collectives.h"

namespace qshard {

inline int64_t bytes_of(int64_t elements, DType dtype) {
  return elements * static_cast<int64_t>(dtype_size(dtype));
}

struct GradSlot {
  int64_t elements = 0;          // of the largest unit that uses it
  int64_t rounded_elements = 0;  // of the largest one that rounds its gradient
  int64_t packed_elements = 0;   // packed rows of one rank, of the unit that has most
  int64_t packed_bytes = 0;      // the same as they move, in reduce_dtype
  int64_t rounds = 0;            // uses begun so far
  int holder = -1;               // unit that writes or reduces it now, or -1
};

struct GradUse {
  int slot;
  int64_t round;
  bool first;  // this call began the round
};

class UnitTable {
 public:
  UnitTable(std::string transport, int ranks);

  int add(const UnitSpec& spec);
  void finish();
  int size() const { return static_cast<int>(units_.size()); }
  const UnitSpec& spec(int unit) const { return find(unit).spec; }
  const Piece& piece(int unit, int piece) const;
  int64_t shard_elements(int unit) const;  // Σ counts of the pieces
  int64_t peer_elements(int unit) const;   // of the other ranks: (N-1)·shard_elements
  // One rank's rows of all pieces one after the other, each piece aligned to 64 bytes in any dtype:
  // first elements by piece, and the elements of the whole.
  const std::vector<int64_t>& packed_at(int unit) const { return find(unit).packed_at; }
  int64_t packed_elements(int unit) const { return find(unit).packed_elements; }
  const std::vector<GradSlot>& slots() const { return slots_; }

  void publish(int unit) const;  // the shard may be written and read only while sharded
  void gather_start(int unit);
  void gather_wait(int unit);
  void reshard(int unit);

  GradUse grad_buffer(int unit);
  GradUse reduce_start(int unit);
  GradUse reduce_wait(int unit, std::span<const Tensor> dst) const;  // checks dst
  void reduce_done(int unit);

 private:
  enum class Params { sharded, gathering, gathered };
  enum class Grad { idle, writing, reducing };
  struct Unit {
    UnitSpec spec;
    std::vector<int64_t> packed_at;
    int64_t packed_elements = 0;
    Params params = Params::sharded;
    Grad grad = Grad::idle;
    int slot = -1;  // own one, or the ring's that it holds now
  };
  const Unit& find(int unit) const;
  Unit& find(int unit) { return const_cast<Unit&>(std::as_const(*this).find(unit)); }
  void expect(const Unit& unit, Params wanted, const char* verb, const char* fix) const;
  void expect(const Unit& unit, Grad wanted, const char* verb, const char* fix) const;
  GradUse use(const Unit& unit) const { return {unit.slot, slots_[unit.slot].rounds - 1, false}; }

  std::string transport_;
  int ranks_;
  bool finished_ = false;
  std::vector<Unit> units_;
  std::vector<GradSlot> slots_;
  int ring_ = 0, next_in_ring_ = 0;
};

}  // namespace qshard
