// The CUDA runtime's devices, memory, copies and launches.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "block.h"
#include "memory.h"
#include "mpi_progress.h"
#include "report.h"
#include "scheduler.h"
#include "shared_region.h"
#include "stream.h"
#include "tracker.h"

namespace cudasim {
namespace {

constexpr int MAX_THREADS = 1024;
constexpr size_t SHARED_WITHOUT_ASKING = 48 << 10;
constexpr unsigned MAX_GRID_YZ = 65535;
constexpr int PROCESSORS = 4;  // few, so that grids sized by them stay small
constexpr int VERSION = 13000;

thread_local cudaError_t last_error = cudaSuccess;
int current_device = 0;

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int device_count() { return static_cast<int>(environment("CUDASIM_DEVICES", 8)); }

std::map<const void*, size_t>& dynamic_limits() {
  static std::map<const void*, size_t> limits;
  return limits;
}

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
constexpr ErrorText ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
};

const ErrorText* find_error(cudaError_t error) {
  for (const ErrorText& entry : ERRORS)
    if (entry.error == error) return &entry;
  return nullptr;
}

bool source_on_device(cudaMemcpyKind kind, const void* from) {
  if (kind == cudaMemcpyDefault) return is_device_address(from);
  return kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
}

bool target_on_device(cudaMemcpyKind kind, const void* to) {
  if (kind == cudaMemcpyDefault) return is_device_address(to);
  return kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
}

// One side of a copy. `pageable`: ordinary host memory is allowed.
void check_side(const void* address, size_t bytes, bool device, bool pageable, const char* user) {
  if (device) {
    check_device_range(address, bytes, user);
  } else if (is_device_address(address)) {
    fail("%s: the kind says host memory, but %p is device memory (%s)", user, address,
         describe_address(address));
  } else if (!pageable && !is_pinned(address, bytes)) {
    fail(
        "%s: %p is pageable host memory: the copy would be staged and block; allocate it with "
        "cudaMallocHost or register it",
        user, address);
  }
}

struct Copy2D {
  char* to;
  size_t to_pitch;
  const char* from;
  size_t from_pitch;
  size_t width, height;

  void run() const {
    check_receives(from, from_bytes(), "a copy");
    check_receives(to, to_bytes(), "a copy");
    for (size_t row = 0; row < height; ++row) {
      track_operation_read(from + row * from_pitch, width);
      track_operation_write(to + row * to_pitch, width);
      std::memmove(to + row * to_pitch, from + row * from_pitch, width);
    }
  }
  // From the first byte to the last.
  size_t to_bytes() const { return height ? (height - 1) * to_pitch + width : 0; }
  size_t from_bytes() const { return height ? (height - 1) * from_pitch + width : 0; }
};

void copy_in_stream(const Copy2D& copy, cudaMemcpyKind kind, cudaStream_t stream,
                    const char* user) {
  ApiCall call;
  check_side(copy.to, copy.to_bytes(), target_on_device(kind, copy.to), false, user);
  check_side(copy.from, copy.from_bytes(), source_on_device(kind, copy.from), false, user);
  enqueue_body(stream_of(stream, user), user, [copy] { copy.run(); });
}

void copy_now(const Copy2D& copy, cudaMemcpyKind kind, const char* user) {
  ApiCall call;
  refuse_in_capture(user);
  const bool to_device = target_on_device(kind, copy.to),
             from_device = source_on_device(kind, copy.from);
  if (to_device && from_device)
    fail("%s from device to device does not wait for the copy: use cudaMemcpyAsync", user);
  check_side(copy.to, copy.to_bytes(), to_device, true, user);
  check_side(copy.from, copy.from_bytes(), from_device, true, user);
  run_some();  // it waits for no stream
  run_on_host_lane(user, [&] { copy.run(); });
}

bool valid_configuration(const cudaLaunchConfig_t& config) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  return threads >= 1 && threads <= MAX_THREADS && block.z <= 64 && grid.x >= 1 &&
         grid.x <= 0x7FFFFFFF && grid.y >= 1 && grid.y <= MAX_GRID_YZ && grid.z >= 1 &&
         grid.z <= MAX_GRID_YZ && uint64_t(grid.x) * grid.y * grid.z <= 0xFFFFFFFF &&
         config.dynamicSmemBytes <= DYNAMIC_SHARED_CAPACITY;
}

}  // namespace

[[noreturn]] void trap() { fail("__trap()"); }

void note_atomic(void* address, size_t bytes) {
  track_atomic(address, bytes, __builtin_return_address(0));
}

cudaError_t launch_kernel(const cudaLaunchConfig_t& config, const void* kernel,
                          void (*invoke)(const void*), std::shared_ptr<const void> call_arguments,
                          size_t call_bytes) {
  ApiCall call;
  if (config.numAttrs != 0) fail("launch attributes (clusters, cooperative, …) are not modelled");
  if (!valid_configuration(config)) return note(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes > SHARED_WITHOUT_ASKING &&
      config.dynamicSmemBytes > dynamic_limits()[kernel])
    return note(cudaErrorInvalidValue);  // cudaFuncSetAttribute was not called
  Launch launch{kernel, config.gridDim,       config.blockDim, config.dynamicSmemBytes,
                invoke, call_arguments.get(), call_bytes};
  enqueue_body(stream_of(config.stream, "kernel launch"), "kernel",
               [launch, call_arguments] { run_grid(launch); });
  return cudaSuccess;
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

// --- errors and versions
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* entry = find_error(error);
  return entry ? entry->name : "unknown error";
}

const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* entry = find_error(error);
  return entry ? entry->text : "unknown error";
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = device_count() > 0 ? VERSION : 0;
  return cudaSuccess;
}

// --- devices
cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count > 0 ? cudaSuccess : note(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
  ApiCall call;
  if (device < 0 || device >= device_count()) return note(cudaErrorInvalidDevice);
  if (device != current_device && device_bytes_used() > 0)
    fail("cudaSetDevice(%d) after memory of device %d was allocated: one device a process", device,
         current_device);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return device_count() > 0 ? cudaSuccess : note(cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= device_count()) return note(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "cudasim");
  properties->totalGlobalMem = device_bytes_total();
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = PROCESSORS;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = MAX_THREADS;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = SHARED_WITHOUT_ASKING;
  properties->sharedMemPerBlockOptin = DYNAMIC_SHARED_CAPACITY;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = 5120;
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->asyncEngineCount = 3;
  properties->pciBusID = device + 1;
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= device_count()) return note(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = PROCESSORS;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = MAX_THREADS;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = SHARED_WITHOUT_ASKING;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = DYNAMIC_SHARED_CAPACITY;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 << 10;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;
      break;
    case cudaDevAttrClockRate:
      *value = 1980000;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 2619000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 5120;
      break;
    case cudaDevAttrPciBusId:
      *value = device + 1;
      break;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
      *value = 0;
      break;
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCooperativeLaunch:
      *value = 0;
      break;
    default:
      fail("cudaDeviceGetAttribute: attribute %d is not modelled", static_cast<int>(attribute));
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (device < 0 || device >= device_count()) return note(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<size_t>(length), "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}

// --- memory
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  ApiCall call;
  refuse_in_capture("cudaMalloc");
  if (device_count() == 0) return note(cudaErrorNoDevice);
  *pointer = bytes ? allocate(Space::device, bytes) : nullptr;
  return *pointer || !bytes ? cudaSuccess : note(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  ApiCall call;
  refuse_in_capture("cudaFree");
  wait_for_all();
  check_slack();
  if (!release(Space::device, pointer))
    fail("cudaFree of %p, which is not the start of a live allocation (%s)", pointer,
         describe_address(pointer));
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  ApiCall call;
  refuse_in_capture("cudaMallocHost");
  if (flags & ~(cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined))
    return note(cudaErrorInvalidValue);
  *pointer = bytes ? allocate(Space::pinned, bytes) : nullptr;
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  ApiCall call;
  refuse_in_capture("cudaFreeHost");
  wait_for_all();
  if (!release(Space::pinned, pointer))
    fail("cudaFreeHost of %p, which cudaMallocHost did not return", pointer);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  ApiCall call;
  refuse_in_capture("cudaHostRegister");
  return register_host(pointer, bytes) ? cudaSuccess : note(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* pointer) {
  ApiCall call;
  refuse_in_capture("cudaHostUnregister");
  wait_for_all();
  return unregister_host(pointer) ? cudaSuccess : note(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  ApiCall call;
  if (!is_pinned(host, 1)) return note(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  ApiCall call;
  *total = device_bytes_total();
  *free_bytes = *total - device_bytes_used();
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  ApiCall call;
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  attributes->hostPointer = const_cast<void*>(pointer);
  const Allocation* allocation = find_allocation(pointer);
  if (allocation && allocation->live && allocation->space == Space::device) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = current_device;
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->hostPointer = nullptr;
  } else if (is_pinned(pointer, 1)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = current_device;
    attributes->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

// --- copies
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  copy_in_stream({static_cast<char*>(to), bytes, static_cast<const char*>(from), bytes, bytes, 1},
                 kind, stream, "cudaMemcpyAsync");
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return note(cudaErrorInvalidValue);
  copy_in_stream(
      {static_cast<char*>(to), to_pitch, static_cast<const char*>(from), from_pitch, width, height},
      kind, stream, "cudaMemcpy2DAsync");
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  copy_now({static_cast<char*>(to), bytes, static_cast<const char*>(from), bytes, bytes, 1}, kind,
           "cudaMemcpy");
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  ApiCall call;
  check_device_range(to, bytes, "cudaMemsetAsync");
  enqueue_body(stream_of(stream, "cudaMemsetAsync"), "cudaMemsetAsync", [=] {
    track_operation_write(to, bytes);
    std::memset(to, value, bytes);
  });
  return cudaSuccess;
}

cudaError_t cudaMemset(void*, int, size_t) {
  fail("cudaMemset does not wait for its end and is ordered with no stream: use cudaMemsetAsync");
}

// --- kernels
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  ApiCall call;
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
    fail("cudaFuncSetAttribute: attribute %d is not modelled", static_cast<int>(attribute));
  if (value < 0 || static_cast<size_t>(value) > DYNAMIC_SHARED_CAPACITY)
    return note(cudaErrorInvalidValue);
  dynamic_limits()[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  ApiCall call;
  *attributes = {};
  attributes->maxThreadsPerBlock = MAX_THREADS;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes =
      static_cast<int>(std::max(SHARED_WITHOUT_ASKING, dynamic_limits()[kernel]));
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int block_size,
                                                          size_t dynamic_bytes) {
  if (block_size < 1 || block_size > MAX_THREADS) return note(cudaErrorInvalidValue);
  const int by_shared = static_cast<int>((size_t(228) << 10) / (dynamic_bytes + 1024));
  *blocks = std::min({2048 / block_size, by_shared, 4});
  return cudaSuccess;
}

}  // extern "C"
