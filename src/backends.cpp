#include "backends.h"

#include "cpu/backend_cpu.h"
#if HAVE_CUDA
#include "cuda/backend_cuda.h"
#include "cuda/device_cuda.h"
#include "cuda/nccl_collectives.h"
#endif

namespace qshard {
namespace {

Backend make_local_backend(const std::string& name, const World& world) {
  if (name == "cpu") return make_cpu_backend(world.threads_per_rank());
  if (name != "cuda") fail_usage("backend '{}': expected cpu or cuda", name);
#if HAVE_CUDA
  return make_cuda_backend(world.node_rank(), world.node_size());
#else
  fail_usage(
      "backend 'cuda' is not in this build: `make CUDA=1` makes one that has it, "
      "build/cuda/qshard");
#endif
}

bool on_gpu([[maybe_unused]] const Backend& backend) {
#if HAVE_CUDA
  return dynamic_cast<const cuda::CudaDevice*>(backend.device.get()) != nullptr;
#else
  return false;
#endif
}

}  // namespace

Backend make_backend(const std::string& name, const World& world) {
  Backend backend;
  collectively(world, [&] { backend = make_local_backend(name, world); });
  return backend;
}

std::string choose_transport(const std::string& transport, const std::string& backend) {
  const bool gpu = backend == "cuda";
  if (transport == "auto") return gpu ? "nccl" : "shm";
  if (gpu && transport != "nccl")
    fail_usage("transport {} moves memory of the CPU: backend cuda goes with nccl", transport);
  if (!gpu && transport == "nccl")
    fail_usage(
        "transport nccl moves memory of GPUs: it needs backend cuda, of a build by `make CUDA=1`");
  return transport;
}

std::unique_ptr<Collectives> make_transport(const std::string& transport, World& world,
                                            Backend& backend, int full_buffers) {
  const std::string chosen = choose_transport(transport, on_gpu(backend) ? "cuda" : "cpu");
#if HAVE_CUDA
  if (chosen == "nccl") return make_nccl_collectives(world, backend, full_buffers);
#endif
  return make_collectives(chosen, world, backend, full_buffers);
}

}  // namespace qshard
