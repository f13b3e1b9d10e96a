// CudaDevice::record(): see [Note: Capture].
#include "base/check.h"
#include "cuda/check_cuda.h"
#include "cuda/device_cuda.h"

namespace qshard::cuda {

class CudaDevice::Graph final : public Recording {
 public:
  Graph(CudaDevice& device, const std::function<void()>& work);
  // NCCL ends a communicator only when no graph has its operations any more.
  ~Graph() override {
    --device_.recordings_;
    cudaGraphExecDestroy(executable_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void run() override {
    CUDA_CHECK(cudaGraphLaunch(executable_, device_.stream_));
    device_.branch_off();
  }
  int64_t nodes() const override { return static_cast<int64_t>(nodes_); }

 private:
  CudaDevice& device_;
  cudaGraphExec_t executable_ = nullptr;
  size_t nodes_ = 0;
};

CudaDevice::Graph::Graph(CudaDevice& device, const std::function<void()>& work) : device_(device) {
  CUDA_CHECK(cudaStreamBeginCapture(device.stream_, cudaStreamCaptureModeThreadLocal));
  device.branch_off();
  work();
  for (SideStreams* streams : device.side_streams_) streams->join();
  cudaGraph_t captured = nullptr;
  CUDA_CHECK(cudaStreamEndCapture(device.stream_, &captured));
  struct Destroy {
    void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
  };
  const std::unique_ptr<CUgraph_st, Destroy> graph(captured);
  CUDA_CHECK(cudaGraphGetNodes(graph.get(), nullptr, &nodes_));
  CUDA_CHECK(cudaGraphInstantiate(&executable_, graph.get(), 0));
  ++device.recordings_;
  device.branch_off();
}

std::unique_ptr<Recording> CudaDevice::record(const std::function<void()>& work) {
  return std::make_unique<Graph>(*this, work);
}

}  // namespace qshard::cuda
