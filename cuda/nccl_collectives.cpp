#include "cuda/nccl_collectives.h"

#include <nccl.h>

#include <cstring>
#include <exception>
#include <map>

#include "comm/private_collectives.h"
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
    if (spec.pieces[p].count > 0) check(call(static_cast<int>(p)), name);
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

class NcclCollectives final : public PrivateCollectives {
 public:
  NcclCollectives(World& world, Backend& backend, int full_buffers);
  ~NcclCollectives() override;
  std::string name() const override { return "nccl (NCCL " + nccl_version() + ")"; }

 private:
  struct Slot {
    Event written, done;  // in the compute and the reduction stream
  };
  void allocated() override;
  void published(int unit) override { published_[unit].record(device_.stream()); }
  void start_gather(int unit, int full) override;
  void wait_gather(int unit, int full) override;
  void release_full(int full) override { last_use_[full].record(device_.stream()); }
  void start_reduce(int unit, int slot) override;
  void wait_reduce(int unit, int slot) override;
  std::vector<Tensor> parts(int unit, int slot, int piece) override {
    return {received_rows(unit, slot, 0, piece)};
  }
  void poll() const {
    gathers_->poll();
    reductions_->poll();
  }

  CudaDevice& device_;
  std::vector<Event> published_, gathered_;  // [unit] in the compute and the gather stream
  std::vector<Event> last_use_;              // [full buffer] in the compute stream
  std::vector<Slot> slots_;
  std::unique_ptr<Channel> gathers_, reductions_;
};

NcclCollectives::NcclCollectives(World& world, Backend& backend, int full_buffers)
    : PrivateCollectives("nccl", world, backend, *backend.device, full_buffers, 1),
      device_(gpu_of(backend)) {
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

void NcclCollectives::allocated() {
  published_.resize(table().size());
  gathered_.resize(table().size());
  last_use_.resize(full_count());
  slots_.resize(slot_count());
}

void NcclCollectives::start_gather(int unit, int full) {
  const UnitSpec& spec = table().spec(unit);
  published_[unit].make_wait(gathers_->stream());
  last_use_[full].make_wait(gathers_->stream());
  gathers_->group(spec, "ncclAllGather", [&](int piece) {
    return ncclAllGather(shard_rows(unit, piece), full_rows(unit, full, piece),
                         spec.pieces[piece].count, nccl_type(spec.param_dtype), gathers_->comm(),
                         gathers_->stream());
  });
  gathered_[unit].record(gathers_->stream());
}

void NcclCollectives::wait_gather(int unit, int) {
  poll();
  gathered_[unit].make_wait(device_.stream());
}

void NcclCollectives::start_reduce(int unit, int slot) {
  const UnitSpec& spec = table().spec(unit);
  slots_[slot].written.record(device_.stream());
  slots_[slot].written.make_wait(reductions_->stream());
  reductions_->group(spec, "ncclReduceScatter", [&](int piece) {
    return ncclReduceScatter(gradient_rows(unit, slot, 0, piece).data,
                             received_rows(unit, slot, 0, piece).data, spec.pieces[piece].count,
                             nccl_type(spec.reduce_dtype), ncclSum, reductions_->comm(),
                             reductions_->stream());
  });
  slots_[slot].done.record(reductions_->stream());
}

void NcclCollectives::wait_reduce(int, int slot) {
  poll();
  slots_[slot].done.make_wait(device_.stream());
}

}  // namespace

std::unique_ptr<Collectives> make_nccl_collectives(World& world, Backend& backend,
                                                   int full_buffers) {
  return std::make_unique<NcclCollectives>(world, backend, full_buffers);
}

}  // namespace qshard
