#include "cuda/mpi_cuda_collectives.h"

#include <mpi.h>
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <algorithm>
#include <climits>
#include <exception>
#include <optional>
#include <thread>

#include "comm/block_type.h"
#include "comm/duplicate.h"
#include "comm/private_collectives.h"
#include "cuda/backend_cuda.h"
#include "cuda/check_cuda.h"
#include "cuda/kernels.h"

namespace qshard {
namespace {

using cuda::CudaDevice;
using cuda::Event;
using cuda::PinnedMemory;
using cuda::Stream;

// What the MPI library says; nothing where it has no such question.
std::optional<bool> mpi_is_cuda_aware() {
#if defined(MPIX_CUDA_AWARE_SUPPORT)  // Open MPI and its kin
  return MPIX_Query_cuda_support() == 1;
#elif defined(MPIX_GPU_SUPPORT_CUDA)  // MPICH and its kin
  int yes = 0;
  QS_MPI(MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &yes));
  return yes != 0;
#else
  return std::nullopt;
#endif
}

bool moves_device_memory(const std::string& memory, const World& world) {
  const std::optional<bool> aware = mpi_is_cuda_aware();
  if (memory == "auto") return aware.value_or(false);
  if (memory == "device" && !aware.value_or(true))
    throw AgreedError(
        fmt::format("comm.mpi_memory device: {} says that it takes no GPU memory: use a CUDA-aware "
                    "MPI, or pinned",
                    world.mpi_version()),
        kExitUsage);
  return memory == "device";
}

// `rows` rows of `width` bytes, so many bytes apart.
void copy_rows(char* to, int64_t to_pitch, const char* from, int64_t from_pitch, int64_t width,
               int rows, cudaStream_t stream) {
  if (width == 0) return;
  if (std::max(to_pitch, from_pitch) <= INT_MAX) {  // CUDA's limit of a pitch
    CUDA_CHECK(
        cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, cudaMemcpyDefault, stream));
    return;
  }
  for (int r = 0; r < rows; ++r)
    CUDA_CHECK(cudaMemcpyAsync(to + r * to_pitch, from + r * from_pitch, width, cudaMemcpyDefault,
                               stream));
}

class MpiCudaCollectives final : public PrivateCollectives {
 public:
  MpiCudaCollectives(World& world, Backend& backend, int full_buffers, bool direct);
  ~MpiCudaCollectives() override;
  std::string name() const override;

 private:
  struct Rows {              // of a unit
    Buffer copy;             // of the shard, unless MPI reads the shard itself
    bool copied = false;     // since it was published
    Event published, ready;  // in the compute stream; when MPI may read the rows
    Event gathered;          // in the gather stream
  };
  struct Arrival {  // of the rows of all ranks, before they go into a full buffer
    Buffer rows;
    Event unpacked;
  };
  struct Gather {
    int unit, full;
    Arrival* arrival = nullptr;  // once MPI has been called
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Slot {
    Buffer sent;
    Buffer arrived;               // unless MPI writes received() itself
    Event written, packed, done;  // in the compute stream; both others in the reduction stream
  };
  struct Reduction {
    int unit, slot;
    bool called = false;  // MPI
    MPI_Request request = MPI_REQUEST_NULL;
  };

  void allocated() override;
  Buffer for_mpi(int64_t bytes);  // memory that MPI reads or writes
  void published(int unit) override;
  void start_gather(int unit, int full) override;
  void wait_gather(int unit, int full) override;
  void release_full(int full) override { last_use_[full].record(device_.stream()); }
  void start_reduce(int unit, int slot) override;
  void wait_reduce(int unit, int slot) override;
  std::vector<Tensor> parts(int unit, int slot, int piece) override;

  void progress();
  bool call_gather(Gather& gather);
  void unpack(const Gather& gather);
  bool call_reduction(Reduction& reduction);
  void collect(const Reduction& reduction);
  template <typename Queue>
  void finish(const Queue& queue, int unit);
  int64_t packed_bytes(int unit, DType dtype) const {
    return bytes_of(table().packed_elements(unit), dtype);
  }

  CudaDevice& device_;
  const std::string mpi_version_;
  const bool direct_;
  int watcher_ = -1;
  PinnedMemory pinned_;
  MPI_Comm gather_comm_, reduce_comm_;
  Stream gather_stream_{Stream::Priority::high}, reduce_stream_{Stream::Priority::high};
  std::vector<Rows> rows_;       // [unit]
  std::vector<Event> last_use_;  // [full buffer] in the compute stream
  std::vector<Slot> slots_;
  Arrival arrivals_[2];  // used in turn: MPI fills one while the other is unpacked
  int64_t gather_calls_ = 0;
  std::deque<Gather> gathers_;  // started and not yet unpacked, in the order of their starts
  std::deque<Reduction> reductions_;
};

MpiCudaCollectives::MpiCudaCollectives(World& world, Backend& backend, int full_buffers,
                                       bool direct)
    : PrivateCollectives("mpi-cuda", world, backend, full_buffers, world.size()),
      device_(gpu_of(backend)),
      mpi_version_(world.mpi_version()),
      direct_(direct),
      gather_comm_(duplicate(world.comm())),
      reduce_comm_(duplicate(world.comm())) {
  device_.make_current();
  // Not in the waits of the thread that writes a checkpoint: the queues are this thread's.
  watcher_ = device_.watch([this, owner = std::this_thread::get_id()] {
    if (std::this_thread::get_id() == owner) progress();
  });
}

MpiCudaCollectives::~MpiCudaCollectives() {
  device_.unwatch(watcher_);
  if (std::uncaught_exceptions() > 0) return;  // the other ranks may not come; the job ends
  for (const Stream* stream : {&gather_stream_, &reduce_stream_}) cudaStreamSynchronize(*stream);
  cudaStreamSynchronize(device_.stream());
  MPI_Comm_free(&gather_comm_);
  MPI_Comm_free(&reduce_comm_);
}

std::string MpiCudaCollectives::name() const {
  if (direct_) return fmt::format("mpi-cuda (GPU memory straight to {})", mpi_version_);
  return fmt::format("mpi-cuda (through {:.1f} MiB of pinned memory a rank, {})",
                     static_cast<double>(pinned_.bytes_held()) / (1 << 20), mpi_version_);
}

// --- memory

void MpiCudaCollectives::allocated() {
  int64_t arrival_bytes = 0;
  for (int u = 0; u < table().size(); ++u) {
    const int64_t bytes = packed_bytes(u, table().spec(u).param_dtype);
    QS_CHECK(table().packed_elements(u) <= INT_MAX,
             "mpi-cuda: unit '{}' has {} elements a rank, an MPI call moves at most {}: use more "
             "ranks",
             table().spec(u).name, table().packed_elements(u), INT_MAX);
    arrival_bytes = std::max(arrival_bytes, ranks_ * bytes);
    Rows& rows = rows_.emplace_back();
    if (!direct_) rows.copy = for_mpi(bytes);
  }
  for (Arrival& arrival : arrivals_) arrival.rows = for_mpi(arrival_bytes);
  for (const GradSlot& slot : table().slots()) {
    Slot& s = slots_.emplace_back();
    s.sent = for_mpi(ranks_ * slot.packed_bytes);
    if (!direct_) s.arrived = for_mpi(ranks_ * slot.packed_bytes);
  }
  last_use_.resize(full_count());
}

Buffer MpiCudaCollectives::for_mpi(int64_t bytes) {
  Device& memory = direct_ ? static_cast<Device&>(device_) : pinned_;
  return Buffer(memory, DType::u8, {bytes}, Segment::communication, "rows for MPI");
}

// --- gathers

void MpiCudaCollectives::published(int unit) {
  Rows& rows = rows_[unit];
  (direct_ ? rows.ready : rows.published).record(device_.stream());
  rows.copied = false;
}

void MpiCudaCollectives::start_gather(int unit, int full) {
  Rows& rows = rows_[unit];
  if (!direct_ && !rows.copied) {
    rows.published.make_wait(gather_stream_);
    CUDA_CHECK(cudaMemcpyAsync(rows.copy->data, shard_rows(unit, 0), rows.copy->bytes(),
                               cudaMemcpyDefault, gather_stream_));
    rows.ready.record(gather_stream_);
    rows.copied = true;
  }
  gathers_.push_back({unit, full});
  progress();
}

bool MpiCudaCollectives::call_gather(Gather& gather) {
  const Rows& rows = rows_[gather.unit];
  Arrival& arrival = arrivals_[gather_calls_ % 2];
  if (!rows.ready.done() || !arrival.unpacked.done()) return false;
  const MPI_Datatype type = mpi_type(table().spec(gather.unit).param_dtype);
  const int count = static_cast<int>(table().packed_elements(gather.unit));
  QS_MPI(MPI_Iallgather(direct_ ? shard_rows(gather.unit, 0) : rows.copy->data, count, type,
                        arrival.rows->data, count, type, gather_comm_, &gather.request));
  gather.arrival = &arrival;
  ++gather_calls_;
  return true;
}

void MpiCudaCollectives::unpack(const Gather& gather) {
  const UnitSpec& spec = table().spec(gather.unit);
  last_use_[gather.full].make_wait(gather_stream_);
  for (size_t p = 0; p < spec.pieces.size(); ++p) {
    const int64_t bytes = bytes_of(spec.pieces[p].count, spec.param_dtype);
    const int64_t at = bytes_of(table().packed_at(gather.unit)[p], spec.param_dtype);
    copy_rows(full_rows(gather.unit, gather.full, static_cast<int>(p)), bytes,
              static_cast<char*>(gather.arrival->rows->data) + at,
              packed_bytes(gather.unit, spec.param_dtype), bytes, ranks_, gather_stream_);
  }
  gather.arrival->unpacked.record(gather_stream_);
  rows_[gather.unit].gathered.record(gather_stream_);
}

void MpiCudaCollectives::wait_gather(int unit, int) {
  finish(gathers_, unit);
  rows_[unit].gathered.make_wait(device_.stream());
}

// --- reductions

void MpiCudaCollectives::start_reduce(int unit, int slot) {
  const UnitSpec& spec = table().spec(unit);
  Slot& s = slots_[slot];
  s.written.record(device_.stream());
  s.written.make_wait(reduce_stream_);
  for (size_t p = 0; p < spec.pieces.size(); ++p) {
    const int64_t bytes = bytes_of(spec.pieces[p].count, spec.reduce_dtype);
    const int64_t at = bytes_of(table().packed_at(unit)[p], spec.reduce_dtype);
    const Tensor rows = gradient_rows(unit, slot, 0, static_cast<int>(p));
    copy_rows(static_cast<char*>(s.sent->data) + at, packed_bytes(unit, spec.reduce_dtype),
              static_cast<char*>(rows.data), bytes, bytes, ranks_, reduce_stream_);
  }
  s.packed.record(reduce_stream_);
  reductions_.push_back({unit, slot});
  progress();
}

bool MpiCudaCollectives::call_reduction(Reduction& reduction) {
  const Slot& s = slots_[reduction.slot];
  if (!s.packed.done()) return false;
  const MPI_Datatype type = mpi_type(table().spec(reduction.unit).reduce_dtype);
  const int count = static_cast<int>(table().packed_elements(reduction.unit));
  QS_MPI(MPI_Ialltoall(s.sent->data, count, type,
                       direct_ ? received(reduction.slot) : s.arrived->data, count, type,
                       reduce_comm_, &reduction.request));
  reduction.called = true;
  return true;
}

void MpiCudaCollectives::collect(const Reduction& reduction) {
  Slot& s = slots_[reduction.slot];
  if (!direct_)
    CUDA_CHECK(cudaMemcpyAsync(
        received(reduction.slot), s.arrived->data,
        ranks_ * packed_bytes(reduction.unit, table().spec(reduction.unit).reduce_dtype),
        cudaMemcpyDefault, reduce_stream_));
  s.done.record(reduce_stream_);
}

void MpiCudaCollectives::wait_reduce(int unit, int slot) {
  finish(reductions_, unit);
  slots_[slot].done.make_wait(device_.stream());
}

std::vector<Tensor> MpiCudaCollectives::parts(int unit, int slot, int piece) {
  std::vector<Tensor> parts;
  for (int r = 0; r < ranks_; ++r) parts.push_back(received_rows(unit, slot, r, piece));
  return parts;
}

// --- progress

bool complete(MPI_Request& request) {
  int done = 0;
  QS_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
  return done != 0;
}

void MpiCudaCollectives::progress() {
  for (size_t i = 0; i < gathers_.size() && i < std::size(arrivals_); ++i)
    if (!gathers_[i].arrival && !call_gather(gathers_[i])) break;
  while (!gathers_.empty() && gathers_.front().arrival && complete(gathers_.front().request)) {
    unpack(gathers_.front());
    gathers_.pop_front();
  }
  for (Reduction& reduction : reductions_)
    if (!reduction.called && !call_reduction(reduction)) break;
  while (!reductions_.empty() && reductions_.front().called &&
         complete(reductions_.front().request)) {
    collect(reductions_.front());
    reductions_.pop_front();
  }
}

// Until the unit has left the queue.
template <typename Queue>
void MpiCudaCollectives::finish(const Queue& queue, int unit) {
  const auto waiting = [&] {
    return std::any_of(queue.begin(), queue.end(),
                       [&](const auto& entry) { return entry.unit == unit; });
  };
  while (waiting()) {
    progress();
    std::this_thread::yield();
  }
}

}  // namespace

std::unique_ptr<Collectives> make_mpi_cuda_collectives(World& world, Backend& backend,
                                                       int full_buffers,
                                                       const std::string& memory) {
  if (world.size() > cuda::kMaxParts)
    throw AgreedError(fmt::format("transport mpi-cuda: {} ranks, at most {}: use nccl",
                                  world.size(), cuda::kMaxParts));
  return std::make_unique<MpiCudaCollectives>(world, backend, full_buffers,
                                              moves_device_memory(memory, world));
}

}  // namespace qshard
