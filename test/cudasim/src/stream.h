// Streams, events and captured graphs on top of the scheduler.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "scheduler.h"

namespace cudasim {

// Operations that must run one after the other without ordering memory: a communicator's.
using Chain = std::shared_ptr<OperationRef>;

// The operation of a communicator, after the one before of any communicator (null: none).
using BeginAfter = std::function<Begin(const OperationRef& previous)>;

struct GraphNode {
  std::string name;
  BeginAfter begin;
  int lane;  // index into the lanes of an instantiation
  std::vector<size_t> predecessors;
  Chain chain;
};

struct Stream;

// What streams record between cudaStreamBeginCapture and cudaStreamEndCapture.
struct Capture {
  Stream* origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;  // that began it
  bool ended = false;
  std::vector<Stream*> streams;  // that take part; the index is the node's lane
  std::vector<GraphNode> nodes;
};

struct Stream {
  int lane = 0;
  int priority = 0;
  OperationRef last;
  std::vector<OperationRef> waits;  // events that the next operation comes after
  std::shared_ptr<Capture> capture;
  std::set<size_t> tails;  // nodes that the next captured operation comes after
};

struct Event {
  OperationRef recorded;  // null: never recorded
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
  bool timed = true;
  std::shared_ptr<Capture> capture;  // recorded in a capturing stream
  std::set<size_t> tails;
};

// The stream of a handle; fails for the default streams and for handles that are not streams.
Stream& stream_of(cudaStream_t handle, const char* user);

// Adds an operation to the stream, or to the graph that the stream is captured into. chain: the
// communicator's, of its operations.
void enqueue(Stream& stream, std::string name, BeginAfter begin, const Chain& chain = nullptr);
// The same for a body that is complete when it returns.
void enqueue_body(Stream& stream, std::string name, std::function<void()> body);

// Fails if this thread captures a stream, or any thread does in global mode: `user`, which waits or
// allocates, is not allowed then.
void refuse_in_capture(const char* user);

}  // namespace cudasim
