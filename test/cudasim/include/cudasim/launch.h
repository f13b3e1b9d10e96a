// Kernel launches: cudaLaunchKernelEx(&config, kernel, arguments…) is the same text for nvcc and
// for the simulator. <<<…>>> is not C++ and not supported.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

namespace cudasim {

// The arguments of one launch, copied at the call as by CUDA.
template <class... P>
struct KernelCall {
  void (*kernel)(P...);
  std::tuple<std::decay_t<P>...> arguments;

  static void invoke(const void* self) {
    const auto* call = static_cast<const KernelCall*>(self);
    std::apply(call->kernel, call->arguments);
  }
};

cudaError_t launch_kernel(const cudaLaunchConfig_t& config, const void* kernel,
                          void (*invoke)(const void*), std::shared_ptr<const void> call,
                          size_t call_bytes);

}  // namespace cudasim

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...),
                               A&&... arguments) {
  using Call = cudasim::KernelCall<P...>;
  auto call =
      std::make_shared<const Call>(Call{kernel, {static_cast<P>(std::forward<A>(arguments))...}});
  return cudasim::launch_kernel(*config, reinterpret_cast<const void*>(kernel), &Call::invoke,
                                std::move(call), sizeof(Call));
}

template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <class... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(P...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}

template <class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(P...),
                                                          int block_size, size_t dynamic_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      blocks, reinterpret_cast<const void*>(kernel), block_size, dynamic_bytes);
}

template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}

template <class T>
cudaError_t cudaMallocHost(T** pointer, size_t bytes) {
  return cudaMallocHost(reinterpret_cast<void**>(pointer), bytes);
}

template <class T>
cudaError_t cudaHostAlloc(T** pointer, size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(pointer), bytes, flags);
}
