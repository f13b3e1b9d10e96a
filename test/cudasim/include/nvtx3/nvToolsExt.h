// Found before NVIDIA's header of this name: the part of NVTX that names ranges of a domain, served
// by src/nvtx.cpp. A profiler is attached where CUDASIM_NVTX names a file.
#pragma once

#include <cstdint>

constexpr uint16_t NVTX_VERSION = 3;
constexpr int32_t NVTX_MESSAGE_TYPE_ASCII = 1;

struct nvtxDomainRegistration_st;
using nvtxDomainHandle_t = nvtxDomainRegistration_st*;

struct nvtxEventAttributes_t {
  uint16_t version, size;
  int32_t messageType;
  union {
    const char* ascii;
  } message;
};
constexpr uint16_t NVTX_EVENT_ATTRIB_STRUCT_SIZE = sizeof(nvtxEventAttributes_t);

nvtxDomainHandle_t nvtxDomainCreateA(const char* name);  // null without a profiler
int nvtxDomainRangePushEx(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes);
int nvtxDomainRangePop(nvtxDomainHandle_t domain);  // of the last range of this thread
