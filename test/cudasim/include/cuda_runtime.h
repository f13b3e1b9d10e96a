// Found before NVIDIA's header of this name when CUDA sources are compiled for the simulator. The
// declarations of the runtime are NVIDIA's own (cuda_runtime_api.h); the device language and the
// launch are the simulator's.
#pragma once

#ifdef __CUDACC__
#include_next <cuda_runtime.h>
#else
#define CUDASIM 1
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include "cudasim/device.h"
#include "cudasim/launch.h"
#include "cudasim/tensor_core.h"
#endif
