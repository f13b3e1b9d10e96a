// What cuda/ptx.cuh calls in place of PTX: tensor-core products, matrix loads and asynchronous
// copies.
//
// Fragment layouts are those of the PTX ISA, section "Warp-level matrix instructions". All 32 lanes
// of a warp must call each mma and ldmatrix together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cudasim/site.h"

namespace cudasim {

// d = a·b + c with f32 sums, mma.sync.aligned.m16n8kK.row.col: a[4] is 16×K, b[2] is K×8, c and d
// are 16×8. c may be d.
void mma_m16n8k16_bf16(float* d, const uint32_t* a, const uint32_t* b, const float* c,
                       CUDASIM_SITE);
void mma_m16n8k16_fp16(float* d, const uint32_t* a, const uint32_t* b, const float* c,
                       CUDASIM_SITE);
// tf32: the low 13 bits of the f32 elements of a and b are ignored, as by the hardware.
void mma_m16n8k8_tf32(float* d, const uint32_t* a, const uint32_t* b, const float* c, CUDASIM_SITE);

// ldmatrix.sync.aligned.m8n8.x<count>[.trans].shared.b16: count is 1, 2 or 4. Lane i < 8·count
// gives the address of a row of 16 bytes; other lanes' addresses are ignored.
void ldmatrix(uint32_t* r, int count, bool transposed, const void* row, CUDASIM_SITE);

// cp.async.{ca,cg}.shared.global of 4, 8 or 16 bytes, zero-filled beyond source_bytes. The copy
// lands at an unspecified time between this call and the wait.
void cp_async(void* shared, const void* global, int bytes, int source_bytes);
void cp_async_commit();
// cp.async.wait_group: all but the newest `groups` groups of this thread have landed.
void cp_async_wait(int groups);

}  // namespace cudasim
