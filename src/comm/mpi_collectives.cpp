// The plain transport: one MPI_Iallgather per piece straight into place, small pieces together in
// one MPI_Ialltoallw, and one MPI_Ialltoallw per unit that brings all ranks' gradients of the own
// rows here, where they are summed in rank order. Gathers and reductions have a communicator each,
// so that a reduction never waits behind a prefetched gather.
#include <sched.h>

#include <exception>

#include "comm/block_type.h"
#include "comm/duplicate.h"
#include "comm/private_collectives.h"
#include "comm/transports.h"

namespace qshard {
namespace {

// Bytes of a rank's part up to which pieces, such as a layer's norms, are gathered as one message.
// Measured with Open MPI 4.1, 4 ranks on 2 cores, a layer of 64 columns: 36 us in one message, 56
// us as 11; three such layers 82 and 167 us. Large pieces lose by it: a layer of 512 columns on 2
// ranks takes 1.3 ms as one message, 0.85 ms piece by piece.
constexpr int64_t kSmallBytes = 16 << 10;

class MpiCollectives final : public PrivateCollectives {
 public:
  MpiCollectives(World& world, Backend& backend, int full_buffers);
  ~MpiCollectives() override;
  std::string name() const override {
    return "mpi (private buffers, " + world_.mpi_version() + ")";
  }

 private:
  struct Unit {
    std::vector<int> large;                    // pieces that are gathered one by one
    std::vector<BlockType> gather_types;       // of the others: own rows, then each rank's
    std::vector<MPI_Datatype> gathered, rows;  // [rank] what it gets of ours, and we of it
    std::vector<MPI_Request> gathers;
    std::vector<BlockType> send_types, part_types;
    std::vector<MPI_Datatype> sends, parts;  // [rank] its rows in a full gradient; in received()
  };
  void allocated() override;
  void make_gather_types(int unit);
  void make_reduce_types(int unit);
  void start_gather(int unit, int full) override;
  void wait_gather(int unit, int full) override;
  void start_reduce(int unit, int slot) override;
  void wait_reduce(int unit, int slot) override;
  std::vector<Tensor> parts(int unit, int slot, int piece) override;
  void wait_all(int n, MPI_Request* requests) const;
  void progress() const;

  World& world_;
  int watcher_ = -1;
  MPI_Comm gather_comm_, reduce_comm_;
  std::vector<Unit> units_;
  std::vector<MPI_Request> reductions_;  // [slot]
  std::vector<int> ones_, counts_;       // [rank] 1 item; in reductions 0 of this rank itself
  std::vector<int> zeros_;               // [rank] displacements: they are in the types
};

MpiCollectives::MpiCollectives(World& world, Backend& backend, int full_buffers)
    : PrivateCollectives("mpi", world, backend, full_buffers, world.size()),
      world_(world),
      gather_comm_(duplicate(world.comm())),
      reduce_comm_(duplicate(world.comm())),
      ones_(ranks_, 1),
      counts_(ranks_, 1),
      zeros_(ranks_, 0) {
  counts_[rank_] = 0;
  watcher_ = backend_.device->watch([this] { progress(); });
}

MpiCollectives::~MpiCollectives() {
  backend_.device->unwatch(watcher_);
  if (std::uncaught_exceptions() > 0) return;  // the other ranks may not come; the job ends
  MPI_Comm_free(&gather_comm_);
  MPI_Comm_free(&reduce_comm_);
}

void MpiCollectives::allocated() {
  units_.resize(table().size());
  for (int u = 0; u < table().size(); ++u) {
    make_gather_types(u);
    make_reduce_types(u);
  }
  reductions_.assign(slot_count(), MPI_REQUEST_NULL);
}

void MpiCollectives::make_gather_types(int unit) {
  const UnitSpec& spec = table().spec(unit);
  Unit& u = units_[unit];
  std::vector<Piece> small;
  std::vector<int64_t> in_shard;
  for (size_t p = 0; p < spec.pieces.size(); ++p) {
    if (bytes_of(spec.pieces[p].count, spec.param_dtype) > kSmallBytes) {
      u.large.push_back(static_cast<int>(p));
      continue;
    }
    small.push_back(spec.pieces[p]);
    in_shard.push_back(table().packed_at(unit)[p]);
  }
  u.gathers.assign(u.large.size() + !small.empty(), MPI_REQUEST_NULL);
  if (small.empty()) return;
  u.gather_types.emplace_back(in_shard, small, spec.param_dtype);
  for (int r = 0; r < ranks_; ++r) {
    std::vector<int64_t> in_full;
    for (const Piece& piece : small) in_full.push_back(piece.offset + r * piece.count);
    u.gather_types.emplace_back(in_full, small, spec.param_dtype);
    u.gathered.push_back(u.gather_types.front().get());
    u.rows.push_back(u.gather_types.back().get());
  }
}

void MpiCollectives::make_reduce_types(int unit) {
  const UnitSpec& spec = table().spec(unit);
  Unit& u = units_[unit];
  for (int r = 0; r < ranks_; ++r) {
    u.send_types.emplace_back(rows_in_full(spec, r), spec.pieces, spec.reduce_dtype);
    std::vector<int64_t> first = table().packed_at(unit);
    for (int64_t& at : first) at += r * table().packed_elements(unit);
    u.part_types.emplace_back(first, spec.pieces, spec.reduce_dtype);
    u.sends.push_back(u.send_types.back().get());
    u.parts.push_back(u.part_types.back().get());
  }
}

void MpiCollectives::start_gather(int unit, int full) {
  const UnitSpec& spec = table().spec(unit);
  const MPI_Datatype type = mpi_type(spec.param_dtype);
  Unit& u = units_[unit];
  MPI_Request* request = u.gathers.data();
  for (const int piece : u.large) {
    const int count = static_cast<int>(spec.pieces[piece].count);
    QS_MPI(MPI_Iallgather(shard_rows(unit, piece), count, type, full_rows(unit, full, piece), count,
                          type, gather_comm_, request++));
  }
  if (!u.gather_types.empty())
    QS_MPI(MPI_Ialltoallw(shard_data(unit), ones_.data(), zeros_.data(), u.gathered.data(),
                          full_data(full), ones_.data(), zeros_.data(), u.rows.data(), gather_comm_,
                          request));
}

// MPI's own waits spin; with more ranks than CPUs the rank that is waited for needs this core.
void MpiCollectives::wait_all(int n, MPI_Request* requests) const {
  const bool yields = world_.ranks_share_cores();
  for (int done = 0;;) {
    QS_MPI(MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE));
    if (done) return;
    if (yields) sched_yield();
  }
}

// MPI moves what was started only while it is called; any call will do.
void MpiCollectives::progress() const {
  int found = 0;
  QS_MPI(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, gather_comm_, &found, MPI_STATUS_IGNORE));
}

void MpiCollectives::wait_gather(int unit, int) {
  std::vector<MPI_Request>& gathers = units_[unit].gathers;
  wait_all(static_cast<int>(gathers.size()), gathers.data());
}

// Displacements are in the types: as arguments they are int bytes, too small for a large unit.
void MpiCollectives::start_reduce(int unit, int slot) {
  QS_MPI(MPI_Ialltoallw(gradient(unit, slot), counts_.data(), zeros_.data(),
                        units_[unit].sends.data(), received(slot), counts_.data(), zeros_.data(),
                        units_[unit].parts.data(), reduce_comm_, &reductions_[slot]));
}

void MpiCollectives::wait_reduce(int, int slot) { wait_all(1, &reductions_[slot]); }

std::vector<Tensor> MpiCollectives::parts(int unit, int slot, int piece) {
  std::vector<Tensor> parts;
  for (int r = 0; r < ranks_; ++r)
    parts.push_back(r == rank_ ? gradient_rows(unit, slot, r, piece)
                               : received_rows(unit, slot, r, piece));
  return parts;
}

}  // namespace

std::unique_ptr<Collectives> make_mpi_collectives(World& world, Backend& backend,
                                                  int full_buffers) {
  return std::make_unique<MpiCollectives>(world, backend, full_buffers);
}

}  // namespace qshard
