#include "cuda/device_cuda.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <exception>
#include <fstream>
#include <thread>

#include "base/check.h"
#include "cuda/check_cuda.h"

namespace qshard::cuda {
namespace {

constexpr size_t kSlotBytes = size_t{4} << 20;  // large enough for the full rate of PCIe

enum class Place { pageable, pinned, device };

Place place_of(const void* data) {
  cudaPointerAttributes attributes{};
  CUDA_CHECK(cudaPointerGetAttributes(&attributes, data));
  switch (attributes.type) {
    case cudaMemoryTypeHost:
      return Place::pinned;
    case cudaMemoryTypeDevice:
    case cudaMemoryTypeManaged:
      return Place::device;
    default:
      return Place::pageable;
  }
}

cudaMemcpyKind kind_of(Place to, Place from) {
  if (to == Place::device)
    return from == Place::device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
  return from == Place::device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

struct EventPoint final : QueuePoint {
  Event event;
};

struct HostCopy {
  void* to;
  const void* from;
  size_t bytes;
};

// On a thread of the driver, in the order of a stream.
void CUDART_CB run_host_copy(void* data) {
  const std::unique_ptr<HostCopy> copy(static_cast<HostCopy*>(data));
  std::memcpy(copy->to, copy->from, copy->bytes);
}

int with_device(int ordinal) {
  const int count = CudaDevice::count();
  QS_CHECK(ordinal >= 0 && ordinal < count, "GPU {} asked for, {} visible", ordinal, count);
  CUDA_CHECK(cudaSetDevice(ordinal));
  return ordinal;
}

}  // namespace

// --- Event, Stream, PinnedMemory
Event::Event() { CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
void Event::record(cudaStream_t stream) {
  CUDA_CHECK(cudaEventRecord(event_, stream));
  recorded_ = true;
}
void Event::make_wait(cudaStream_t stream) const {
  if (recorded_) CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
}
void Event::synchronize() const {
  if (recorded_) CUDA_CHECK(cudaEventSynchronize(event_));
}

bool Event::done() const {
  if (!recorded_) return true;
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) return false;
  CUDA_CHECK(status);
  return true;
}

Stream::Stream(Priority priority) {
  int lowest = 0, highest = 0;  // numerically, the highest priority is the smaller number
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                          priority == Priority::high ? highest : lowest));
}
void Stream::synchronize() const { CUDA_CHECK(cudaStreamSynchronize(stream_)); }

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

void* PinnedMemory::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* data = nullptr;
  const cudaError_t status = cudaMallocHost(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // as in CudaDevice::allocate
    return nullptr;
  }
  CUDA_CHECK(status);
  std::memset(data, 0, bytes);
  return data;
}

// As CudaDevice::release.
void PinnedMemory::release(void* data, size_t) noexcept {
  if (std::uncaught_exceptions() == 0) cudaFreeHost(data);
}

void PinnedMemory::copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);
}

void PinnedMemory::zero(void* data, size_t bytes) {
  if (bytes > 0) std::memset(data, 0, bytes);
}

// --- CudaDevice
int CudaDevice::count() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorNoDevice) return 0;
  if (status == cudaErrorInsufficientDriver) {
    int driver = 0, runtime = 0;
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    if (driver == 0)
      fail(
          "--backend cuda needs an NVIDIA driver and this node has none: is it a GPU node? Run "
          "there, "
          "or use --backend cpu");
    fail(
        "this node's NVIDIA driver supports CUDA {}.{} at most and this program was built with "
        "{}.{}: "
        "update the driver or build with an older toolkit",
        driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  }
  CUDA_CHECK(status);
  return count;
}

CudaDevice::CudaDevice(int ordinal) : ordinal_(with_device(ordinal)) {
  CUDA_CHECK(cudaGetDeviceProperties(&properties_, ordinal));
  char id[32] = {};
  CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof id, ordinal));
  pci_bus_id_ = id;
}

// After an exception a stream may wait for an operation that never ends.
CudaDevice::~CudaDevice() {
  if (std::uncaught_exceptions() > 0) return;
  for (const Stream* stream : {&stream_, &uploads_, &downloads_}) cudaStreamSynchronize(*stream);
}

std::string CudaDevice::name() const {
  return fmt::format("{} (sm_{}{}, {:.1f} GiB, PCI {})", properties_.name, properties_.major,
                     properties_.minor, static_cast<double>(properties_.totalGlobalMem) / (1 << 30),
                     pci_bus_id_);
}

void CudaDevice::make_current() const { CUDA_CHECK(cudaSetDevice(ordinal_)); }

int CudaDevice::numa_node() const {
  std::string id = pci_bus_id_;
  std::transform(id.begin(), id.end(), id.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::ifstream file("/sys/bus/pci/devices/" + id + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

void CudaDevice::synchronize() {
  reached_.record(stream_);
  wait(reached_);
}

void CudaDevice::wait(const Event& event) const {
  if (!watched()) return event.synchronize();
  while (!event.done()) {
    poll();
    std::this_thread::yield();
  }
}

void CudaDevice::download_start(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  order(Queue::operators, Queue::downloads);
  copy_on(Queue::downloads, to, from, bytes);
  downloaded_.record(downloads_);
}

void CudaDevice::download_wait() {
  make_current();  // the thread may be another one
  wait(downloaded_);
}

// --- queues
cudaStream_t CudaDevice::stream_of(Queue queue) const {
  return queue == Queue::uploads ? uploads_ : queue == Queue::downloads ? downloads_ : stream_;
}

void CudaDevice::copy_on(Queue queue, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const Place target = place_of(to), source = place_of(from);
  if (target == Place::device || source == Place::device) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind_of(target, source), stream_of(queue)));
    return;
  }
  // cudaMemcpyAsync from host to host makes the caller wait.
  auto copy = std::make_unique<HostCopy>(to, from, bytes);
  CUDA_CHECK(cudaLaunchHostFunc(stream_of(queue), run_host_copy, copy.get()));
  copy.release();
}

std::unique_ptr<QueuePoint> CudaDevice::make_point() { return std::make_unique<EventPoint>(); }

void CudaDevice::set(QueuePoint& point, Queue queue) {
  static_cast<EventPoint&>(point).event.record(stream_of(queue));
}

void CudaDevice::hold(Queue queue, const QueuePoint& point) {
  static_cast<const EventPoint&>(point).event.make_wait(stream_of(queue));
}

void CudaDevice::order(Queue first, Queue then) {
  ordered_.record(stream_of(first));
  ordered_.make_wait(stream_of(then));
}

void CudaDevice::wait_for_copies() {
  for (const Stream* stream : {&uploads_, &downloads_}) {
    reached_.record(*stream);
    wait(reached_);
  }
}

bool CudaDevice::in_host_memory(const void* data) { return place_of(data) != Place::device; }

void* CudaDevice::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // the error is reported by the caller, who knows what the memory is for
    return nullptr;
  }
  CUDA_CHECK(status);
  CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, stream_));
  synchronize();  // zero for every stream
  return data;
}

// cudaFree waits for all operations. After an exception one of them may never end, and the memory
// goes with the process.
void CudaDevice::release(void* data, size_t) noexcept {
  if (std::uncaught_exceptions() == 0) cudaFree(data);
}

int64_t CudaDevice::bytes_available() const {
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

void CudaDevice::zero(void* data, size_t bytes) {
  if (bytes > 0) CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, stream_));
}

void CudaDevice::copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const Place target = place_of(to), source = place_of(from);
  if (target != Place::device && source != Place::device) {
    synchronize();  // the streams may still be writing pinned memory
    wait_for_copies();
    std::memmove(to, from, bytes);
    return;
  }
  if (source == Place::pageable)
    return upload(static_cast<char*>(to), static_cast<const char*>(from), bytes);
  if (target == Place::pageable)
    return download(static_cast<char*>(to), static_cast<const char*>(from), bytes);
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind_of(target, source), stream_));
  synchronize();
}

void CudaDevice::enqueue_copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const Place target = place_of(to), source = place_of(from);
  if (target == Place::pageable || source == Place::pageable) return copy(to, from, bytes);
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind_of(target, source), stream_));
}

CudaDevice::Slot& CudaDevice::slot(int64_t piece) {
  Slot& slot = slots_[piece % 2];
  if (!slot.memory.tensor())
    slot.memory = Buffer(pinned_, DType::u8, {kSlotBytes}, Segment::workspace, "copies");
  wait(slot.moved);
  return slot;
}

// While one slot is copied to the device, the host fills the other.
void CudaDevice::upload(char* to, const char* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kSlotBytes) {
    const size_t length = std::min(kSlotBytes, bytes - at);
    Slot& s = slot(static_cast<int64_t>(at / kSlotBytes));
    std::memcpy(s.memory->data, from + at, length);
    CUDA_CHECK(cudaMemcpyAsync(to + at, s.memory->data, length, cudaMemcpyHostToDevice, stream_));
    s.moved.record(stream_);
  }
  synchronize();
}

void CudaDevice::download(char* to, const char* from, size_t bytes) {
  const auto start = [&](size_t at) {
    Slot& s = slot(static_cast<int64_t>(at / kSlotBytes));
    CUDA_CHECK(cudaMemcpyAsync(s.memory->data, from + at, std::min(kSlotBytes, bytes - at),
                               cudaMemcpyDeviceToHost, stream_));
    s.moved.record(stream_);
  };
  start(0);
  for (size_t at = 0; at < bytes; at += kSlotBytes) {
    if (at + kSlotBytes < bytes) start(at + kSlotBytes);
    const Slot& s = slot(static_cast<int64_t>(at / kSlotBytes));  // waits for it
    std::memcpy(to + at, s.memory->data, std::min(kSlotBytes, bytes - at));
  }
}

}  // namespace qshard::cuda
