#include "stream.h"

#include <algorithm>
#include <utility>

#include "memory.h"
#include "report.h"

namespace cudasim {
namespace {

std::set<Stream*>& streams() {
  static auto* instance = new std::set<Stream*>;
  return *instance;
}

Event& event_of(cudaEvent_t handle) {
  if (!handle) fail("null event");
  return *reinterpret_cast<Event*>(handle);
}

// Handles that exist, of graphs and of their instantiations.
std::set<const void*>& graphs() {
  static auto* instance = new std::set<const void*>;
  return *instance;
}

template <class T>
T& graph_of(const void* handle, const char* user) {
  if (!graphs().count(handle)) fail("%s: %p is not a graph (destroyed?)", user, handle);
  return *static_cast<T*>(const_cast<void*>(handle));
}

struct Graph {
  std::vector<GraphNode> nodes;
  size_t lanes = 0;
};

struct GraphExec {
  Graph graph;
  std::vector<int> lanes;
  OperationRef last;  // end of the last launch: launches of one instantiation do not overlap
};

size_t lane_in_capture(Stream& stream) {
  auto& members = stream.capture->streams;
  return static_cast<size_t>(std::find(members.begin(), members.end(), &stream) - members.begin());
}

// Stands for the stream so far: the operation before the next one.
std::vector<OperationRef> take_predecessors(Stream& stream) {
  std::vector<OperationRef> result = std::move(stream.waits);
  stream.waits.clear();
  if (stream.last) result.push_back(stream.last);
  return result;
}

void create_stream(cudaStream_t* handle, unsigned flags, int priority) {
  if (flags != cudaStreamNonBlocking)
    fail(
        "only cudaStreamNonBlocking streams are modelled: others synchronise with the legacy "
        "default stream");
  auto* stream = new Stream;
  stream->lane = new_lane();
  stream->priority = priority;
  streams().insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
}

void refuse_captured(const Stream& stream, const char* user) {
  if (stream.capture) fail("%s of a stream that is being captured", user);
}

void refuse_captured(const Event& event, const char* user) {
  if (event.capture)
    fail("%s of an event that was recorded in a capture: it means nothing outside", user);
}

// The last operation of any communicator.
OperationRef& last_of_communicators() {
  static auto* instance = new OperationRef;
  return *instance;
}

OperationRef submit_chained(std::string name, int lane, std::vector<OperationRef> predecessors,
                            const BeginAfter& begin, const Chain& chain) {
  if (!chain) return submit(std::move(name), lane, std::move(predecessors), begin(nullptr));
  OperationRef& last = last_of_communicators();
  *chain = submit(std::move(name), lane, std::move(predecessors), begin(last), *chain);
  return last = *chain;
}

void join_capture(Stream& stream, const Event& event) {
  if (event.capture->ended) refuse_captured(event, "cudaStreamWaitEvent");
  if (!stream.capture) {
    stream.capture = event.capture;
    stream.tails.clear();
    auto& members = stream.capture->streams;
    if (std::find(members.begin(), members.end(), &stream) == members.end())
      members.push_back(&stream);
  } else if (stream.capture != event.capture) {
    fail("cudaStreamWaitEvent joins two captures");
  }
  stream.tails.insert(event.tails.begin(), event.tails.end());
}

}  // namespace

Stream& stream_of(cudaStream_t handle, const char* user) {
  if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
    fail("%s on a default stream, which is not modelled: name a stream", user);
  auto* stream = reinterpret_cast<Stream*>(handle);
  if (!streams().count(stream))
    fail("%s: %p is not a stream (destroyed?)", user, static_cast<void*>(handle));
  return *stream;
}

void enqueue(Stream& stream, std::string name, BeginAfter begin, const Chain& chain) {
  if (stream.capture) {
    GraphNode node{std::move(name),
                   std::move(begin),
                   static_cast<int>(lane_in_capture(stream)),
                   {stream.tails.begin(), stream.tails.end()},
                   chain};
    stream.tails = {stream.capture->nodes.size()};
    stream.capture->nodes.push_back(std::move(node));
    return;
  }
  stream.last =
      submit_chained(std::move(name), stream.lane, take_predecessors(stream), begin, chain);
  run_some();
}

void enqueue_body(Stream& stream, std::string name, std::function<void()> body) {
  enqueue(stream, std::move(name), [body = std::move(body)](const OperationRef&) -> Begin {
    return [body]() -> Poll {
      body();
      return nullptr;
    };
  });
}

void refuse_in_capture(const char* user) {
  for (const Stream* stream : streams())
    if (const Capture* capture = stream->capture.get())
      if (capture->mode == cudaStreamCaptureModeGlobal ||
          (capture->mode == cudaStreamCaptureModeThreadLocal &&
           capture->thread == std::this_thread::get_id()))
        fail("%s while a stream is being captured", user);
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

// --- streams
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  ApiCall call;
  create_stream(handle, flags, 0);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  ApiCall call;
  create_stream(handle, flags, std::clamp(priority, -5, 0));
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  ApiCall call;
  *priority = stream_of(handle, "cudaStreamGetPriority").priority;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  ApiCall call;
  Stream& stream = stream_of(handle, "cudaStreamDestroy");
  if (stream.capture) fail("cudaStreamDestroy of a stream that is being captured");
  streams().erase(&stream);
  delete &stream;  // its operations run all the same
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ApiCall call;
  refuse_in_capture("cudaStreamSynchronize");
  Stream& stream = stream_of(handle, "cudaStreamSynchronize");
  refuse_captured(stream, "cudaStreamSynchronize");
  for (const OperationRef& event : stream.waits) wait_for(event);
  wait_for(stream.last);
  check_slack();
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ApiCall call;
  Stream& stream = stream_of(handle, "cudaStreamQuery");
  refuse_captured(stream, "cudaStreamQuery");
  for (const OperationRef& event : stream.waits)
    if (!query(event)) return cudaErrorNotReady;
  return query(stream.last) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize() {
  ApiCall call;
  for (const Stream* stream : streams()) refuse_captured(*stream, "cudaDeviceSynchronize");
  wait_for_all();
  check_slack();
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  ApiCall call;
  enqueue_body(stream_of(handle, "cudaLaunchHostFunc"), "host function", [=] {
    close_device_memory();  // it is host code
    function(data);
    open_device_memory();
  });
  return cudaSuccess;
}

// --- events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  if (flags & ~(cudaEventDisableTiming | cudaEventBlockingSync))
    fail("cudaEventCreateWithFlags: flags %u are not modelled", flags);
  auto* event = new Event;
  event->timed = !(flags & cudaEventDisableTiming);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  ApiCall call;
  delete &event_of(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  ApiCall call;
  Event& event = event_of(handle);
  Stream& stream = stream_of(stream_handle, "cudaEventRecord");
  event.capture = stream.capture;
  if (stream.capture) {
    event.tails = stream.tails;
    event.recorded = nullptr;
    return cudaSuccess;
  }
  auto time = std::make_shared<std::chrono::steady_clock::time_point>();
  event.time = time;
  stream.last = submit("event record", stream.lane, take_predecessors(stream), [time]() -> Poll {
    *time = std::chrono::steady_clock::now();
    return nullptr;
  });
  event.recorded = stream.last;
  run_some();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
  ApiCall call;
  if (flags != cudaEventWaitDefault) fail("cudaStreamWaitEvent: flags %u are not modelled", flags);
  Event& event = event_of(handle);
  Stream& stream = stream_of(stream_handle, "cudaStreamWaitEvent");
  if (event.capture) {
    join_capture(stream, event);
  } else if (stream.capture) {
    fail("a stream that is being captured waits for an event from outside of the capture");
  } else if (event.recorded) {
    stream.waits.push_back(event.recorded);
  }
  run_some();
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  ApiCall call;
  refuse_in_capture("cudaEventSynchronize");
  refuse_captured(event_of(handle), "cudaEventSynchronize");
  wait_for(event_of(handle).recorded);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  ApiCall call;
  Event& event = event_of(handle);
  refuse_in_capture("cudaEventQuery");
  refuse_captured(event, "cudaEventQuery");
  return query(event.recorded) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  ApiCall call;
  const Event &first = event_of(from), &second = event_of(to);
  if (!first.timed || !second.timed || !first.recorded || !second.recorded)
    return cudaErrorInvalidResourceHandle;
  if (!first.recorded->done || !second.recorded->done) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(*second.time - *first.time).count();
  return cudaSuccess;
}

// --- graphs
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  ApiCall call;
  Stream& stream = stream_of(handle, "cudaStreamBeginCapture");
  if (stream.capture) return cudaErrorIllegalState;
  stream.capture = std::make_shared<Capture>();
  stream.capture->origin = &stream;
  stream.capture->mode = mode;
  stream.capture->thread = std::this_thread::get_id();
  stream.capture->streams.push_back(&stream);
  stream.tails.clear();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  ApiCall call;
  *status = stream_of(handle, "cudaStreamIsCapturing").capture ? cudaStreamCaptureStatusActive
                                                               : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* result) {
  ApiCall call;
  Stream& origin = stream_of(handle, "cudaStreamEndCapture");
  const std::shared_ptr<Capture> capture = origin.capture;
  if (!capture || capture->origin != &origin) return cudaErrorIllegalState;
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id())
    return cudaErrorStreamCaptureWrongThread;
  // Every captured operation must lead to the origin's end.
  std::set<size_t> joined;
  std::vector<size_t> open(origin.tails.begin(), origin.tails.end());
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    if (!joined.insert(node).second) continue;
    const auto& before = capture->nodes[node].predecessors;
    open.insert(open.end(), before.begin(), before.end());
  }
  for (Stream* stream : capture->streams)
    for (size_t tail : stream->tails)
      if (!joined.count(tail))
        fail(
            "cudaStreamEndCapture: \"%s\" of a forked stream is not joined to the first stream by "
            "an event",
            capture->nodes[tail].name.c_str());
  for (Stream* stream : capture->streams) {
    stream->capture = nullptr;
    stream->tails.clear();
  }
  capture->ended = true;
  auto* graph = new Graph{std::move(capture->nodes), capture->streams.size()};
  graphs().insert(graph);
  *result = reinterpret_cast<cudaGraph_t>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* result, cudaGraph_t handle,
                                 unsigned long long flags) {
  ApiCall call;
  if (flags != 0) fail("cudaGraphInstantiate: flags %llu are not modelled", flags);
  refuse_in_capture("cudaGraphInstantiate");
  auto* exec = new GraphExec{graph_of<Graph>(handle, "cudaGraphInstantiate"), {}, nullptr};
  graphs().insert(exec);
  for (size_t i = 0; i < exec->graph.lanes; ++i) exec->lanes.push_back(new_lane());
  *result = reinterpret_cast<cudaGraphExec_t>(exec);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) fail("cudaGraphGetNodes: only the count is modelled");
  *count = graph_of<Graph>(handle, "cudaGraphGetNodes").nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  ApiCall call;
  auto& exec = graph_of<GraphExec>(handle, "cudaGraphLaunch");
  Stream& stream = stream_of(stream_handle, "cudaGraphLaunch");
  if (stream.capture) fail("cudaGraphLaunch in a stream that is being captured is not modelled");
  std::vector<OperationRef> before = take_predecessors(stream);
  if (exec.last) before.push_back(exec.last);
  std::vector<OperationRef> operations;
  for (const GraphNode& node : exec.graph.nodes) {
    std::vector<OperationRef> predecessors =
        node.predecessors.empty() ? before : decltype(before){};
    for (size_t index : node.predecessors) predecessors.push_back(operations[index]);
    operations.push_back(submit_chained(node.name, exec.lanes[static_cast<size_t>(node.lane)],
                                        std::move(predecessors), node.begin, node.chain));
  }
  operations.insert(operations.end(), before.begin(), before.end());
  stream.last = submit("end of graph", stream.lane, std::move(operations), [] { return Poll(); });
  exec.last = stream.last;
  run_some();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  ApiCall call;
  delete &graph_of<Graph>(handle, "cudaGraphDestroy");
  graphs().erase(handle);
  return cudaSuccess;
}

// A launch that has not ended goes on.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  ApiCall call;
  delete &graph_of<GraphExec>(handle, "cudaGraphExecDestroy");
  graphs().erase(handle);
  return cudaSuccess;
}

}  // extern "C"
