#include "cuda/backend_cuda.h"

#include "cuda/choose_device.h"
#include "cuda/ops_cuda.h"

namespace qshard {

Backend make_cuda_backend(int local_rank, int local_size, cuda::F32Products f32_products) {
  const int visible = cuda::CudaDevice::count();
  auto device =
      std::make_unique<cuda::CudaDevice>(cuda::choose_device(local_rank, local_size, visible));
  Backend backend;
  backend.ops = std::make_unique<cuda::CudaOps>(*device, f32_products);
  backend.device = std::move(device);
  return backend;
}

cuda::CudaDevice& gpu_of(Backend& backend) {
  auto* device = dynamic_cast<cuda::CudaDevice*>(backend.device.get());
  QS_CHECK(device, "this transport moves GPU memory, the backend's device is {}",
           backend.device->name());
  return *device;
}

}  // namespace qshard
