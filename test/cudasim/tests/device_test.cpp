// The simulator's model of kernels, streams and memory: correct programs pass, planted faults show.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "device_kernels.h"
#include "harness.h"
#include "memory_helpers.h"

namespace cudasim_test {
namespace {

bool same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void run_block_sums(Fault fault) {
  constexpr int BLOCKS = 3, THREADS = 256;
  const std::vector<float> x = ramp(BLOCKS * THREADS);
  const DeviceArray<float> input(x), sums(BLOCKS);
  const StreamHandle stream;
  CHECK(block_sums(sums, input, BLOCKS, fault, stream));
  stream.wait();
  const std::vector<float> result = sums.host();
  for (size_t b = 0; b < BLOCKS; ++b) {
    float expected = 0;
    for (size_t i = 0; i < THREADS; ++i) expected += x[b * THREADS + i];
    EXPECT(result[b] == expected);
  }
}

void run_atomic_sum(Fault fault) {
  const std::vector<float> x = ramp(1000);
  const DeviceArray<float> input(x), total(1);
  const StreamHandle stream;
  CHECK(cudaMemsetAsync(total, 0, sizeof(float), stream));
  CHECK(atomic_sum(total, input, 1000, fault, stream));
  stream.wait();
  float expected = 0;
  for (float value : x) expected += value;
  EXPECT(total.host()[0] == expected);
}

void run_scale(Fault fault) {
  constexpr int N = 192;  // 768 bytes: the allocation ends at a page
  const std::vector<float> x = ramp(N);
  const DeviceArray<float> input(x), output(N);
  const StreamHandle stream;
  CHECK(scale(output, input, 2.0f, N, fault, stream));
  stream.wait();
  const std::vector<float> y = output.host();
  for (size_t i = 0; i < N; ++i) EXPECT(y[i] == 2 * x[i]);
}

void run_scale_in_slack() {  // 100 bytes: the next ones belong to no one, and are writable
  const DeviceArray<float> input(ramp(26)), output(25);
  const StreamHandle stream;
  CHECK(scale(output, input, 2.0f, 25, Fault::tail_off_by_one, stream));
  stream.wait();
}

void run_staged_copy(Fault fault) {
  constexpr int TILES = 5, TILE_FLOATS = 512;
  const std::vector<float> x = ramp(TILES * TILE_FLOATS);
  const DeviceArray<float> input(x), output(x.size());
  const StreamHandle stream;
  CHECK(staged_copy(output, input, TILES, fault, stream));
  stream.wait();
  const std::vector<float> y = output.host();
  for (size_t i = 0; i < x.size(); ++i) EXPECT(same(x[i], y[i]));
}

void run_mma(bool bf16) {
  std::vector<uint16_t> a(16 * 16), b(16 * 8);
  std::vector<float> fa(a.size()), fb(b.size());
  const auto encode = [&](float x) {
    return bf16 ? std::bit_cast<uint16_t>(static_cast<__nv_bfloat16_raw>(__float2bfloat16(x)))
                : std::bit_cast<uint16_t>(static_cast<__half_raw>(__float2half(x)));
  };
  for (size_t i = 0; i < a.size(); ++i) a[i] = encode(fa[i] = static_cast<float>(i * 7 % 23) - 11);
  for (size_t i = 0; i < b.size(); ++i) b[i] = encode(fb[i] = static_cast<float>(i * 5 % 19) - 9);
  const DeviceArray<uint16_t> da(a), db(b);
  const DeviceArray<float> dd(16 * 8);
  const StreamHandle stream;
  CHECK(mma_product(dd, da, db, bf16, stream));
  stream.wait();
  const std::vector<float> d = dd.host();
  for (size_t row = 0; row < 16; ++row)
    for (size_t col = 0; col < 8; ++col) {
      float expected = 0;
      for (size_t k = 0; k < 16; ++k) expected += fa[row * 16 + k] * fb[k * 8 + col];
      EXPECT(d[row * 8 + col] == expected);
    }
}

void run_mma_tf32() {
  const float below_tf32 = 1 + std::ldexp(1.0f, -20);  // cut off by the hardware
  std::vector<float> a(16 * 8), b(8 * 8);
  for (size_t i = 0; i < a.size(); ++i) a[i] = (static_cast<float>(i * 7 % 23) - 11) * below_tf32;
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i * 5 % 19) - 9;
  const DeviceArray<float> da(a), db(b), dd(16 * 8);
  const StreamHandle stream;
  CHECK(mma_tf32_product(dd, da, db, stream));
  stream.wait();
  const std::vector<float> d = dd.host();
  for (size_t row = 0; row < 16; ++row)
    for (size_t col = 0; col < 8; ++col) {
      float expected = 0;
      for (size_t k = 0; k < 8; ++k)
        expected += std::round(a[row * 8 + k] / below_tf32) * b[k * 8 + col];
      EXPECT(d[row * 8 + col] == expected);
    }
}

void run_warp_functions() {
  const DeviceArray<int> out(10 * 32);
  const StreamHandle stream;
  CHECK(warp_functions(out, stream));
  stream.wait();
  const std::vector<int> r = out.host();
  for (int lane = 0; lane < 32; ++lane) {
    const auto at = [&](int column) { return r[static_cast<size_t>(column * 32 + lane)]; };
    EXPECT(at(0) == 3);
    EXPECT(at(1) == lane / 8 * 8 + 5);
    EXPECT(at(2) == (lane ^ 4));
    EXPECT(at(3) == (lane < 2 ? lane : lane - 2));
    EXPECT(at(4) == (lane % 8 < 2 ? lane : lane - 2));
    EXPECT(at(5) == (lane >= 30 ? lane : lane + 2));
    EXPECT(at(6) == (lane % 8 >= 6 ? lane : lane + 2));
    EXPECT(at(7) == 0x49249249);
    EXPECT(at(8) == 2);
    EXPECT(at(9) == 64);
  }
}

// Upload in one stream, kernel in another.
void run_two_streams(bool wait_for_upload) {
  constexpr int N = 256;
  float* host = pinned(N);
  for (int i = 0; i < N; ++i) host[i] = static_cast<float>(i);
  const StreamHandle upload, compute;
  const DeviceArray<float> input(N), output(N);
  cudaEvent_t ready;
  CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
  for (int part = 0; part < 4; ++part)
    CHECK(cudaMemcpyAsync(input + part * N / 4, host + part * N / 4, N, cudaMemcpyHostToDevice,
                          upload));
  CHECK(cudaEventRecord(ready, upload));
  if (wait_for_upload) CHECK(cudaStreamWaitEvent(compute, ready, 0));
  CHECK(scale(output, input, 3.0f, N, Fault::none, compute));
  float* result = pinned(N);
  CHECK(cudaMemcpyAsync(result, output, N * sizeof(float), cudaMemcpyDeviceToHost, compute));
  compute.wait();
  for (int i = 0; i < N; ++i) EXPECT(result[i] == 3 * host[i]);
  CHECK(cudaDeviceSynchronize());
}

// Two streams take turns with one buffer; `wait` is the event that protects its reuse.
void run_buffer_reuse(bool wait) {
  constexpr int N = 128;
  const StreamHandle producer, consumer;
  const DeviceArray<float> one(std::vector<float>(N, 1.0f)), buffer(N), output(2 * N);
  cudaEvent_t full, empty;
  CHECK(cudaEventCreateWithFlags(&full, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&empty, cudaEventDisableTiming));
  for (int round = 0; round < 2; ++round) {
    if (wait && round > 0) CHECK(cudaStreamWaitEvent(producer, empty, 0));
    CHECK(scale(buffer, one, static_cast<float>(round + 1), N, Fault::none, producer));
    CHECK(cudaEventRecord(full, producer));
    CHECK(cudaStreamWaitEvent(consumer, full, 0));
    CHECK(cudaMemcpyAsync(output + round * N, buffer, N * sizeof(float), cudaMemcpyDeviceToDevice,
                          consumer));
    CHECK(cudaEventRecord(empty, consumer));
  }
  consumer.wait();
  const std::vector<float> result = output.host();
  EXPECT(result[0] == 1 && result[N] == 2);
}

// One step captured over two streams and replayed. A factor is copied into the graph.
void run_graph(bool join_upload) {
  constexpr int N = 64;
  float* host = pinned(N);
  const StreamHandle main, side;
  const DeviceArray<float> input(N), output(N);
  cudaEvent_t fork, ready;
  CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
  CHECK(cudaStreamBeginCapture(main, cudaStreamCaptureModeGlobal));
  CHECK(cudaEventRecord(fork, main));
  CHECK(cudaStreamWaitEvent(side, fork, 0));
  CHECK(cudaMemcpyAsync(input, host, N * sizeof(float), cudaMemcpyHostToDevice, side));
  CHECK(cudaEventRecord(ready, side));
  if (join_upload) CHECK(cudaStreamWaitEvent(main, ready, 0));
  float factor = 2;
  CHECK(scale(output, input, factor, N, Fault::none, main));
  factor = 3;
  if (!join_upload) CHECK(cudaStreamWaitEvent(main, ready, 0));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamEndCapture(main, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (int step = 1; step <= 3; ++step) {
    for (int i = 0; i < N; ++i) host[i] = static_cast<float>(step);
    CHECK(cudaGraphLaunch(exec, main));
    main.wait();
    EXPECT(output.host()[N - 1] == static_cast<float>(2 * step));
  }
}

// A capture of two streams, with what may go wrong before, in and after it.
struct Capture {
  const StreamHandle main, side;
  cudaEvent_t fork, joined, outside;
  const DeviceArray<float> data{ramp(64)};
  cudaGraph_t graph = nullptr;

  explicit Capture(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    for (cudaEvent_t* event : {&fork, &joined, &outside})
      CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    CHECK(cudaEventRecord(outside, main));
    CHECK(cudaStreamBeginCapture(main, mode));
    CHECK(cudaEventRecord(fork, main));
    CHECK(cudaStreamWaitEvent(side, fork, 0));
    CHECK(scale(data, data, 2.0f, 64, Fault::none, side));
    CHECK(cudaEventRecord(joined, side));
  }
  void join() { CHECK(cudaStreamWaitEvent(main, joined, 0)); }
  void end() {
    join();
    CHECK(cudaStreamEndCapture(main, &graph));
  }
  cudaGraphExec_t instance() {
    end();
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
  }
};

void run_capture_and_other_threads(cudaStreamCaptureMode mode) {
  Capture capture(mode);
  std::thread([&] { CHECK(cudaEventSynchronize(capture.outside)); }).join();
  cudaGraph_t graph;
  std::thread([&] {
    EXPECT(cudaStreamEndCapture(capture.main, &graph) == cudaErrorStreamCaptureWrongThread);
  }).join();
  EXPECT(cudaStreamBeginCapture(capture.main, mode) == cudaErrorIllegalState);
  capture.end();
  size_t nodes = 0;
  CHECK(cudaGraphGetNodes(capture.graph, nullptr, &nodes));
  EXPECT(nodes == 1);
}

// What follows a launch in its stream follows all of the graph, and a graph goes while it runs.
void run_graph_then_stream(bool same_stream) {
  const DeviceArray<float> output(64);
  Capture capture;
  const cudaGraphExec_t exec = capture.instance();
  CHECK(cudaGraphDestroy(capture.graph));
  CHECK(cudaGraphLaunch(exec, capture.main));
  CHECK(cudaGraphLaunch(exec, capture.main));
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(scale(output, capture.data, 2.0f, 64, Fault::none,
              same_stream ? capture.main : capture.side));
  CHECK(cudaDeviceSynchronize());
  EXPECT(output.host()[0] == 8 * ramp(1)[0]);
}

void capture_faults() {
  const auto refused = [](const char* name, const char* report, void (*misuse)(Capture&)) {
    scenario(name, Caught::always, report, [misuse] {
      Capture capture;
      misuse(capture);
    });
  };
  const auto wait = [](Capture& c) { c.side.wait(); };
  refused("  wait for a captured stream", "cudaStreamSynchronize while", wait);
  refused("  query of a captured stream", "cudaStreamQuery of a stream that is being captured",
          [](Capture& c) { cudaStreamQuery(c.side); });
  refused("  wait for the device in a capture", "cudaDeviceSynchronize of a stream",
          [](Capture&) { cudaDeviceSynchronize(); });
  refused("  event query in a capture", "cudaEventQuery while",
          [](Capture& c) { cudaEventQuery(c.outside); });
  refused("  event wait in a capture", "cudaEventSynchronize while",
          [](Capture& c) { cudaEventSynchronize(c.outside); });
  refused("  cudaMalloc in a capture", "cudaMalloc while", [](Capture&) {
    void* memory;
    cudaMalloc(&memory, 64);
  });
  refused("  cudaFree in a capture", "cudaFree while", [](Capture& c) { cudaFree(c.data); });
  refused("  cudaMallocHost in a capture", "cudaMallocHost while", [](Capture&) { pinned(16); });
  refused("  copy that waits in a capture", "cudaMemcpy while", [](Capture& c) { c.data.host(); });
  refused("  default stream in a capture", "default stream",
          [](Capture& c) { cudaMemsetAsync(c.data, 0, 64, nullptr); });
  refused("  event from before the capture", "from outside of the capture",
          [](Capture& c) { cudaStreamWaitEvent(c.side, c.outside, 0); });
  refused("  stream that is not joined", "is not joined",
          [](Capture& c) { cudaStreamEndCapture(c.main, &c.graph); });
  refused("  event of a capture that has ended", "recorded in a capture", [](Capture& c) {
    c.end();
    cudaStreamWaitEvent(c.side, c.joined, 0);
  });
  refused("  host waits for an event of a capture", "recorded in a capture", [](Capture& c) {
    c.end();
    cudaEventSynchronize(c.joined);
  });
  refused("  stream destroyed in a capture", "cudaStreamDestroy of a stream",
          [](Capture& c) { cudaStreamDestroy(c.side); });
  refused("  launch in a capture", "is not modelled", [](Capture& c) {
    const cudaGraphExec_t exec = c.instance();
    CHECK(cudaStreamBeginCapture(c.main, cudaStreamCaptureModeThreadLocal));
    cudaGraphLaunch(exec, c.main);
  });
  refused("  launch of a graph that was destroyed", "is not a graph", [](Capture& c) {
    const cudaGraphExec_t exec = c.instance();
    CHECK(cudaGraphExecDestroy(exec));
    cudaGraphLaunch(exec, c.main);
  });
  refused("  graph destroyed twice", "is not a graph", [](Capture& c) {
    c.end();
    CHECK(cudaGraphDestroy(c.graph));
    cudaGraphDestroy(c.graph);
  });
  refused("  memory of a graph freed", "", [](Capture& c) {
    const cudaGraphExec_t exec = c.instance();
    CHECK(cudaFree(c.data));
    CHECK(cudaGraphLaunch(exec, c.main));
    c.main.wait();
  });
}

void run_use_after_free() {
  const DeviceArray<float> input(ramp(256)), output(256);
  const StreamHandle stream;
  CHECK(cudaFree(input));
  CHECK(scale(output, input, 2.0f, 256, Fault::none, stream));
  stream.wait();
}

void run_host_dereference() {
  const DeviceArray<float> input(ramp(16));
  const StreamHandle stream;
  CHECK(scale(input, input, 2.0f, 16, Fault::none, stream));
  volatile float* leaked = input;
  EXPECT(leaked[0] < 0);
}

void run_read_after_copy_without_sync(bool wait) {
  constexpr int N = 32;
  const DeviceArray<float> input(ramp(N));
  float* host = pinned(N);
  const StreamHandle stream;
  CHECK(cudaMemcpyAsync(host, input, N * sizeof(float), cudaMemcpyDeviceToHost, stream));
  if (wait) stream.wait();
  EXPECT(host[1] == -30);
}

void run_uninitialised() {
  const DeviceArray<float> input(64), output(64);
  const StreamHandle stream;
  CHECK(scale(output, input, 2.0f, 64, Fault::none, stream));
  stream.wait();
  EXPECT(!std::isnan(output.host()[0]));
}

void run_read_host() {
  auto* value = new float(3.0f);
  const DeviceArray<float> output(32);
  const StreamHandle stream;
  CHECK(read_host(output, value, stream));
  stream.wait();
}

void run_query_loop() {
  const DeviceArray<float> input(ramp(64)), output(64);
  const StreamHandle stream;
  cudaEvent_t done;
  CHECK(cudaEventCreate(&done));
  CHECK(scale(output, input, 2.0f, 64, Fault::none, stream));
  CHECK(cudaEventRecord(done, stream));
  cudaError_t status;
  while ((status = cudaEventQuery(done)) == cudaErrorNotReady) {
  }
  CHECK(status);
  EXPECT(output.host()[0] == -62);
}

void run_error_codes() {
  const StreamHandle stream;
  const DeviceArray<float> data(ramp(16));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(2048);
  config.stream = stream;
  EXPECT(cudaLaunchKernelEx(
             &config, +[](int) {}, 1) == cudaErrorInvalidConfiguration);
  EXPECT(cudaGetLastError() == cudaErrorInvalidConfiguration);
  EXPECT(cudaGetLastError() == cudaSuccess);
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = 64 << 10;
  EXPECT(cudaLaunchKernelEx(
             &config, +[](int) {}, 1) == cudaErrorInvalidValue);
  size_t free_bytes, total;
  CHECK(cudaMemGetInfo(&free_bytes, &total));
  EXPECT(total - free_bytes == 64);
  void* too_much;
  EXPECT(cudaMalloc(&too_much, total) == cudaErrorMemoryAllocation);
  EXPECT(std::string(cudaGetErrorName(cudaErrorMemoryAllocation)) == "cudaErrorMemoryAllocation");
  EXPECT(cudaSetDevice(8) == cudaErrorInvalidDevice);
}

void kernel_scenarios() {
  scenario("block sum", Caught::never, "", [] { run_block_sums(Fault::none); });
  scenario("  no barrier before the read", Caught::by_wrong_sum, "",
           [] { run_block_sums(Fault::missing_barrier_before_read); });
  scenario("  no barrier before the next write", Caught::sometimes, "race",
           [] { run_block_sums(Fault::missing_barrier_before_write); });
  scenario("  divergent barrier", Caught::always, "divergent barrier",
           [] { run_block_sums(Fault::divergent_barrier); });
  scenario("  threads leave before a barrier", Caught::always, "divergent barrier",
           [] { run_block_sums(Fault::early_exit_before_barrier); });
  scenario("  shared memory not initialised", Caught::by_wrong_sum, "uninitialised",
           [] { run_block_sums(Fault::shared_uninitialised); });
  scenario("atomic sum", Caught::never, "", [] { run_atomic_sum(Fault::none); });
  scenario("  += in place of atomicAdd", Caught::by_tracker, "race",
           [] { run_atomic_sum(Fault::plain_add); });
  scenario("  lanes with different masks", Caught::always, "divergent warp",
           [] { run_atomic_sum(Fault::divergent_shuffle); });
  scenario("scale", Caught::never, "", [] { run_scale(Fault::none); });
  scenario("  off by one at the end of a page", Caught::always, "outside every allocation",
           [] { run_scale(Fault::tail_off_by_one); });
  scenario("  off by one before the end of a page", Caught::always, "", run_scale_in_slack);
  scenario("  misaligned vector", Caught::always, "aligned",
           [] { run_scale(Fault::misaligned_vector); });
  scenario("staged copy", Caught::never, "", [] { run_staged_copy(Fault::none); });
  scenario("  no wait for cp.async", Caught::by_wrong_sum, "in flight",
           [] { run_staged_copy(Fault::missing_copy_wait); });
  scenario("  no barrier after the wait", Caught::by_wrong_sum, "",
           [] { run_staged_copy(Fault::missing_copy_barrier); });
  scenario("  read past the dynamic shared memory", Caught::by_wrong_sum, "dynamic shared memory",
           [] { run_staged_copy(Fault::shared_past_end); });
  scenario("mma bf16, ldmatrix", Caught::never, "", [] { run_mma(true); });
  scenario("mma fp16, ldmatrix", Caught::never, "", [] { run_mma(false); });
  scenario("mma tf32", Caught::never, "", run_mma_tf32);
  scenario("warp functions", Caught::never, "", run_warp_functions);
}

void host_scenarios() {
  scenario("two streams", Caught::never, "", [] { run_two_streams(true); });
  scenario("  no wait for the event", Caught::sometimes, "", [] { run_two_streams(false); });
  scenario("buffer reuse", Caught::never, "", [] { run_buffer_reuse(true); });
  scenario("  no wait for the reader", Caught::sometimes, "race", [] { run_buffer_reuse(false); });
  scenario("graph over two streams", Caught::never, "", [] { run_graph(true); });
  scenario("  no join before the kernel", Caught::sometimes, "", [] { run_graph(false); });
  scenario("graph and what follows it", Caught::never, "", [] { run_graph_then_stream(true); });
  scenario("  in another stream", Caught::sometimes, "race", [] { run_graph_then_stream(false); });
  scenario("capture, other threads wait", Caught::never, "",
           [] { run_capture_and_other_threads(cudaStreamCaptureModeThreadLocal); });
  scenario("  in global mode", Caught::always, "cudaEventSynchronize while",
           [] { run_capture_and_other_threads(cudaStreamCaptureModeGlobal); });
  capture_faults();
  scenario("use of freed memory", Caught::always, "", run_use_after_free);
  scenario("host dereferences device memory", Caught::always, "host code", run_host_dereference);
  scenario("kernel reads host memory", Caught::by_tracker, "host memory", run_read_host);
  scenario("uninitialised device memory", Caught::by_wrong_sum, "uninitialised", run_uninitialised);
  scenario("copy to the host", Caught::never, "", [] { run_read_after_copy_without_sync(true); });
  scenario("event query loop", Caught::never, "", run_query_loop);
  scenario("error codes", Caught::never, "", run_error_codes);
}

}  // namespace
}  // namespace cudasim_test

int main() {
  cudasim_test::kernel_scenarios();
  cudasim_test::host_scenarios();
  return cudasim_test::finish();
}
