// What moves between ranks, for whole FSDP units. A transport owns the memory that moves.
//
// [Note: Padded Shard(0)] A parameter with D0 rows on N ranks has chunk = ceil(D0/N) rows a rank;
// its piece of a unit's full buffer holds N·chunk rows, so every rank's rows land in place and the
// full parameter is a contiguous view of the first D0 rows. Rows past D0 are padding: never read as
// values, neither in a full buffer nor in a reduced shard.
//
// A unit is registered once, by all ranks in the same order. After that, per unit:
//   shard(u,p)  own rows of piece p, in param dtype, persistent. After writing them: publish(u).
//   gather_start(u) … gather_wait(u)   all-gather of all pieces as one batch; the full buffer stays
//                                      valid until reshard(u), which moves nothing.
//   grad_buffer(u)                     full gradient, f32, to be written by backward
//   reduce_start(u) … reduce_wait(u)   reduce-scatter of all pieces: own rows of Σ over ranks, in
//                                      rank order, times `scale`, into `dst`.
// Starts are non-blocking and collective in program order; waits yield the core. A gather that
// starts after publish(u) on this rank sees the values published by all ranks for the same number
// of publishes. Errors throw; a dead peer is mpirun's or srun's to notice, which ends the job.
//
// [Note: Writing a shard] Shards may lie in memory that the other ranks read in place. Precondition
// of the first write to shard(u,·) after a gather: this rank has called reshard(u), and so has
// every other rank. A step gives that for free: all ranks pass the all-reduce of the gradient norm
// between the last reshard and the first update. publish(u) throws when it finds a rank that still
// reads.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/world.h"
#include "device/device.h"
#include "device/ops.h"

namespace qshard {

struct Piece {
  int64_t offset;  // first element in the full buffer; a multiple of 64 bytes
  int64_t count;   // elements of one rank's part; the piece has size()·count elements
};

struct UnitSpec {
  std::string name;  // for messages and traces, e.g. "layers.3"
  std::vector<Piece> pieces;
  int64_t elements;      // of the full buffer, padding and alignment included
  DType param_dtype;     // what is gathered
  DType reduce_dtype;    // f32, or what a gradient is rounded to before it moves; sums are f32
  bool own_full_buffer;  // gathered beside the others (root unit, reshard_after_forward=false)
  bool own_grad_buffer;  // its gradient outlives other units' (root unit, accumulation)

  bool rounds() const { return reduce_dtype == DType::bf16 || reduce_dtype == DType::fp16; }
};

// Counted by the transport where it moves bytes, in bytes of this rank since the start. What a
// recording of the device moves is counted once, when it is made.
//   logical  what a ring all-gather or reduce-scatter sends per rank: (N-1)/N of the pieces' full
//            bytes, padding rows included, alignment gaps not.
//   copied   what this rank really copied, sent, or read from other ranks' memory to sum it. Memory
//            that is only mapped, as in a gather inside a node with shm, is not copied.
struct Traffic {
  int64_t gathers = 0, gather_logical_bytes = 0, gather_copied_bytes = 0;
  int64_t reduces = 0, reduce_logical_bytes = 0, reduce_copied_bytes = 0;

  Traffic& operator+=(const Traffic& t) {
    gathers += t.gathers;
    gather_logical_bytes += t.gather_logical_bytes;
    gather_copied_bytes += t.gather_copied_bytes;
    reduces += t.reduces;
    reduce_logical_bytes += t.reduce_logical_bytes;
    reduce_copied_bytes += t.reduce_copied_bytes;
    return *this;
  }
};

class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual std::string name() const = 0;  // for the start log: "shm (gathers in place in …)"

  virtual int add_unit(const UnitSpec& spec) = 0;  // returns 0, 1, 2 …
  virtual void finish_setup() = 0;                 // collective; allocates. No add_unit after it.

  // [count], param dtype, zeroed at first. See [Note: Writing a shard].
  virtual Tensor shard(int unit, int piece) = 0;
  virtual void publish(int unit) = 0;

  virtual void gather_start(int unit) = 0;
  virtual void* gather_wait(int unit) = 0;  // the full buffer: spec.elements of param dtype
  virtual void reshard(int unit) = 0;

  // Waits until an earlier reduction no longer reads it. Two buffers serve all units without an own
  // one: reduce_wait of a unit comes before grad_buffer of the second one after it. The same buffer
  // until reduce_start; its content at first is unspecified (zeros, or an earlier gradient).
  virtual float* grad_buffer(int unit) = 0;
  virtual void reduce_start(int unit) = 0;
  // dst[p]: f32 [count of piece p]; padding rows get unspecified values. accumulate: +=
  // (micro-batches).
  virtual void reduce_wait(int unit, std::span<const Tensor> dst, Factor scale,
                           bool accumulate) = 0;

  const Traffic& traffic() const { return traffic_; }

 protected:
  Traffic traffic_;
};

// transport: "shm" or "mpi". `full_buffers`: gathered units that exist at once besides own ones
// (prefetch depth + 1).
std::unique_ptr<Collectives> make_collectives(const std::string& transport, World& world,
                                              Backend& backend, int full_buffers);

}  // namespace qshard
