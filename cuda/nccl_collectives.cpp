#include "cuda/nccl_collectives.h"

#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <thread>

#include "comm/private_collectives.h"
#include "cuda/backend_cuda.h"
#include "cuda/check_cuda.h"

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

// --- versions

constexpr int kOrdersLaunches = NCCL_VERSION(2, 26, 0);
constexpr int kHasWindows = NCCL_VERSION(2, 27, 0);
constexpr int kHasCopyEngine = NCCL_VERSION(2, 28, 0);

int nccl_version() {
  int version = 0;
  check_nccl(ncclGetVersion(&version), nullptr, "ncclGetVersion");
  return version;
}

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

void require_version_for(const std::string& buffers) {
  const int needed = buffers == "copy-engine" ? kHasCopyEngine
                     : buffers == "windows"   ? kHasWindows
                                              : 0;
  if (std::min(NCCL_VERSION_CODE, nccl_version()) < needed)
    fail_usage(
        "comm.nccl_buffers {} needs NCCL {}: this program was built with {} and runs with {}; "
        "`plain` needs neither",
        buffers, version_text(needed), version_text(NCCL_VERSION_CODE),
        version_text(nccl_version()));
}

// GPU memory that NCCL can map into the other ranks' GPUs.
class NcclMemory final : public Device {
 public:
  explicit NcclMemory(CudaDevice& gpu) : gpu_(gpu) {}
  std::string name() const override { return gpu_.name() + " by ncclMemAlloc"; }
  void* allocate(size_t bytes) override;
  void release(void* data, size_t) noexcept override {
    if (data && std::uncaught_exceptions() == 0) ncclMemFree(data);
  }
  void copy(void* to, const void* from, size_t bytes) override { gpu_.copy(to, from, bytes); }
  void zero(void* data, size_t bytes) override { gpu_.zero(data, bytes); }
  // Adds what is held here to what the GPU holds, or takes it away.
  void account_on_gpu(int64_t sign) {
    for (Segment segment :
         {Segment::shards, Segment::params, Segment::gradients, Segment::communication})
      gpu_.account(segment, sign * bytes_held(segment));
  }

 private:
  CudaDevice& gpu_;
};

void* NcclMemory::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* data = nullptr;
  if (ncclMemAlloc(&data, bytes) != ncclSuccess) return nullptr;
  gpu_.zero(data, bytes);
  gpu_.synchronize();  // zero for every stream
  return data;
}

// --- communicators

// See [Note: Order of the communicators]. One for all transports of the process.
class LaunchOrder {
 public:
  static std::shared_ptr<LaunchOrder> shared() {
    static std::weak_ptr<LaunchOrder> current;
    std::shared_ptr<LaunchOrder> order = current.lock();
    if (!order) current = order = std::make_shared<LaunchOrder>();
    return order;
  }
  LaunchOrder() : chained_(nccl_version() < kOrdersLaunches) {
    if (!chained_) setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
  }
  void before(cudaStream_t stream) const {
    if (chained_ || cuda::is_captured(stream)) last_.make_wait(stream);
  }
  void after(cudaStream_t stream) {
    if (chained_ || cuda::is_captured(stream)) last_.record(stream);
  }
  void forget() { last_.forget(); }

 private:
  bool chained_;
  Event last_;
};

// A communicator of all ranks and the stream on which its operations run, in the order of the
// calls.
class Channel {
 public:
  // Collective. copy_engine: operations take no multiprocessor where NCCL can do without.
  Channel(const World& world, LaunchOrder& order, bool copy_engine);
  ~Channel();  // does nothing after an exception: see abort_all()
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  void check(ncclResult_t status, const char* call) const { check_nccl(status, comm_, call); }
  // Registers them symmetrically: a call has its buffers at the same place in them on all ranks.
  // Collective, in the same order on all ranks.
  void add_windows(const std::vector<Tensor>& buffers);
  // One group of calls: calls(piece) for each piece that has elements.
  template <typename Call>
  void group(const UnitSpec& spec, const char* name, Call call);
  // Throws when an operation failed since it was started.
  void poll() const;

 private:
  const int rank_;
  LaunchOrder& order_;
  Stream stream_{Stream::Priority::high};
  ncclComm_t comm_ = nullptr;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  std::vector<ncclWindow_t> windows_;
#endif
};

Channel::Channel(const World& world, LaunchOrder& order, [[maybe_unused]] bool copy_engine)
    : rank_(world.rank()), order_(order) {
  ncclUniqueId id{};
  collectively(world, [&] {
    if (world.rank() == 0) check_nccl(ncclGetUniqueId(&id), nullptr, "ncclGetUniqueId");
  });
  const std::string bytes = world.broadcast(std::string(id.internal, sizeof id.internal), 0);
  std::memcpy(id.internal, bytes.data(), sizeof id.internal);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
  if (copy_engine) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
  check_nccl(ncclCommInitRankConfig(&comm_, world.size(), id, world.rank(), &config), nullptr,
             "ncclCommInitRankConfig");
}

Channel::~Channel() {
  if (std::uncaught_exceptions() > 0) return;
  cudaStreamSynchronize(stream_);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  for (ncclWindow_t window : windows_) ncclCommWindowDeregister(comm_, window);
#endif
  ncclCommFinalize(comm_);
  ncclCommDestroy(comm_);
}

void Channel::add_windows([[maybe_unused]] const std::vector<Tensor>& buffers) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  for (const Tensor& buffer : buffers) {
    if (buffer.bytes() == 0) continue;
    ncclWindow_t window = nullptr;
    check(ncclCommWindowRegister(comm_, buffer.data, buffer.bytes(), &window,
                                 NCCL_WIN_COLL_SYMMETRIC),
          "ncclCommWindowRegister");
    if (!window)
      throw AgreedError(
          "NCCL registers no symmetric windows on these GPUs (NCCL_DEBUG=INFO says why): use "
          "comm.nccl_buffers plain",
          kExitUsage);
    windows_.push_back(window);
  }
#endif
}

template <typename Call>
void Channel::group(const UnitSpec& spec, const char* name, Call call) {
  order_.before(stream_);
  check(ncclGroupStart(), "ncclGroupStart");
  for (size_t p = 0; p < spec.pieces.size(); ++p)
    if (spec.pieces[p].count > 0) check(call(static_cast<int>(p)), name);
  check(ncclGroupEnd(), name);
  order_.after(stream_);
}

void Channel::poll() const {
  ncclResult_t status = ncclSuccess;
  check(ncclCommGetAsyncError(comm_, &status), "ncclCommGetAsyncError");
  if (status == ncclInProgress) return;
  // Another rank is gone. It, or what started it, says why and ends the job; this rank speaks only
  // if nobody does, and before the ranks after it.
  if (status == ncclRemoteError)
    std::this_thread::sleep_for(std::chrono::milliseconds(2000 + 100 * std::min(rank_, 50)));
  check(status, "an earlier operation of NCCL");
}

// Ends the operations that wait for other ranks. NCCL frees memory as it aborts, which waits for
// the kernels of the other communicator: so all abort at once. What does not end in time, as where
// another rank is gone in the middle of a hand-shake, goes with the process.
void abort_all(const std::vector<ncclComm_t>& comms, const CudaDevice& device) {
  const auto left = std::make_shared<std::atomic<size_t>>(comms.size());
  for (ncclComm_t comm : comms)
    std::thread([comm, left, ordinal = device.ordinal()] {
      cudaSetDevice(ordinal);
      ncclCommAbort(comm);
      --*left;
    }).detach();
  for (int i = 0; i < 300 && *left > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
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

class NcclCollectives final : public PrivateCollectives, private cuda::SideStreams {
 public:
  // memory: null for plain buffers.
  NcclCollectives(World& world, Backend& backend, int full_buffers, const std::string& buffers,
                  std::shared_ptr<NcclMemory> memory);
  ~NcclCollectives() override;
  std::string name() const override;

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
  void branch_off() override;
  void join() override;
  void poll() const {
    gathers_->poll();
    reductions_->poll();
  }

  CudaDevice& device_;
  const std::shared_ptr<NcclMemory> memory_;
  const std::string buffers_;
  int watcher_ = -1;
  std::vector<Event> published_, gathered_;  // [unit] in the compute and the gather stream
  std::vector<Event> last_use_;              // [full buffer] in the compute stream
  std::vector<Slot> slots_;
  Event branched_, joined_;  // in the compute stream; in each of the others
  const std::shared_ptr<LaunchOrder> order_ = LaunchOrder::shared();
  std::unique_ptr<Channel> gathers_, reductions_;
};

NcclCollectives::NcclCollectives(World& world, Backend& backend, int full_buffers,
                                 const std::string& buffers, std::shared_ptr<NcclMemory> memory)
    : PrivateCollectives("nccl", world, backend, full_buffers, 1, memory),
      device_(gpu_of(backend)),
      memory_(std::move(memory)),
      buffers_(buffers) {
  device_.make_current();
  collectively(world, [&] { require_version_for(buffers); });
  require_distinct_gpus(world, device_);
  gathers_ = std::make_unique<Channel>(world, *order_, buffers == "copy-engine");
  reductions_ = std::make_unique<Channel>(world, *order_, false);
  watcher_ = device_.watch([this] { poll(); });
  device_.add(this);
}

// The channels first, then what still uses the buffers in the compute stream.
NcclCollectives::~NcclCollectives() {
  device_.remove(this);
  device_.unwatch(watcher_);
  if (memory_) memory_->account_on_gpu(-1);
  if (std::uncaught_exceptions() > 0) {
    abort_all({gathers_->comm(), reductions_->comm()}, device_);
    return;
  }
  reductions_.reset();
  gathers_.reset();
  cudaStreamSynchronize(device_.stream());
}

std::string NcclCollectives::name() const {
  std::string kind = memory_ ? "buffers in symmetric windows" : "buffers of cudaMalloc";
  if (buffers_ == "copy-engine") kind += ", gathers without CTAs where NCCL can";
  return fmt::format("nccl (NCCL {}, {})", version_text(nccl_version()), kind);
}

void NcclCollectives::allocated() {
  published_.resize(table().size());
  gathered_.resize(table().size());
  last_use_.resize(full_count());
  slots_.resize(slot_count());
  if (!memory_) return;
  memory_->account_on_gpu(+1);
  gathers_->add_windows(gather_buffers());
  reductions_->add_windows(reduce_buffers());
}

// Between steps no unit is gathered or reduced: nothing that is forgotten will be waited for.
void NcclCollectives::branch_off() {
  for (std::vector<Event>* events : {&published_, &gathered_, &last_use_})
    for (Event& event : *events) event.forget();
  for (Slot& slot : slots_) {
    slot.written.forget();
    slot.done.forget();
  }
  order_->forget();
  branched_.record(device_.stream());
  for (const Channel* channel : {gathers_.get(), reductions_.get()})
    branched_.make_wait(channel->stream());
}

void NcclCollectives::join() {
  for (const Channel* channel : {gathers_.get(), reductions_.get()}) {
    joined_.record(channel->stream());
    joined_.make_wait(device_.stream());
  }
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

std::unique_ptr<Collectives> make_nccl_collectives(World& world, Backend& backend, int full_buffers,
                                                   const std::string& buffers) {
  std::shared_ptr<NcclMemory> memory;
  if (buffers != "plain") memory = std::make_shared<NcclMemory>(gpu_of(backend));
  return std::make_unique<NcclCollectives>(world, backend, full_buffers, buffers, memory);
}

}  // namespace qshard
