// A GPU as a Device, and what transports build on: its compute stream, events, pinned memory.
//
// Memory comes from cudaMalloc, so it is aligned to 256 bytes. All operators and copies run on the
// one compute stream, which does not wait for the legacy default stream; other streams are ordered
// with it by Events. A thread that calls CUDA for this device calls make_current() first.
//
// [Note: Capture]  record() captures the compute stream into a graph, in the mode in which other
// threads may go on to call CUDA. Streams of a SideStreams take part: they branch off at the
// beginning and are joined at the end. An event that was recorded inside means nothing outside and
// the other way round, so whenever one side is left, here and after each launch of a graph, they
// branch off anew: they wait for all of the compute stream, and earlier events are forgotten.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"
#include "device/host_memory.h"

namespace qshard::cuda {

// A point in a stream that other streams and the host can wait for.
class Event {
 public:
  Event();
  ~Event() {
    if (event_) cudaEventDestroy(event_);
  }
  Event(Event&& other) noexcept
      : event_(std::exchange(other.event_, nullptr)), recorded_(other.recorded_) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    std::swap(recorded_, other.recorded_);
    return *this;
  }
  void record(cudaStream_t stream);
  void forget() { recorded_ = false; }  // as if never recorded
  // Of one that was never recorded nobody waits.
  void make_wait(cudaStream_t stream) const;  // what `stream` gets later runs after the record
  void synchronize() const;                   // the host waits
  bool done() const;                          // does not wait

 private:
  cudaEvent_t event_ = nullptr;
  bool recorded_ = false;
};

class Stream {
 public:
  enum class Priority { normal, high };
  explicit Stream(Priority priority = Priority::normal);
  ~Stream() {
    if (stream_) cudaStreamDestroy(stream_);
  }
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  operator cudaStream_t() const { return stream_; }
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// Whether what the stream gets is captured into a graph.
bool is_captured(cudaStream_t stream);

// Streams that work beside a device's compute stream, see [Note: Capture].
class SideStreams {
 public:
  virtual ~SideStreams() = default;
  virtual void branch_off() = 0;
  virtual void join() = 0;  // what the compute stream gets later comes after all that they have
};

// Host memory that copies to and from a GPU can run on asynchronously: page-locked. Slow to get.
class PinnedMemory final : public Device {
 public:
  std::string name() const override { return "page-locked memory of the host"; }
  void* allocate(size_t bytes) override;
  void release(void* data, size_t bytes) noexcept override;
  int64_t bytes_available() const override { return host_bytes_available(); }
  void copy(void* to, const void* from, size_t bytes) override;
  void zero(void* data, size_t bytes) override;
};

class CudaDevice final : public Device {
 public:
  // Throws with the reason and the fix when there is no driver or no such device.
  explicit CudaDevice(int ordinal);
  ~CudaDevice() override;

  // Devices that this process may use; 0 without a GPU, an error that says so without a driver.
  static int count();

  int numa_node() const override;     // of the PCI device
  std::string name() const override;  // "NVIDIA H100 80GB HBM3 (sm_90, 79.1 GiB, PCI 0000:1B:00.0)"
  void* allocate(size_t bytes) override;
  void release(void* data, size_t bytes) noexcept override;
  int64_t bytes_available() const override;
  // After all earlier work of the compute stream, complete on return. Host memory need not be
  // pinned.
  void copy(void* to, const void* from, size_t bytes) override;
  void zero(void* data, size_t bytes) override;  // in the order of the compute stream
  void enqueue_copy(void* to, const void* from, size_t bytes) override;
  Device& host() override { return pinned_; }
  bool in_host_memory(const void* data) override;
  void download_start(void* to, const void* from, size_t bytes) override;
  void download_wait() override;
  void copy_on(Queue queue, void* to, const void* from, size_t bytes) override;
  std::unique_ptr<QueuePoint> make_point() override;
  void set(QueuePoint& point, Queue queue) override;
  void hold(Queue queue, const QueuePoint& point) override;
  void order(Queue first, Queue then) override;
  void wait_for_copies() override;

  std::unique_ptr<Recording> record(const std::function<void()>& work) override;
  int recordings() const { return recordings_; }  // that exist: memory that they use stays
  void add(SideStreams* streams) { side_streams_.push_back(streams); }
  void remove(SideStreams* streams) { std::erase(side_streams_, streams); }

  cudaStream_t stream() const { return stream_; }
  void synchronize();  // the host waits for the compute stream
  void make_current() const;

  int ordinal() const { return ordinal_; }
  int processors() const { return properties_.multiProcessorCount; }
  const std::string& pci_bus_id() const { return pci_bus_id_; }

 private:
  class Graph;
  void branch_off() const {
    for (SideStreams* streams : side_streams_) streams->branch_off();
  }
  struct Slot {  // of pinned memory through which copies of pageable memory go, in pieces
    Buffer memory;
    Event moved;  // the last copy from or to it
  };
  void wait(const Event& event) const;
  cudaStream_t stream_of(Queue queue) const;
  Slot& slot(int64_t piece);
  void upload(char* to, const char* from, size_t bytes);
  void download(char* to, const char* from, size_t bytes);

  int ordinal_;
  cudaDeviceProp properties_{};
  std::string pci_bus_id_;
  Stream stream_, uploads_, downloads_;
  Event reached_;     // of synchronize() and wait_for_copies()
  Event ordered_;     // of order()
  Event downloaded_;  // the end of download_start()
  PinnedMemory pinned_;
  Slot slots_[2];
  std::vector<SideStreams*> side_streams_;
  int recordings_ = 0;
};

}  // namespace qshard::cuda
