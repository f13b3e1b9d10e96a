// [Note: Shared-memory transport] A unit's full parameters lie once in a window of the node, and a
// rank's shard is its own rows of them: a gather moves nothing. Each rank has gradient slots in its
// own part of a second window. The ranks of a node agree by counters that only their owner writes
// (release) and the others poll (acquire), one cache line each:
//   published[u]  times that this rank has published unit u
//   released[u]   times that it has resharded u
//   arrived[u]    the count of publishes whose rows it has received from its wards on other nodes
//   filled[s]     rounds of gradient slot s that it has written, ready to be summed
//   consumed[s]   rounds of slot s in which it has read all that it sums from the others' slots
// What must hold:
// - gather_wait(u) waits until every rank's published[u] has reached what this rank's own was at
//   gather_start(u), and arrived[u] too.
// - Nobody writes a shard that another rank reads: see [Note: Writing a shard]. publish(u) compares
//   released[u] of all ranks, which are equal when the order was right, and throws otherwise. For
//   the same reason rows from other nodes may be received from gather_start(u) on.
// - grad_buffer(u) begins round n of a slot once consumed has reached n on every rank, so that the
//   slot is overwritten only after all have summed it. A rank never waits there for its own sum:
//   UnitTable has thrown by then.
// - reduce_wait(u) of round n waits until filled has reached n+1 on every rank.
// A wait depends only on calls that come earlier in program order, or are the same call, on other
// ranks, so every skew ends. Waits that MPI takes part in make it progress, for the same reason.
#include <sched.h>
#include <sys/statvfs.h>

#include <atomic>
#include <cstring>
#include <new>

#include "comm/node_exchange.h"
#include "comm/node_map.h"
#include "comm/shared_window.h"
#include "comm/transports.h"
#include "comm/unit_table.h"

namespace qshard {
namespace {

struct alignas(64) Counter {  // alone on its cache line
  std::atomic<uint64_t> value{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters are shared between processes");

constexpr int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

class ShmCollectives final : public Collectives {
 public:
  ShmCollectives(World& world, Backend& backend, int ranks_per_node);
  ~ShmCollectives() override {
    if (watcher_ >= 0) backend_.device->unwatch(watcher_);
    account(-1);
  }
  std::string name() const override;

  int add_unit(const UnitSpec& spec) override { return units_.add(spec); }
  void finish_setup() override;
  Tensor shard(int unit, int piece) override;
  void publish(int unit) override;
  void gather_start(int unit) override;
  void* gather_wait(int unit) override;
  void reshard(int unit) override;
  float* grad_buffer(int unit) override;
  void reduce_start(int unit) override;
  void reduce_wait(int unit, std::span<const Tensor> dst, Factor scale, bool accumulate) override;

 private:
  enum Kind { published, released, arrived, filled, consumed };
  struct Reduction {  // what a slot is used for between reduce_start and reduce_wait
    int unit = -1;
    uint64_t round_end = 0;     // what `filled` reaches
    bool sums_pending = false;  // the wards' sums have not been sent yet
  };
  struct SlotPlace {
    int64_t sum, rounded;  // bytes into a rank's part: the gradient, in f32 and in 16 bits
  };

  // Memory
  int64_t place_params();
  int64_t place_own_part();
  void check_room() const;
  void touch_own_memory();
  void account(int64_t sign);
  char* full(int unit) const { return params_.part(0) + full_offset_[unit]; }
  char* slot_data(int local, int slot, bool rounded) const;
  Tensor rows(char* buffer, DType dtype, const Piece& piece, int rank) const;
  int64_t counters() const { return 3 * units_.size() + 2 * int64_t(units_.slots().size()); }

  // Agreement
  std::atomic<uint64_t>& counter(int local, Kind kind, int index) const;
  uint64_t own(Kind kind, int index) const;
  void set_own(Kind kind, int index, uint64_t value);
  bool reached_by_all(Kind kind, int index, uint64_t wanted) const;
  void wait_for_all(Kind kind, int index, uint64_t wanted);
  template <typename Done>
  void wait_until(Done&& done);

  // Between nodes
  bool one_node() const { return nodes_.nodes() == 1; }
  void progress();
  void send_sums(int slot);

  void sum_rows(int unit, int slot, int rank, int piece, Factor scale, const Tensor& to,
                bool accumulate);

  const World& world_;
  Backend& backend_;
  UnitTable units_;
  const NodeMap nodes_;
  const int rank_, local_, locals_, spins_;  // locals_: ranks of this node

  SharedWindow params_;                // all units' full buffers, in the first rank's part
  SharedWindow own_;                   // counters and gradient slots of each rank
  std::vector<int64_t> full_offset_;   // [unit] bytes
  std::vector<SlotPlace> slot_place_;  // [slot]
  int64_t params_bytes_ = 0, own_bytes_ = 0;
  int watcher_ = -1;

  std::unique_ptr<NodeExchange> exchange_;
  std::vector<uint64_t> gather_version_;   // [unit] of published that the last gather waits for
  std::vector<uint64_t> started_version_;  // [unit] whose rows have been asked of the other nodes
  std::vector<Reduction> reductions_;      // [slot]
};

// With more ranks than CPUs the rank that is waited for may need this core at once. Measured on 2
// cores, a tiny reduction of 2 / 4 / 8 ranks: 1.0 / 5.6 / 13 us when yielding at once, 0.25 / 12 /
// 45 us after 200 looks, 0.26 / 48 / 385 us after 20000.
int spins_before_yield(const World& world) { return world.ranks_share_cores() ? 0 : 200; }

ShmCollectives::ShmCollectives(World& world, Backend& backend, int ranks_per_node)
    : world_(world),
      backend_(backend),
      units_("shm", world.size()),
      nodes_(world, ranks_per_node),
      rank_(world.rank()),
      local_(nodes_.local()),
      locals_(nodes_.local_size()),
      spins_(spins_before_yield(world)) {}

std::string ShmCollectives::name() const {
  if (one_node()) return "shm (gathers in place in shared memory)";
  return fmt::format("shm (gathers in place in shared memory, rows between {} nodes over {})",
                     nodes_.nodes(), world_.mpi_version());
}

// --- memory

void ShmCollectives::finish_setup() {
  units_.finish();
  params_bytes_ = place_params();
  own_bytes_ = place_own_part();
  check_room();
  params_ = SharedWindow(nodes_.comm(), local_ == 0 ? params_bytes_ : 0);
  own_ = SharedWindow(nodes_.comm(), own_bytes_);
  account(+1);
  exchange_ = std::make_unique<NodeExchange>(world_, nodes_, units_, *backend_.device);
  gather_version_.resize(units_.size());
  started_version_.resize(units_.size());
  reductions_.resize(units_.slots().size());
  touch_own_memory();
  world_.barrier();  // counters and shards are zero before anyone looks
  if (!one_node()) watcher_ = backend_.device->watch([this] { progress(); });
}

int64_t ShmCollectives::place_params() {
  int64_t bytes = 0;
  for (int u = 0; u < units_.size(); ++u) {
    full_offset_.push_back(bytes);
    bytes += round_up(bytes_of(units_.spec(u).elements, units_.spec(u).param_dtype));
  }
  return bytes;
}

// Lays out counters, then slots.
int64_t ShmCollectives::place_own_part() {
  int64_t bytes = counters() * int64_t{sizeof(Counter)};
  for (const GradSlot& slot : units_.slots()) {
    const int64_t sum = bytes;
    const int64_t rounded = sum + round_up(bytes_of(slot.elements, DType::f32));
    bytes = rounded + round_up(bytes_of(slot.rounded_elements, DType::u16));
    slot_place_.push_back({sum, rounded});
  }
  return bytes;
}

// MPI keeps the windows of several ranks in files of /dev/shm. A page that finds no room there ends
// the program with SIGBUS, and Open MPI's own look at the room leaves all ranks but one waiting.
// All windows of a machine count, also those of other shard groups.
void ShmCollectives::check_room() const {
  int64_t needed = locals_ == 1 ? 0 : own_bytes_ + (local_ == 0 ? params_bytes_ : 0);
  QS_MPI(MPI_Allreduce(MPI_IN_PLACE, &needed, 1, MPI_INT64_T, MPI_SUM, world_.machine_comm()));
  collectively(world_, [&] {
    struct statvfs fs;
    if (needed == 0 || statvfs("/dev/shm", &fs) != 0) return;
    const int64_t room = static_cast<int64_t>(fs.f_bavail) * static_cast<int64_t>(fs.f_frsize);
    if (needed > room)
      fail(
          "transport shm needs {} bytes of shared memory for {} ranks, /dev/shm has {}: make it "
          "larger (`mount -o remount,size=…`; in a container: --shm-size), use fewer ranks a node, "
          "or `--comm.transport mpi`",
          needed, world_.machine_size(), room);
  });
}

// First touch: pages get their place near the rank that writes them.
void ShmCollectives::touch_own_memory() {
  std::memset(own_.part(local_), 0, own_bytes_);
  for (int64_t i = 0; i < counters(); ++i)
    new (own_.part(local_) + i * int64_t{sizeof(Counter)}) Counter;
  std::vector<int> ranks = nodes_.wards();
  ranks.push_back(rank_);
  for (int u = 0; u < units_.size(); ++u)
    for (const Piece& piece : units_.spec(u).pieces)
      for (int rank : ranks) {
        const Tensor touched = rows(full(u), units_.spec(u).param_dtype, piece, rank);
        std::memset(touched.data, 0, touched.bytes());
      }
}

// What this rank adds to the node's memory: its rows and its wards', counters and gradient slots.
void ShmCollectives::account(int64_t sign) {
  if (own_bytes_ == 0) return;
  const int64_t wards = static_cast<int64_t>(nodes_.wards().size());
  int64_t shards = 0, slots = 0;
  for (int u = 0; u < units_.size(); ++u)
    shards += bytes_of(units_.shard_elements(u), units_.spec(u).param_dtype);
  for (const GradSlot& slot : units_.slots())
    slots += bytes_of(slot.elements, DType::f32) + bytes_of(slot.rounded_elements, DType::u16);
  Device& device = *backend_.device;
  device.account(Segment::shards, sign * shards);
  device.account(Segment::params, sign * wards * shards);
  device.account(Segment::gradients, sign * slots);
  device.account(Segment::communication, sign * (own_bytes_ - slots));
}

char* ShmCollectives::slot_data(int local, int slot, bool rounded) const {
  return own_.part(local) + (rounded ? slot_place_[slot].rounded : slot_place_[slot].sum);
}

// A rank's rows of a piece in a full buffer.
Tensor ShmCollectives::rows(char* buffer, DType dtype, const Piece& piece, int rank) const {
  return Tensor(buffer + bytes_of(piece.offset + rank * piece.count, dtype), dtype, {piece.count});
}

Tensor ShmCollectives::shard(int unit, int piece) {
  const Piece& p = units_.piece(unit, piece);
  return rows(full(unit), units_.spec(unit).param_dtype, p, rank_);
}

// --- agreement

std::atomic<uint64_t>& ShmCollectives::counter(int local, Kind kind, int index) const {
  const int units = units_.size(), slots = static_cast<int>(units_.slots().size());
  const int first[] = {0, units, 2 * units, 3 * units, 3 * units + slots};
  return reinterpret_cast<Counter*>(own_.part(local))[first[kind] + index].value;
}

uint64_t ShmCollectives::own(Kind kind, int index) const {
  return counter(local_, kind, index).load(std::memory_order_relaxed);
}

void ShmCollectives::set_own(Kind kind, int index, uint64_t value) {
  counter(local_, kind, index).store(value, std::memory_order_release);
}

bool ShmCollectives::reached_by_all(Kind kind, int index, uint64_t wanted) const {
  for (int r = 0; r < locals_; ++r)
    if (counter(r, kind, index).load(std::memory_order_acquire) < wanted) return false;
  return true;
}

template <typename Done>
void ShmCollectives::wait_until(Done&& done) {
  for (int spin = 0; !done(); ++spin) {
    progress();
    if (spin >= spins_) sched_yield();
  }
}

void ShmCollectives::wait_for_all(Kind kind, int index, uint64_t wanted) {
  for (int r = 0; r < locals_; ++r) {
    const std::atomic<uint64_t>& value = counter(r, kind, index);
    wait_until([&] { return value.load(std::memory_order_acquire) >= wanted; });
  }
}

// --- parameters

void ShmCollectives::publish(int unit) {
  units_.publish(unit);
  const uint64_t reads = own(released, unit);
  QS_CHECK(reached_by_all(released, unit, reads),
           "shm: publish('{}') on rank {} while another rank still reads the parameters in place: "
           "all ranks must pass a collective between reshard and the first write of a shard",
           units_.spec(unit).name, rank_);
  set_own(published, unit, own(published, unit) + 1);
}

void ShmCollectives::gather_start(int unit) {
  units_.gather_start(unit);
  const uint64_t version = own(published, unit);
  const int64_t shard_bytes = bytes_of(units_.shard_elements(unit), units_.spec(unit).param_dtype);
  gather_version_[unit] = version;
  if (version > started_version_[unit]) {  // other nodes' rows of this version are not here yet
    exchange_->start_rows(unit, full(unit));
    started_version_[unit] = version;
    traffic_.gather_copied_bytes += (nodes_.nodes() - 1) * shard_bytes;
  }
  ++traffic_.gathers;
  traffic_.gather_logical_bytes += (world_.size() - 1) * shard_bytes;
  progress();
}

void* ShmCollectives::gather_wait(int unit) {
  units_.gather_wait(unit);
  wait_for_all(published, unit, gather_version_[unit]);
  if (!one_node()) wait_for_all(arrived, unit, gather_version_[unit]);
  return full(unit);
}

void ShmCollectives::reshard(int unit) {
  units_.reshard(unit);
  set_own(released, unit, own(released, unit) + 1);
}

// --- gradients

float* ShmCollectives::grad_buffer(int unit) {
  const GradUse use = units_.grad_buffer(unit);
  if (use.first) wait_for_all(consumed, use.slot, static_cast<uint64_t>(use.round));
  return reinterpret_cast<float*>(slot_data(local_, use.slot, false));
}

void ShmCollectives::reduce_start(int unit) {
  const GradUse use = units_.reduce_start(unit);
  const UnitSpec& spec = units_.spec(unit);
  if (spec.rounds())
    backend_.ops->cast(
        Tensor(slot_data(local_, use.slot, false), DType::f32, {spec.elements}),
        Tensor(slot_data(local_, use.slot, true), spec.reduce_dtype, {spec.elements}));
  const uint64_t round_end = static_cast<uint64_t>(use.round) + 1;
  reductions_[use.slot] = {unit, round_end, !one_node()};
  exchange_->start_sums(unit, use.slot);
  set_own(filled, use.slot, round_end);
  // Read from the other ranks' slots, for own rows and for the wards', whose sums are sent as f32.
  const int64_t shard = units_.shard_elements(unit);
  const int64_t wards = static_cast<int64_t>(nodes_.wards().size());
  ++traffic_.reduces;
  traffic_.reduce_logical_bytes += bytes_of((world_.size() - 1) * shard, spec.reduce_dtype);
  traffic_.reduce_copied_bytes += bytes_of((1 + wards) * (locals_ - 1) * shard, spec.reduce_dtype) +
                                  bytes_of(wards * shard, DType::f32);
  progress();
}

// Sums a rank's rows over the slots of this node.
void ShmCollectives::sum_rows(int unit, int slot, int rank, int piece, Factor scale,
                              const Tensor& to, bool accumulate) {
  if (to.numel() == 0) return;
  const UnitSpec& spec = units_.spec(unit);
  std::vector<Tensor> parts;
  for (int r = 0; r < locals_; ++r)
    parts.push_back(
        rows(slot_data(r, slot, spec.rounds()), spec.reduce_dtype, spec.pieces[piece], rank));
  backend_.ops->sum_parts(parts, scale, to, accumulate);
}

void ShmCollectives::reduce_wait(int unit, std::span<const Tensor> dst, Factor scale,
                                 bool accumulate) {
  const int slot = units_.reduce_wait(unit, dst).slot;
  const uint64_t round_end = reductions_[slot].round_end;
  const int pieces = static_cast<int>(dst.size());
  wait_for_all(filled, slot, round_end);
  progress();  // sends the wards' sums, if that has not happened yet
  for (int p = 0; p < pieces; ++p) {
    if (one_node())
      sum_rows(unit, slot, rank_, p, scale, dst[p], accumulate);
    else
      sum_rows(unit, slot, rank_, p, 1, exchange_->node_sum(unit, slot, nodes_.node(), p), false);
  }
  set_own(consumed, slot, round_end);
  if (!one_node()) {
    wait_until([&] { return exchange_->sums_done(slot); });
    for (int p = 0; p < pieces; ++p) {
      if (dst[p].numel() == 0) continue;
      std::vector<Tensor> parts;
      for (int n = 0; n < nodes_.nodes(); ++n)
        parts.push_back(exchange_->node_sum(unit, slot, n, p));
      backend_.ops->sum_parts(parts, scale, dst[p], accumulate);
    }
  }
  units_.reduce_done(unit);
}

// --- between nodes

// Goes on with what other ranks may wait for; returns at once.
void ShmCollectives::progress() {
  if (one_node()) return;
  for (int u = 0; u < units_.size(); ++u)
    if (own(arrived, u) < started_version_[u] && exchange_->rows_done(u))
      set_own(arrived, u, started_version_[u]);
  for (size_t s = 0; s < reductions_.size(); ++s) {
    const int slot = static_cast<int>(s);
    if (reductions_[s].sums_pending && reached_by_all(filled, slot, reductions_[s].round_end))
      send_sums(slot);
    exchange_->sums_done(slot);  // a test, which lets MPI send
  }
}

void ShmCollectives::send_sums(int slot) {
  Reduction& reduction = reductions_[slot];
  reduction.sums_pending = false;
  for (size_t w = 0; w < nodes_.wards().size(); ++w)
    for (size_t p = 0; p < units_.spec(reduction.unit).pieces.size(); ++p) {
      const int piece = static_cast<int>(p);
      sum_rows(reduction.unit, slot, nodes_.wards()[w], piece, 1,
               exchange_->ward_sum(reduction.unit, slot, w, piece), false);
    }
  exchange_->send_sums(reduction.unit, slot);
}

}  // namespace

std::unique_ptr<Collectives> make_shm_collectives(World& world, Backend& backend,
                                                  int ranks_per_node) {
  return std::make_unique<ShmCollectives>(world, backend, ranks_per_node);
}

}  // namespace qshard
