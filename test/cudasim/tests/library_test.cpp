// The simulator's cuBLASLt, NCCL and NVTX. Without argument: all scenarios. With one (under
// mpirun): that program of several ranks.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>
#include <nvtx3/nvToolsExt.h>

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "device_kernels.h"
#include "harness.h"
#include "memory_helpers.h"

namespace cudasim_test {
namespace {

#define NCCL_CHECK(call) EXPECT((call) == ncclSuccess)
#define LT_CHECK(call) EXPECT((call) == CUBLAS_STATUS_SUCCESS)

// --- cuBLASLt
template <class T>
constexpr cudaDataType_t cuda_type() {
  if constexpr (std::is_same_v<T, float>) return CUDA_R_32F;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return CUDA_R_16BF;
  return CUDA_R_16F;
}

struct Product {
  int m, n, k;
  bool ta, tb;
  float beta;
};

template <class T>
std::vector<T> small_integers(size_t n, int step) {
  std::vector<T> values(n);
  for (size_t i = 0; i < n; ++i)
    values[i] = T(static_cast<float>(static_cast<int>(i) * step % 13 - 6));
  return values;
}

struct Plan {
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t a, b, d;
  cublasLtMatmulHeuristicResult_t result{};

  Plan(const Product& p, cudaDataType_t in, cudaDataType_t out, uint64_t workspace, int pad) {
    LT_CHECK(cublasLtCreate(&handle));
    LT_CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t ops[] = {p.ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                                     p.tb ? CUBLAS_OP_T : CUBLAS_OP_N};
    LT_CHECK(
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &ops[0], sizeof ops[0]));
    LT_CHECK(
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &ops[1], sizeof ops[1]));
    const auto layout = [&](cublasLtMatrixLayout_t* l, cudaDataType_t type, int rows, int cols) {
      LT_CHECK(cublasLtMatrixLayoutCreate(l, type, static_cast<uint64_t>(rows),
                                          static_cast<uint64_t>(cols), rows + pad));
    };
    layout(&a, in, p.ta ? p.k : p.m, p.ta ? p.m : p.k);
    layout(&b, in, p.tb ? p.n : p.k, p.tb ? p.k : p.n);
    layout(&d, out, p.m, p.n);
    cublasLtMatmulPreference_t preference;
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    LT_CHECK(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    int found = 0;
    LT_CHECK(
        cublasLtMatmulAlgoGetHeuristic(handle, desc, a, b, d, d, preference, 1, &result, &found));
    EXPECT(found == 1);
  }
};

template <class In, class Out>
void check_product(const Product& p) {
  constexpr int PAD = 3;
  const StreamHandle stream;
  const auto size = [](int rows, int cols) { return static_cast<size_t>((rows + PAD) * cols); };
  const int a_rows = p.ta ? p.k : p.m, b_rows = p.tb ? p.n : p.k;
  const std::vector<In> a = small_integers<In>(size(a_rows, p.ta ? p.m : p.k), 5);
  const std::vector<In> b = small_integers<In>(size(b_rows, p.tb ? p.k : p.n), 7);
  const std::vector<Out> c = small_integers<Out>(size(p.m, p.n), 3);
  const DeviceArray<In> da(a), db(b);
  const DeviceArray<Out> dd(c);
  const DeviceArray<char> workspace(8192);
  const Plan plan(p, cuda_type<In>(), cuda_type<Out>(), 8192, PAD);
  const float alpha = 2;
  LT_CHECK(cublasLtMatmul(plan.handle, plan.desc, &alpha, da, plan.a, db, plan.b, &p.beta, dd,
                          plan.d, dd, plan.d, &plan.result.algo, workspace, 8192, stream));
  stream.wait();
  const std::vector<Out> d = dd.host();
  for (int i = 0; i < p.m; ++i)
    for (int j = 0; j < p.n; ++j) {
      float sum = 0;
      for (int l = 0; l < p.k; ++l)
        sum += static_cast<float>(
                   a[static_cast<size_t>(p.ta ? i * (a_rows + PAD) + l : l * (a_rows + PAD) + i)]) *
               static_cast<float>(
                   b[static_cast<size_t>(p.tb ? l * (b_rows + PAD) + j : j * (b_rows + PAD) + l)]);
      const auto at = static_cast<size_t>(j * (p.m + PAD) + i);
      const float old = p.beta == 0 ? 0 : p.beta * static_cast<float>(c[at]);
      EXPECT(static_cast<float>(d[at]) == static_cast<float>(Out(alpha * sum + old)));
    }
}

void run_products() {
  for (bool ta : {false, true})
    for (bool tb : {false, true})
      for (float beta : {0.0f, 1.0f}) {
        check_product<float, float>({5, 3, 9, ta, tb, beta});
        check_product<__nv_bfloat16, float>({5, 3, 9, ta, tb, beta});
        check_product<__nv_bfloat16, __nv_bfloat16>({4, 7, 6, ta, tb, beta});
        check_product<__half, __half>({4, 7, 6, ta, tb, beta});
      }
}

// Two products on two streams.
void run_shared_workspace(bool share) {
  const StreamHandle streams[2];
  const DeviceArray<float> a(small_integers<float>(64, 5)), b(small_integers<float>(64, 7));
  const DeviceArray<float> results(2 * 64);
  const DeviceArray<char> workspace(2 * 8192);
  const Plan plan({8, 8, 8, false, false, 0}, CUDA_R_32F, CUDA_R_32F, 8192, 0);
  const float alpha = 1, beta = 0;
  for (int i = 0; i < 2; ++i)
    LT_CHECK(cublasLtMatmul(plan.handle, plan.desc, &alpha, a, plan.a, b, plan.b, &beta,
                            results + i * 64, plan.d, results + i * 64, plan.d, &plan.result.algo,
                            workspace + (share ? 0 : i * 8192), 8192, streams[i]));
  CHECK(cudaDeviceSynchronize());
}

void run_misaligned_matrix() {
  const StreamHandle stream;
  const DeviceArray<float> a(small_integers<float>(65, 5)), d(64);
  const Plan plan({8, 8, 8, false, false, 0}, CUDA_R_32F, CUDA_R_32F, 0, 0);
  const float alpha = 1, beta = 0;
  LT_CHECK(cublasLtMatmul(plan.handle, plan.desc, &alpha, a + 1, plan.a, a, plan.b, &beta, d,
                          plan.d, d, plan.d, &plan.result.algo, nullptr, 0, stream));
}

// --- NCCL with one rank: what depends on streams alone
ncclComm_t lone_communicator() {
  ncclUniqueId id;
  ncclComm_t comm;
  NCCL_CHECK(ncclGetUniqueId(&id));
  NCCL_CHECK(ncclCommInitRank(&comm, 1, id, 0));
  return comm;
}

// A unit's buffer is gathered for one layer, used, and gathered again for the next.
void run_gather(bool wait_for_gather, bool wait_for_use) {
  constexpr int N = 512;
  const ncclComm_t comm = lone_communicator();
  const StreamHandle gather, compute;
  const DeviceArray<float> shards(ramp(2 * N)), full(N), output(2 * N);
  cudaEvent_t gathered, used;
  CHECK(cudaEventCreateWithFlags(&gathered, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&used, cudaEventDisableTiming));
  for (int layer = 0; layer < 2; ++layer) {
    if (layer > 0 && wait_for_use) CHECK(cudaStreamWaitEvent(gather, used, 0));
    NCCL_CHECK(ncclAllGather(shards + layer * N, full, N, ncclFloat32, comm, gather));
    CHECK(cudaEventRecord(gathered, gather));
    if (wait_for_gather) CHECK(cudaStreamWaitEvent(compute, gathered, 0));
    CHECK(scale(output + layer * N, full, 2.0f, N, Fault::none, compute));
    CHECK(cudaEventRecord(used, compute));
  }
  CHECK(cudaDeviceSynchronize());
  const std::vector<float> result = output.host(), x = ramp(2 * N);
  for (size_t i = 0; i < result.size(); ++i) EXPECT(result[i] == 2 * x[i]);
}

void run_overlap() {
  const ncclComm_t comm = lone_communicator();
  const StreamHandle stream;
  const DeviceArray<float> data(ramp(64));
  NCCL_CHECK(ncclAllGather(data + 4, data, 32, ncclFloat32, comm, stream));
}

void run_unaligned_window() {
  const ncclComm_t comm = lone_communicator();
  void* memory;
  ncclWindow_t window;
  NCCL_CHECK(ncclMemAlloc(&memory, 8192));
  NCCL_CHECK(ncclCommWindowRegister(comm, memory, 8192, &window, NCCL_WIN_COLL_SYMMETRIC));
  NCCL_CHECK(ncclCommWindowDeregister(comm, window));
  NCCL_CHECK(ncclCommWindowRegister(comm, static_cast<char*>(memory) + 256, 4096, &window,
                                    NCCL_WIN_COLL_SYMMETRIC));
}

// The second operation of the process fails: the program sees it, aborts, and its streams end.
void run_async_error() {
  setenv("CUDASIM_NCCL_ERROR", "2", 1);
  const ncclComm_t comm = lone_communicator();
  const StreamHandle stream;
  const DeviceArray<float> data(ramp(64));
  for (int i = 0; i < 2; ++i)
    NCCL_CHECK(ncclAllReduce(data, data, 64, ncclFloat32, ncclSum, comm, stream));
  ncclResult_t error = ncclSuccess;
  while (cudaStreamQuery(stream) == cudaErrorNotReady && error == ncclSuccess)
    NCCL_CHECK(ncclCommGetAsyncError(comm, &error));
  EXPECT(error == ncclRemoteError);
  NCCL_CHECK(ncclCommAbort(comm));
  stream.wait();
}

// Gathers and reductions on two streams in a graph; `chained`: in one order.
void run_nccl_graph(bool chained, bool destroyed) {
  setenv("CUDASIM_NCCL_EXCLUSIVE", "1", 1);
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);  // has no effect on a graph
  constexpr int N = 64;
  const ncclComm_t gathers = lone_communicator(), reductions = lone_communicator();
  const StreamHandle main, side;
  const DeviceArray<float> x(ramp(N)), y(N), z(ramp(N));
  cudaEvent_t fork, gathered, reduced;
  for (cudaEvent_t* event : {&fork, &gathered, &reduced})
    CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  CHECK(cudaStreamBeginCapture(main, cudaStreamCaptureModeThreadLocal));
  CHECK(cudaEventRecord(fork, main));
  CHECK(cudaStreamWaitEvent(side, fork, 0));
  NCCL_CHECK(ncclAllGather(x, y, N, ncclFloat32, gathers, main));
  CHECK(cudaEventRecord(gathered, main));
  if (chained) CHECK(cudaStreamWaitEvent(side, gathered, 0));
  NCCL_CHECK(ncclAllReduce(z, z, N, ncclFloat32, ncclSum, reductions, side));
  CHECK(cudaEventRecord(reduced, side));
  CHECK(cudaStreamWaitEvent(main, reduced, 0));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamEndCapture(main, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  for (int launch = 0; launch < 2; ++launch) CHECK(cudaGraphLaunch(exec, main));
  main.wait();
  EXPECT(y.host() == ramp(N) && z.host() == ramp(N));
  if (destroyed) CHECK(cudaGraphExecDestroy(exec));
  for (ncclComm_t comm : {gathers, reductions}) NCCL_CHECK(ncclCommDestroy(comm));
}

// --- NCCL with several ranks
struct World {
  int rank, size;
  World() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
  }
  ncclComm_t communicator() const {
    ncclUniqueId id;
    if (rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    ncclComm_t comm;
    NCCL_CHECK(ncclCommInitRank(&comm, size, id, rank));
    return comm;
  }
};

// Gathers, reductions and host MPI calls, with ranks at different places of the program.
void ranks_mixed(const World& w, ncclComm_t gathers, ncclComm_t reductions) {
  constexpr size_t N = 24;
  const auto n = static_cast<size_t>(w.size), r = static_cast<size_t>(w.rank);
  const StreamHandle s1, s2;
  DeviceArray<float> full(N * n), grads(std::vector<float>(N * n, static_cast<float>(w.rank + 1)));
  DeviceArray<float> mean(N);
  const std::vector<float> mine(N, static_cast<float>(10 * (w.rank + 1)));
  CHECK(cudaMemcpy(full + r * N, mine.data(), N * 4, cudaMemcpyHostToDevice));
  NCCL_CHECK(ncclGroupStart());  // two pieces of the buffer, in place
  for (size_t piece = 0; piece < 2; ++piece) {
    const DeviceArray<float> part(std::vector<float>(N, static_cast<float>(w.rank)));
    if (piece == 0)
      NCCL_CHECK(ncclAllGather(full + r * N, full, N, ncclFloat32, gathers, s1));
    else
      NCCL_CHECK(ncclAllReduce(part, part, N, ncclFloat32, ncclMax, gathers, s1));
  }
  NCCL_CHECK(ncclGroupEnd());
  // Some ranks wait for the others before they enqueue more, the others after.
  if (w.rank % 2 == 1) MPI_Barrier(MPI_COMM_WORLD);
  if (w.rank % 2 == 1) s1.wait();
  NCCL_CHECK(ncclReduceScatter(grads, mean, N, ncclFloat32, ncclAvg, reductions, s2));
  if (w.rank % 2 == 0) MPI_Barrier(MPI_COMM_WORLD);
  double one = 1, sum = 0;
  MPI_Allreduce(&one, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  CHECK(cudaDeviceSynchronize());
  EXPECT(sum == w.size);
  const std::vector<float> gathered = full.host(), reduced = mean.host();
  for (size_t i = 0; i < gathered.size(); ++i)
    EXPECT(gathered[i] == static_cast<float>(10 * (i / N + 1)));
  EXPECT(std::fabs(reduced[0] - static_cast<float>(w.size + 1) / 2) < 1e-6f);
}

void ranks_bf16_rounding(const World& w, ncclComm_t comm) {  // 256 + 1 + 1 is 256 in bf16
  const StreamHandle stream;
  const DeviceArray<__nv_bfloat16> x(
      std::vector<__nv_bfloat16>(1, __nv_bfloat16(w.rank == 0 ? 256.0f : 1.0f)));
  NCCL_CHECK(ncclAllReduce(x, x, 1, ncclBfloat16, ncclSum, comm, stream));
  stream.wait();
  const float sum = static_cast<float>(x.host()[0]);
  EXPECT(w.size < 3 ? sum == 256.0f : sum >= 256.0f && sum <= 258.0f);
}

void ranks_split(const World& w, ncclComm_t comm) {
  ncclComm_t half;
  NCCL_CHECK(ncclCommSplit(comm, w.rank % 2, w.rank, &half, nullptr));
  int size = 0;
  NCCL_CHECK(ncclCommCount(half, &size));
  EXPECT(size == (w.size + 1 - w.rank % 2) / 2);
  NCCL_CHECK(ncclCommDestroy(half));
}

void ranks_correct(const World& w) {
  const ncclComm_t gathers = w.communicator(), reductions = w.communicator();
  for (int round = 0; round < 3; ++round) {
    ranks_mixed(w, gathers, reductions);
    ranks_bf16_rounding(w, reductions);
    ranks_split(w, gathers);
  }
  NCCL_CHECK(ncclCommFinalize(gathers));
  NCCL_CHECK(ncclCommDestroy(gathers));
  NCCL_CHECK(ncclCommDestroy(reductions));
}

void ranks_different_calls(const World& w) {
  const ncclComm_t comm = w.communicator();
  const StreamHandle stream;
  const DeviceArray<float> data(ramp(64));
  NCCL_CHECK(ncclAllReduce(data, data, w.rank == 0 ? 64 : 32, ncclFloat32, ncclSum, comm, stream));
  stream.wait();
}

int run_ranks(const std::string& program) {
  MPI_Init(nullptr, nullptr);
  const World world;
  if (program == "correct")
    ranks_correct(world);
  else
    ranks_different_calls(world);
  MPI_Finalize();
  return 0;
}

// --- NVTX
nvtxDomainHandle_t domain_of_a_profiler() {
  const std::string path = std::filesystem::temp_directory_path() / "cudasim_nvtx";
  setenv("CUDASIM_NVTX", path.c_str(), 1);
  const nvtxDomainHandle_t domain = nvtxDomainCreateA("test");
  EXPECT(domain);
  EXPECT(std::filesystem::remove(path + "." + std::to_string(getpid())));  // nobody reads it
  return domain;
}

void run_ranges(int pops) {
  const nvtxDomainHandle_t domain = domain_of_a_profiler();
  nvtxEventAttributes_t range{};
  range.version = NVTX_VERSION;
  range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  range.messageType = NVTX_MESSAGE_TYPE_ASCII;
  range.message.ascii = "outer";
  EXPECT(nvtxDomainRangePushEx(domain, &range) == 0);
  EXPECT(nvtxDomainRangePushEx(domain, &range) == 1);
  for (int left = 1; left >= 2 - pops; --left) EXPECT(nvtxDomainRangePop(domain) == left);
}

void run_range_without_name() {
  const nvtxEventAttributes_t range{};
  nvtxDomainRangePushEx(domain_of_a_profiler(), &range);
}

}  // namespace
}  // namespace cudasim_test

int main(int argc, char** argv) {
  using namespace cudasim_test;
  if (argc > 1) return run_ranks(argv[1]);
  scenario("cuBLASLt products", Caught::never, "", run_products);
  scenario("cuBLASLt on two streams", Caught::never, "", [] { run_shared_workspace(false); });
  scenario("  one workspace for both", Caught::by_tracker, "race",
           [] { run_shared_workspace(true); });
  scenario("  matrix less aligned than promised", Caught::always, "aligned", run_misaligned_matrix);
  scenario("gather, use, gather again", Caught::never, "", [] { run_gather(true, true); });
  scenario("  buffer reused before its gather ended", Caught::sometimes, "",
           [] { run_gather(false, true); });
  scenario("  gathered into before its use ended", Caught::sometimes, "race",
           [] { run_gather(true, false); });
  scenario("  buffers overlap", Caught::always, "overlap", run_overlap);
  scenario("  window not aligned", Caught::always, "aligned", run_unaligned_window);
  scenario("async error and abort", Caught::never, "", run_async_error);
  scenario("NCCL in a graph", Caught::never, "", [] { run_nccl_graph(true, true); });
  scenario("  communicators in no order", Caught::always, "nothing orders",
           [] { run_nccl_graph(false, true); });
  scenario("  communicator ends before the graph", Caught::always, "are in a graph",
           [] { run_nccl_graph(true, false); });
  scenario("NVTX ranges", Caught::never, "", [] { run_ranges(2); });
  scenario("  more ends than begins", Caught::always, "no range", [] { run_ranges(3); });
  scenario("  range without a name", Caught::always, "nvtx: a range", run_range_without_name);
  scenario("no NVTX without a profiler", Caught::never, "",
           [] { EXPECT(!nvtxDomainCreateA("test")); });
  rank_scenario("NCCL and MPI, 2 ranks", Caught::never, "", {argv[0], "correct", 2});
  rank_scenario("NCCL and MPI, 3 ranks", Caught::never, "", {argv[0], "correct", 3});
  rank_scenario("  ranks call different operations", Caught::always, "different operations",
                {argv[0], "different", 2});
  return finish();
}
