// Memory of the device that computes. One Device a rank; the CPU backend's is plain host memory.
//
// Every allocation has a segment and a name, so that the memory table of a run can be planned and
// checked. Buffers are 64-byte aligned (large ones 2 MiB, for huge pages) and start zeroed.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "tensor/tensor.h"

namespace qshard {

enum class Segment : uint8_t {
  shards,
  moments,
  params,
  gradients,
  activations,
  workspace,
  communication
};
std::string_view segment_name(Segment segment);

// [Note: Queues]  A GPU works off three queues beside one another: operators, and copies from and
// to memory of host(). Each keeps its own order; points order them across. The host enqueues and
// does not wait. Where the device's memory is the host's, everything is done when a call returns
// but download_start().
enum class Queue : uint8_t { operators, uploads, downloads };

// A place in a queue, of Device::make_point(); must not outlive its Device.
class QueuePoint {
 public:
  virtual ~QueuePoint() = default;
};

// [Note: Recording]  A GPU can take down what it is asked for instead of doing it, and do it as
// often as it is told to later, all at once: a CUDA graph. It does the same on the same memory each
// time, with the numbers that were given; those that change are read from the device's memory. What
// waits for the device, allocates or copies from and to memory other than host() cannot be
// recorded.
class Recording {
 public:
  virtual ~Recording() = default;
  virtual void run() = 0;             // in the order of the operators; the host does not wait
  virtual int64_t nodes() const = 0;  // operators, copies and transfers
};

class Device {
 public:
  virtual ~Device() = default;
  virtual int numa_node() const { return -1; }  // that a GPU is at; -1: not known, or no GPU
  virtual std::string name() const = 0;  // for the start log, e.g. "cpu (AVX-512, avx512_bf16)"
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* data, size_t bytes) noexcept = 0;
  virtual void copy(void* to, const void* from,
                    size_t bytes) = 0;  // any direction, complete on return
  virtual void zero(void* data, size_t bytes) = 0;
  // A copy in the order of the operators, for which the host does not wait where its memory is of
  // host(). Such memory stays as it is until a copy() that is called later has returned.
  virtual void enqueue_copy(void* to, const void* from, size_t bytes) { copy(to, from, bytes); }

  // Whose memory the host can use in place and copies from and to this device are fastest with:
  // this device itself where its memory is the host's, page-locked memory for a GPU.
  virtual Device& host() { return *this; }
  bool is_host() { return &host() == this; }
  // Whether the host can use this memory in place.
  virtual bool in_host_memory(const void* /*data*/) { return is_host(); }
  // Starts a copy of memory of this device or of host() to memory of host(). It reads what all
  // operators so far write, and runs beside the later ones: those that change `from` come after a
  // download_wait(), or after order(Queue::downloads, Queue::operators). Where the device's memory
  // is the host's, the copies are made by the threads that make these calls, together.
  virtual void download_start(void* to, const void* from, size_t bytes) { copy(to, from, bytes); }
  virtual void download_wait() {}  // for all that were started; on any thread

  // --- see [Note: Queues]
  // Between memory of this device and of host(), or from host() to host().
  virtual void copy_on(Queue, void* to, const void* from, size_t bytes) { copy(to, from, bytes); }
  virtual std::unique_ptr<QueuePoint> make_point() { return std::make_unique<QueuePoint>(); }
  virtual void set(QueuePoint& /*point*/, Queue) {}  // after all that the queue has so far
  // What the queue gets later comes after the point; at once where that was never set.
  virtual void hold(Queue, const QueuePoint& /*point*/) {}
  // What `then` gets later comes after all that `first` has so far.
  virtual void order(Queue /*first*/, Queue /*then*/) {}
  virtual void wait_for_copies() {}  // the host waits until both queues of copies are empty

  // Bytes that all programs together can still allocate; for host memory, those of the machine or
  // of the control group that limits this process. 0: not known.
  virtual int64_t bytes_available() const { return 0; }

  // What `work` asks for is recorded and not done, see [Note: Recording]. The memory that it uses
  // outlives the recording, which must not outlive the device or transports that take part. After
  // an exception of `work` the device is of no more use.
  virtual std::unique_ptr<Recording> record(const std::function<void()>& work);

  // Lets others go on with their work while this device computes or the host waits for it: poll()
  // calls all watchers. The CPU polls before each step of a layer (Ops::mark), a GPU in the waits
  // of the host. A watcher may throw, which ends a wait that has no end. watch() returns what
  // unwatch() takes.
  int watch(std::function<void()> watcher);
  void unwatch(int id) { watchers_.erase(id); }
  void poll() const {
    for (const auto& [id, watcher] : watchers_) watcher();
  }

  // Bytes held now and at most so far, by segment. Transports count their windows here as well.
  void account(Segment segment, int64_t bytes);
  int64_t bytes_held(Segment segment) const { return held_[static_cast<int>(segment)]; }
  int64_t bytes_held() const;
  int64_t bytes_peak() const { return peak_; }

 protected:
  bool watched() const { return !watchers_.empty(); }

 private:
  std::array<int64_t, 7> held_{};
  int64_t peak_ = 0;
  std::map<int, std::function<void()>> watchers_;
  int next_watcher_ = 0;
};

// Owns one allocation of a Device. Movable; must not outlive its Device.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device& device, DType dtype, Shape shape, Segment segment, std::string name);
  ~Buffer() { reset(); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(std::move(other));
    swap(moved);
    return *this;
  }
  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }
  void reset() noexcept;

 private:
  void swap(Buffer& other) noexcept;
  Device* device_ = nullptr;
  Tensor tensor_;
  Segment segment_ = Segment::workspace;
  std::string name_;
};

}  // namespace qshard
