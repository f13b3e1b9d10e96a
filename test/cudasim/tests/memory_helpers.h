// Streams and memory for the tests: not released, each scenario is a process of its own.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "harness.h"

#define CHECK(call) EXPECT((call) == cudaSuccess)

namespace cudasim_test {

struct StreamHandle {
  cudaStream_t stream;
  StreamHandle() { CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  operator cudaStream_t() const { return stream; }
  void wait() const { CHECK(cudaStreamSynchronize(stream)); }
};

template <class T>
struct DeviceArray {
  T* data;
  size_t count;
  explicit DeviceArray(size_t n) : count(n) { CHECK(cudaMalloc(&data, n * sizeof(T))); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    CHECK(cudaMemcpy(data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  operator T*() const { return data; }
  std::vector<T> host() const {
    std::vector<T> values(count);
    CHECK(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
};

inline std::vector<float> ramp(size_t n) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = static_cast<float>(i % 97) - 31;
  return values;
}

inline float* pinned(size_t n) {
  float* data;
  CHECK(cudaMallocHost(&data, n * sizeof(float)));
  return data;
}

}  // namespace cudasim_test
