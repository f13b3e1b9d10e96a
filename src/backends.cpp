#include "backends.h"

#include "comm/traced_collectives.h"
#include "cpu/backend_cpu.h"
#include "device/traced_ops.h"
#if HAVE_CUDA
#include "cuda/backend_cuda.h"
#include "cuda/device_cuda.h"
#include "cuda/mpi_cuda_collectives.h"
#include "cuda/nccl_collectives.h"
#include "cuda/profiler_ranges.h"
#endif

namespace qshard {
namespace {

Backend make_local_backend(const std::string& name, const World& world) {
  if (name == "cpu") return make_cpu_backend(world.threads_per_rank());
  if (name != "cuda") fail_usage("backend '{}': expected cpu or cuda", name);
#if HAVE_CUDA
  Backend backend = make_cuda_backend(world.machine_rank(), world.machine_size());
  if (Trace* trace = profiler_trace())
    backend.ops = make_traced_ops(std::move(backend.ops), *backend.device, *trace);
  return backend;
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

#if HAVE_CUDA
std::unique_ptr<Collectives> with_ranges(const World& world,
                                         std::unique_ptr<Collectives> transport) {
  Trace* const trace = profiler_trace();
  return trace ? make_traced_collectives(std::move(transport), world, *trace)
               : std::move(transport);
}
#endif

}  // namespace

Backend make_backend(const std::string& name, const World& world) {
  Backend backend;
  collectively(world, [&] { backend = make_local_backend(name, world); });
  return backend;
}

bool moves_gpu_memory(const std::string& transport) {
  return transport == "nccl" || transport == "mpi-cuda";
}

TransportOptions choose_transport(TransportOptions options, const std::string& backend) {
  const bool gpu = backend == "cuda";
  std::string& name = options.name;
  if (name == "auto") name = gpu ? "nccl" : "shm";
  const bool of_gpus = moves_gpu_memory(name);
  if (gpu && !of_gpus)
    fail_usage("transport {} moves memory of the CPU: backend cuda goes with nccl or mpi-cuda",
               name);
  if (!gpu && of_gpus)
    fail_usage(
        "transport {} moves memory of GPUs: it needs backend cuda, of a build by `make CUDA=1`",
        name);
  if (options.nccl_buffers != "plain" && name != "nccl")
    fail_usage("comm.nccl_buffers {} goes with the transport nccl, found {}", options.nccl_buffers,
               name);
  if (options.mpi_memory != "auto" && name != "mpi-cuda")
    fail_usage("comm.mpi_memory {} goes with the transport mpi-cuda, found {}", options.mpi_memory,
               name);
  return options;
}

std::string transport_name(const TransportOptions& options, const Backend& backend) {
  return choose_transport(options, on_gpu(backend) ? "cuda" : "cpu").name;
}

std::unique_ptr<Collectives> make_transport(const TransportOptions& options, World& world,
                                            Backend& backend, int full_buffers) {
  const TransportOptions chosen = choose_transport(options, on_gpu(backend) ? "cuda" : "cpu");
#if HAVE_CUDA
  if (chosen.name == "nccl")
    return with_ranges(world,
                       make_nccl_collectives(world, backend, full_buffers, chosen.nccl_buffers));
  if (chosen.name == "mpi-cuda")
    return with_ranges(world,
                       make_mpi_cuda_collectives(world, backend, full_buffers, chosen.mpi_memory));
#endif
  return make_collectives(chosen.name, world, backend, full_buffers);
}

}  // namespace qshard
