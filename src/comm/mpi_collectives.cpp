// The plain transport: private buffers, one MPI_Iallgather per piece straight into place, and one
// MPI_Ialltoallw per unit that brings all ranks' gradients of the own rows here, where they are
// summed in rank order. Gathers and reductions have a communicator each, so that a reduction never
// waits behind a prefetched gather.
#include <sched.h>

#include <algorithm>
#include <exception>

#include "comm/block_type.h"
#include "comm/transports.h"
#include "comm/unit_table.h"

namespace qshard {
namespace {

char* at(const Buffer& buffer, int64_t element, DType dtype) {
  return static_cast<char*>(buffer->data) + element * static_cast<int64_t>(dtype_size(dtype));
}

class MpiCollectives final : public Collectives {
 public:
  MpiCollectives(World& world, Backend& backend, int full_buffers);
  ~MpiCollectives() override;
  std::string name() const override {
    return "mpi (private buffers, " + world_.mpi_version() + ")";
  }

  int add_unit(const UnitSpec& spec) override { return table_.add(spec); }
  void finish_setup() override;
  Tensor shard(int unit, int piece) override;
  void publish(int unit) override { table_.publish(unit); }
  void gather_start(int unit) override;
  void* gather_wait(int unit) override;
  void reshard(int unit) override;
  float* grad_buffer(int unit) override;
  void reduce_start(int unit) override;
  void reduce_wait(int unit, std::span<const Tensor> dst, float scale, bool accumulate) override;

 private:
  struct Unit {
    Buffer shard;
    int full = -1;                     // full buffer that it holds
    std::vector<MPI_Request> gathers;  // [piece]
    std::vector<BlockType> send_types, part_types;
    std::vector<MPI_Datatype> sends, parts;  // [rank] its rows in a full gradient; in Slot::parts
  };
  struct Slot {
    Buffer sum, rounded, parts;  // f32 gradient; as bf16; [N, shard] from the ranks
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Full {
    Buffer buffer;
    int owner = -1;   // unit for which it is kept, or -1: for any
    int holder = -1;  // unit that is gathered in it, or -1
  };
  void make_types(int unit);
  void allocate();
  int free_full_buffer(int unit) const;
  void wait_all(int n, MPI_Request* requests) const;

  World& world_;
  Backend& backend_;
  UnitTable table_;
  const int rank_, ranks_, full_buffers_;
  MPI_Comm gather_comm_ = MPI_COMM_NULL, reduce_comm_ = MPI_COMM_NULL;
  std::vector<Unit> units_;
  std::vector<Slot> slots_;
  std::vector<Full> full_;
  std::vector<int> counts_, zeros_;  // [rank] 1 item, 0 of this rank itself; displacements
};

MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  QS_MPI(MPI_Comm_dup(comm, &copy));
  QS_MPI(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN));
  return copy;
}

MpiCollectives::MpiCollectives(World& world, Backend& backend, int full_buffers)
    : world_(world),
      backend_(backend),
      table_("mpi", world.size()),
      rank_(world.rank()),
      ranks_(world.size()),
      full_buffers_(full_buffers),
      gather_comm_(duplicate(world.comm())),
      reduce_comm_(duplicate(world.comm())),
      counts_(ranks_, 1),
      zeros_(ranks_, 0) {
  QS_CHECK(full_buffers >= 1, "{} full buffers: at least 1", full_buffers);
  counts_[rank_] = 0;
}

MpiCollectives::~MpiCollectives() {
  if (std::uncaught_exceptions() > 0) return;  // the other ranks may not come; the job ends
  MPI_Comm_free(&gather_comm_);
  MPI_Comm_free(&reduce_comm_);
}

void MpiCollectives::finish_setup() {
  table_.finish();
  units_.resize(table_.size());
  for (int u = 0; u < table_.size(); ++u) {
    units_[u].gathers.assign(table_.spec(u).pieces.size(), MPI_REQUEST_NULL);
    make_types(u);
  }
  allocate();
}

void MpiCollectives::make_types(int unit) {
  const UnitSpec& spec = table_.spec(unit);
  Unit& u = units_[unit];
  for (int r = 0; r < ranks_; ++r) {
    u.send_types.emplace_back(rows_in_full(spec, r), spec.pieces, spec.reduce_dtype);
    std::vector<int64_t> first = table_.packed_at(unit);
    for (int64_t& element : first) element += r * table_.packed_elements(unit);
    u.part_types.emplace_back(first, spec.pieces, spec.reduce_dtype);
    u.sends.push_back(u.send_types.back().get());
    u.parts.push_back(u.part_types.back().get());
  }
}

void MpiCollectives::allocate() {
  Device& device = *backend_.device;
  int64_t pooled_bytes = 0;
  for (int u = 0; u < table_.size(); ++u) {
    const UnitSpec& spec = table_.spec(u);
    const int64_t bytes = spec.elements * static_cast<int64_t>(dtype_size(spec.param_dtype));
    units_[u].shard = Buffer(device, spec.param_dtype, {table_.packed_elements(u)}, Segment::shards,
                             spec.name + " shard");
    if (spec.own_full_buffer)
      full_.push_back({Buffer(device, DType::u8, {bytes}, Segment::params, spec.name), u});
    else
      pooled_bytes = std::max(pooled_bytes, bytes);
  }
  for (int i = 0; i < full_buffers_ && pooled_bytes > 0; ++i)
    full_.push_back({Buffer(device, DType::u8, {pooled_bytes}, Segment::params, "pooled unit")});
  for (const GradSlot& slot : table_.slots()) {
    Slot& s = slots_.emplace_back();
    s.sum = Buffer(device, DType::f32, {slot.elements}, Segment::gradients, "unit gradient");
    s.rounded = Buffer(device, DType::bf16, {slot.rounded_elements}, Segment::gradients,
                       "rounded unit gradient");
    s.parts = Buffer(device, DType::u8, {slot.packed_bytes * ranks_}, Segment::communication,
                     "gradient rows of all ranks");
  }
}

Tensor MpiCollectives::shard(int unit, int piece) {
  const Piece& p = table_.piece(unit, piece);
  const DType dtype = table_.spec(unit).param_dtype;
  return Tensor(at(units_[unit].shard, table_.packed_at(unit)[piece], dtype), dtype, {p.count});
}

int MpiCollectives::free_full_buffer(int unit) const {
  const int owner = table_.spec(unit).own_full_buffer ? unit : -1;
  for (size_t i = 0; i < full_.size(); ++i)
    if (full_[i].owner == owner && full_[i].holder < 0) return static_cast<int>(i);
  fail(
      "mpi: gather_start('{}'): all {} full buffers are in use: reshard a unit first or gather "
      "fewer ahead",
      table_.spec(unit).name, full_buffers_);
}

void MpiCollectives::gather_start(int unit) {
  table_.gather_start(unit);
  Unit& u = units_[unit];
  const UnitSpec& spec = table_.spec(unit);
  u.full = free_full_buffer(unit);
  full_[u.full].holder = unit;
  const MPI_Datatype type = mpi_type(spec.param_dtype);
  for (size_t p = 0; p < spec.pieces.size(); ++p) {
    const Piece& piece = spec.pieces[p];
    const int count = static_cast<int>(piece.count);
    QS_MPI(MPI_Iallgather(at(u.shard, table_.packed_at(unit)[p], spec.param_dtype), count, type,
                          at(full_[u.full].buffer, piece.offset, spec.param_dtype), count, type,
                          gather_comm_, &u.gathers[p]));
  }
  const int64_t bytes =
      table_.peer_elements(unit) * static_cast<int64_t>(dtype_size(spec.param_dtype));
  ++traffic_.gathers;
  traffic_.gather_logical_bytes += bytes;
  traffic_.gather_copied_bytes += bytes;
}

// MPI's own waits spin; with more ranks than CPUs the rank that is waited for needs this core.
void MpiCollectives::wait_all(int n, MPI_Request* requests) const {
  const bool yields = world_.node_size() > world_.cpus();
  for (int done = 0;;) {
    QS_MPI(MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE));
    if (done) return;
    if (yields) sched_yield();
  }
}

void* MpiCollectives::gather_wait(int unit) {
  table_.gather_wait(unit);
  Unit& u = units_[unit];
  wait_all(static_cast<int>(u.gathers.size()), u.gathers.data());
  return full_[u.full].buffer->data;
}

void MpiCollectives::reshard(int unit) {
  table_.reshard(unit);
  full_[units_[unit].full].holder = -1;
}

float* MpiCollectives::grad_buffer(int unit) {
  return slots_[table_.grad_buffer(unit).slot].sum->as<float>();
}

void MpiCollectives::reduce_start(int unit) {
  const UnitSpec& spec = table_.spec(unit);
  Slot& slot = slots_[table_.reduce_start(unit).slot];
  const bool rounded = spec.reduce_dtype == DType::bf16;
  if (rounded)
    backend_.ops->cast(Tensor(slot.sum->data, DType::f32, {spec.elements}),
                       Tensor(slot.rounded->data, DType::bf16, {spec.elements}));
  // Displacements are in the types: as arguments they are int bytes, too small for a large unit.
  QS_MPI(MPI_Ialltoallw(rounded ? slot.rounded->data : slot.sum->data, counts_.data(),
                        zeros_.data(), units_[unit].sends.data(), slot.parts->data, counts_.data(),
                        zeros_.data(), units_[unit].parts.data(), reduce_comm_, &slot.request));
  const int64_t bytes =
      table_.peer_elements(unit) * static_cast<int64_t>(dtype_size(spec.reduce_dtype));
  ++traffic_.reduces;
  traffic_.reduce_logical_bytes += bytes;
  traffic_.reduce_copied_bytes += bytes;
}

void MpiCollectives::reduce_wait(int unit, std::span<const Tensor> dst, float scale,
                                 bool accumulate) {
  Slot& slot = slots_[table_.reduce_wait(unit, dst).slot];
  wait_all(1, &slot.request);
  const UnitSpec& spec = table_.spec(unit);
  const Buffer& own = spec.reduce_dtype == DType::bf16 ? slot.rounded : slot.sum;
  std::vector<Tensor> parts(ranks_);
  for (size_t p = 0; p < dst.size(); ++p) {
    const Piece& piece = spec.pieces[p];
    if (piece.count == 0) continue;
    for (int r = 0; r < ranks_; ++r) {
      char* rows =
          r == rank_ ? at(own, piece.offset + r * piece.count, spec.reduce_dtype)
                     : at(slot.parts, r * table_.packed_elements(unit) + table_.packed_at(unit)[p],
                          spec.reduce_dtype);
      parts[r] = Tensor(rows, spec.reduce_dtype, {piece.count});
    }
    backend_.ops->sum_parts(parts, scale, dst[p], accumulate);
  }
  table_.reduce_done(unit);
}

}  // namespace

std::unique_ptr<Collectives> make_mpi_collectives(World& world, Backend& backend,
                                                  int full_buffers) {
  return std::make_unique<MpiCollectives>(world, backend, full_buffers);
}

}  // namespace qshard
