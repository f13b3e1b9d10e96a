// Private buffers, as in comm/mpi_collectives.cpp: packed shards, pooled full buffers, and gradient
// slots with the packed sums of the own rows.
#include "cuda/nccl_collectives.h"

#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <map>

#include "comm/unit_table.h"
#include "cuda/check_cuda.h"
#include "cuda/device_cuda.h"

namespace qshard {
namespace {

using cuda::CudaDevice;
using cuda::Event;
using cuda::Stream;

void check_nccl(ncclResult_t status, ncclComm_t comm, const char* call) {
  if (status == ncclSuccess) return;
  const char* detail = ncclGetLastError(comm);
  fail("{} failed: {}{}{}; NCCL_DEBUG=WARN tells more", call, ncclGetErrorString(status),
       detail && *detail ? ": " : "", detail ? detail : "");
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::fp16:
      return ncclFloat16;
    default:
      fail("nccl: {} is not a dtype of parameters or gradients", dtype_name(dtype));
  }
}

std::string nccl_version() {
  int version = 0;
  check_nccl(ncclGetVersion(&version), nullptr, "ncclGetVersion");
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

// A communicator of all ranks and the stream on which its operations run, in the order of the
// calls.
class Channel {
 public:
  explicit Channel(const World& world);  // collective
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  void check(ncclResult_t status, const char* call) const { check_nccl(status, comm_, call); }
  // One group of calls: calls(piece) for each piece that has elements.
  template <typename Call>
  void group(const UnitSpec& spec, const char* name, Call call) const;
  // Throws when an operation failed since it was started.
  void poll() const;

 private:
  Stream stream_{Stream::Priority::high};
  ncclComm_t comm_ = nullptr;
};

Channel::Channel(const World& world) {
  ncclUniqueId id{};
  collectively(world, [&] {
    if (world.rank() == 0) check_nccl(ncclGetUniqueId(&id), nullptr, "ncclGetUniqueId");
  });
  const std::string bytes = world.broadcast(std::string(id.internal, sizeof id.internal), 0);
  std::memcpy(id.internal, bytes.data(), sizeof id.internal);
  check_nccl(ncclCommInitRank(&comm_, world.size(), id, world.rank()), nullptr, "ncclCommInitRank");
}

Channel::~Channel() {
  if (!comm_) return;
  if (std::uncaught_exceptions() > 0) {
    ncclCommAbort(comm_);
    return;
  }
  ncclCommFinalize(comm_);
  ncclCommDestroy(comm_);
}

template <typename Call>
void Channel::group(const UnitSpec& spec, const char* name, Call call) const {
  check(ncclGroupStart(), "ncclGroupStart");
  for (size_t p = 0; p < spec.pieces.size(); ++p)
    if (spec.pieces[p].count > 0) check(call(p), name);
  check(ncclGroupEnd(), name);
}

void Channel::poll() const {
  ncclResult_t status = ncclSuccess;
  check(ncclCommGetAsyncError(comm_, &status), "ncclCommGetAsyncError");
  if (status != ncclInProgress) check(status, "an earlier operation of NCCL");
}

CudaDevice& gpu_of(Backend& backend) {
  auto* device = dynamic_cast<CudaDevice*>(backend.device.get());
  QS_CHECK(device, "transport nccl moves GPU memory, the backend's device is {}",
           backend.device->name());
  return *device;
}

// NCCL only hangs or reports an internal error when two ranks have one GPU.
void require_distinct_gpus(const World& world, const CudaDevice& device) {
  std::string shared;
  std::map<std::string, int> rank_of;
  const std::vector<std::string> gpus =
      world.gather(fmt::format("{} on {}", device.pci_bus_id(), world.host()));
  for (int rank = 0; rank < static_cast<int>(gpus.size()); ++rank) {
    const auto [first, added] = rank_of.emplace(gpus[rank], rank);
    if (!added && shared.empty())
      shared = fmt::format(
          "ranks {} and {} both use GPU {}: NCCL needs one for each rank. Check "
          "CUDA_VISIBLE_DEVICES, or ask Slurm for --gpus-per-task=1 or --gpus-per-node",
          first->second, rank, gpus[rank]);
  }
  shared = world.broadcast(shared, 0);
  if (!shared.empty()) throw AgreedError(shared);
}

char* at(const Buffer& buffer, int64_t element, DType dtype) {
  return static_cast<char*>(buffer->data) + element * static_cast<int64_t>(dtype_size(dtype));
}

class NcclCollectives final : public Collectives {
 public:
  NcclCollectives(World& world, Backend& backend, int full_buffers);
  ~NcclCollectives() override;
  std::string name() const override { return "nccl (NCCL " + nccl_version() + ")"; }

  int add_unit(const UnitSpec& spec) override { return table_.add(spec); }
  void finish_setup() override;
  Tensor shard(int unit, int piece) override;
  void publish(int unit) override;
  void gather_start(int unit) override;
  void* gather_wait(int unit) override;
  void reshard(int unit) override;
  float* grad_buffer(int unit) override;
  void reduce_start(int unit) override;
  void reduce_wait(int unit, std::span<const Tensor> dst, float scale, bool accumulate) override;

 private:
  struct Full {
    Buffer buffer;
    Event last_use;  // in the compute stream
  };
  struct Unit {
    Buffer shard;
    Event published, gathered;
    int full = -1;  // full buffer that it holds, or owns
  };
  struct Slot {
    Buffer sum, rounded, reduced;  // f32 gradient; as bf16; packed own rows, summed over ranks
    Event written, done;           // in the compute and the reduction stream
  };
  int take_full_buffer(int unit);
  void poll() const {
    gathers_->poll();
    reductions_->poll();
  }

  Backend& backend_;
  CudaDevice& device_;
  UnitTable table_;
  const int full_buffers_;
  std::vector<Unit> units_;
  std::vector<Slot> slots_;
  std::vector<Full> full_;
  std::deque<int> free_;  // pooled full buffers, the one that was freed longest ago first
  std::unique_ptr<Channel> gathers_, reductions_;
};

NcclCollectives::NcclCollectives(World& world, Backend& backend, int full_buffers)
    : backend_(backend),
      device_(gpu_of(backend)),
      table_("nccl", world.size()),
      full_buffers_(full_buffers) {
  QS_CHECK(full_buffers >= 1, "{} full buffers: at least 1", full_buffers);
  device_.make_current();
  require_distinct_gpus(world, device_);
  gathers_ = std::make_unique<Channel>(world);
  reductions_ = std::make_unique<Channel>(world);
  device_.watch([this] { poll(); });
}

// The channels first: the compute stream may wait for an operation that ends only when aborted.
// Then what still uses the buffers in the compute stream.
NcclCollectives::~NcclCollectives() {
  device_.watch(nullptr);
  reductions_.reset();
  gathers_.reset();
  cudaStreamSynchronize(device_.stream());
}

void NcclCollectives::finish_setup() {
  table_.finish();
  int64_t pooled_bytes = 0;
  for (int u = 0; u < table_.size(); ++u) {
    const UnitSpec& spec = table_.spec(u);
    const int64_t bytes = spec.elements * static_cast<int64_t>(dtype_size(spec.param_dtype));
    Unit& unit = units_.emplace_back();
    unit.shard = Buffer(device_, spec.param_dtype, {table_.packed_elements(u)}, Segment::shards,
                        spec.name + " shard");
    if (spec.own_full_buffer) {
      unit.full = static_cast<int>(full_.size());
      full_.push_back({Buffer(device_, DType::u8, {bytes}, Segment::params, spec.name), Event()});
    } else {
      pooled_bytes = std::max(pooled_bytes, bytes);
    }
  }
  for (int i = 0; i < full_buffers_ && pooled_bytes > 0; ++i) {
    free_.push_back(static_cast<int>(full_.size()));
    full_.push_back(
        {Buffer(device_, DType::u8, {pooled_bytes}, Segment::params, "pooled unit"), Event()});
  }
  for (const GradSlot& slot : table_.slots()) {
    Slot& s = slots_.emplace_back();
    s.sum = Buffer(device_, DType::f32, {slot.elements}, Segment::gradients, "unit gradient");
    s.rounded = Buffer(device_, DType::bf16, {slot.rounded_elements}, Segment::gradients,
                       "rounded unit gradient");
    s.reduced = Buffer(device_, DType::u8, {slot.packed_bytes}, Segment::communication,
                       "summed gradient rows");
  }
}

Tensor NcclCollectives::shard(int unit, int piece) {
  const Piece& p = table_.piece(unit, piece);
  const DType dtype = table_.spec(unit).param_dtype;
  return Tensor(at(units_[unit].shard, table_.packed_at(unit)[piece], dtype), dtype, {p.count});
}

void NcclCollectives::publish(int unit) {
  table_.publish(unit);
  units_[unit].published.record(device_.stream());
}

int NcclCollectives::take_full_buffer(int unit) {
  if (table_.spec(unit).own_full_buffer) return units_[unit].full;
  QS_CHECK(!free_.empty(),
           "nccl: gather_start('{}'): all {} full buffers are in use: reshard a unit first or "
           "gather fewer ahead",
           table_.spec(unit).name, full_buffers_);
  const int full = free_.front();
  free_.pop_front();
  return full;
}

void NcclCollectives::gather_start(int unit) {
  table_.gather_start(unit);
  Unit& u = units_[unit];
  const UnitSpec& spec = table_.spec(unit);
  u.full = take_full_buffer(unit);
  const Full& full = full_[u.full];
  u.published.make_wait(gathers_->stream());
  full.last_use.make_wait(gathers_->stream());
  gathers_->group(spec, "ncclAllGather", [&](size_t p) {
    return ncclAllGather(at(u.shard, table_.packed_at(unit)[p], spec.param_dtype),
                         at(full.buffer, spec.pieces[p].offset, spec.param_dtype),
                         spec.pieces[p].count, nccl_type(spec.param_dtype), gathers_->comm(),
                         gathers_->stream());
  });
  u.gathered.record(gathers_->stream());
  const int64_t bytes =
      table_.peer_elements(unit) * static_cast<int64_t>(dtype_size(spec.param_dtype));
  ++traffic_.gathers;
  traffic_.gather_logical_bytes += bytes;
  traffic_.gather_copied_bytes += bytes;
}

void* NcclCollectives::gather_wait(int unit) {
  table_.gather_wait(unit);
  const Unit& u = units_[unit];
  poll();
  u.gathered.make_wait(device_.stream());
  return full_[u.full].buffer->data;
}

void NcclCollectives::reshard(int unit) {
  table_.reshard(unit);
  const int full = units_[unit].full;
  full_[full].last_use.record(device_.stream());
  if (!table_.spec(unit).own_full_buffer) free_.push_back(full);
}

float* NcclCollectives::grad_buffer(int unit) {
  return slots_[table_.grad_buffer(unit).slot].sum->as<float>();
}

void NcclCollectives::reduce_start(int unit) {
  const UnitSpec& spec = table_.spec(unit);
  Slot& slot = slots_[table_.reduce_start(unit).slot];
  const bool rounds = spec.reduce_dtype == DType::bf16;
  if (rounds)
    backend_.ops->cast(Tensor(slot.sum->data, DType::f32, {spec.elements}),
                       Tensor(slot.rounded->data, DType::bf16, {spec.elements}));
  const Buffer& sent = rounds ? slot.rounded : slot.sum;
  slot.written.record(device_.stream());
  slot.written.make_wait(reductions_->stream());
  reductions_->group(spec, "ncclReduceScatter", [&](size_t p) {
    return ncclReduceScatter(at(sent, spec.pieces[p].offset, spec.reduce_dtype),
                             at(slot.reduced, table_.packed_at(unit)[p], spec.reduce_dtype),
                             spec.pieces[p].count, nccl_type(spec.reduce_dtype), ncclSum,
                             reductions_->comm(), reductions_->stream());
  });
  slot.done.record(reductions_->stream());
  const int64_t bytes =
      table_.peer_elements(unit) * static_cast<int64_t>(dtype_size(spec.reduce_dtype));
  ++traffic_.reduces;
  traffic_.reduce_logical_bytes += bytes;
  traffic_.reduce_copied_bytes += bytes;
}

void NcclCollectives::reduce_wait(int unit, std::span<const Tensor> dst, float scale,
                                  bool accumulate) {
  const UnitSpec& spec = table_.spec(unit);
  Slot& slot = slots_[table_.reduce_wait(unit, dst).slot];
  poll();
  slot.done.make_wait(device_.stream());
  for (size_t p = 0; p < dst.size(); ++p) {
    if (spec.pieces[p].count == 0) continue;
    const Tensor sum(at(slot.reduced, table_.packed_at(unit)[p], spec.reduce_dtype),
                     spec.reduce_dtype, dst[p].shape);
    backend_.ops->sum_parts({&sum, 1}, scale, dst[p], accumulate);
  }
  table_.reduce_done(unit);
}

}  // namespace

std::unique_ptr<Collectives> make_nccl_collectives(World& world, Backend& backend,
                                                   int full_buffers) {
  return std::make_unique<NcclCollectives>(world, backend, full_buffers);
}

}  // namespace qshard
