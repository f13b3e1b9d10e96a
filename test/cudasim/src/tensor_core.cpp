#include "cudasim/tensor_core.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstring>
#include <utility>

#include "block.h"
#include "report.h"
#include "tracker.h"

namespace cudasim {
namespace {

constexpr int WARP = 32;
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;
constexpr int ROWS = 16, COLS = 8;  // of the product

struct MmaFrame {
  float* d;
  const uint32_t *a, *b;
  const float* c;
};

float from_bf16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }
float from_fp16(uint32_t bits) {
  __half_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __half2float(__half(raw));
}
float from_tf32(uint32_t bits) { return std::bit_cast<float>(bits & 0xFFFFE000u); }

template <int K>
struct Operands {
  float a[ROWS][K];
  float b[K][COLS];
};

// c and d, all types: lane 4g + t has rows g and g + 8, columns 2t and 2t + 1.
template <int K>
void multiply(void** frames, const Operands<K>& operands) {
  for (int lane = 0; lane < WARP; ++lane) {
    const auto& frame = *static_cast<const MmaFrame*>(frames[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = g + i / 2 * 8, col = 2 * t + i % 2;
      float sum = 0;
      for (int k = 0; k < K; ++k) sum += operands.a[row][k] * operands.b[k][col];
      frame.d[i] = frame.c[i] + sum;
    }
  }
}

// 16-bit types, K = 16: register i of a holds row g + (i odd ? 8 : 0) and columns 2t, 2t + 1, both
// plus 8 for i ≥ 2; register i of b holds rows 2t + 8i, 2t + 8i + 1 of column g.
template <float (*CONVERT)(uint32_t)>
void mma_16bit(void** frames, uint32_t mask) {
  if (mask != ALL_LANES) fail("mma: lanes %08x have exited", ~mask);
  Operands<16> operands;
  for (int lane = 0; lane < WARP; ++lane) {
    const auto& frame = *static_cast<const MmaFrame*>(frames[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      float* element = &operands.a[g + i % 2 * 8][2 * t + i / 2 * 8];
      element[0] = CONVERT(frame.a[i] & 0xFFFF);
      element[1] = CONVERT(frame.a[i] >> 16);
    }
    for (int i = 0; i < 2; ++i) {
      operands.b[2 * t + 8 * i][g] = CONVERT(frame.b[i] & 0xFFFF);
      operands.b[2 * t + 8 * i + 1][g] = CONVERT(frame.b[i] >> 16);
    }
  }
  multiply(frames, operands);
}

// tf32, K = 8: register i of a holds row g + (i odd ? 8 : 0), column t + (i ≥ 2 ? 4 : 0); register
// i of b holds row t + 4i of column g.
void mma_tf32(void** frames, uint32_t mask) {
  if (mask != ALL_LANES) fail("mma: lanes %08x have exited", ~mask);
  Operands<8> operands;
  for (int lane = 0; lane < WARP; ++lane) {
    const auto& frame = *static_cast<const MmaFrame*>(frames[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) operands.a[g + i % 2 * 8][t + i / 2 * 4] = from_tf32(frame.a[i]);
    for (int i = 0; i < 2; ++i) operands.b[t + 4 * i][g] = from_tf32(frame.b[i]);
  }
  multiply(frames, operands);
}

struct MatrixFrame {
  uint32_t* r;
  int count;
  bool transposed;
  uint16_t row[8];  // what this lane's address holds
};

void combine_ldmatrix(void** frames, uint32_t mask) {
  if (mask != ALL_LANES) fail("ldmatrix: lanes %08x have exited", ~mask);
  const auto element = [&](int matrix, int row, int col) -> uint32_t {
    return static_cast<const MatrixFrame*>(frames[matrix * 8 + row])->row[col];
  };
  for (int lane = 0; lane < WARP; ++lane) {
    const auto& frame = *static_cast<const MatrixFrame*>(frames[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int m = 0; m < frame.count; ++m) {
      const uint32_t low = frame.transposed ? element(m, 2 * t, g) : element(m, g, 2 * t);
      const uint32_t high = frame.transposed ? element(m, 2 * t + 1, g) : element(m, g, 2 * t + 1);
      frame.r[m] = low | high << 16;
    }
  }
}

void land(const AsyncCopy& copy) {
  std::memcpy(copy.destination, copy.source, copy.source_bytes);
  std::memset(static_cast<char*>(copy.destination) + copy.source_bytes, 0,
              copy.bytes - copy.source_bytes);
}

}  // namespace

void mma_m16n8k16_bf16(float* d, const uint32_t* a, const uint32_t* b, const float* c,
                       const char* file, int line) {
  MmaFrame frame{d, a, b, c};
  warp_collective("mma.m16n8k16.bf16", ALL_LANES, &frame, mma_16bit<from_bf16>, {file, line});
}

void mma_m16n8k16_fp16(float* d, const uint32_t* a, const uint32_t* b, const float* c,
                       const char* file, int line) {
  MmaFrame frame{d, a, b, c};
  warp_collective("mma.m16n8k16.fp16", ALL_LANES, &frame, mma_16bit<from_fp16>, {file, line});
}

void mma_m16n8k8_tf32(float* d, const uint32_t* a, const uint32_t* b, const float* c,
                      const char* file, int line) {
  MmaFrame frame{d, a, b, c};
  warp_collective("mma.m16n8k8.tf32", ALL_LANES, &frame, mma_tf32, {file, line});
}

void ldmatrix(uint32_t* r, int count, bool transposed, const void* row, const char* file,
              int line) {
  if (count != 1 && count != 2 && count != 4) fail("ldmatrix of %d matrices", count);
  MatrixFrame frame{r, count, transposed, {}};
  if (current_thread->lane < 8 * count) {  // each lane reads its own row, before the collective
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
      fail("ldmatrix at %s:%d: row address %p is not aligned to 16 bytes", file, line, row);
    check_shared(row, 16, "ldmatrix");
    track_read(row, 16, __builtin_return_address(0));
    std::memcpy(frame.row, row, 16);
  }
  warp_collective(transposed ? "ldmatrix.trans" : "ldmatrix", ALL_LANES, &frame, combine_ldmatrix,
                  {file, line});
}

// A copy lands either at once or at its wait, as the seed decides. Landing only late would hide a
// buffer that is overwritten too early, landing only at once a missing wait.
void cp_async(void* shared, const void* global, int bytes, int source_bytes) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async of %d bytes", bytes);
  if (source_bytes < 0 || source_bytes > bytes) fail("cp.async: %d source bytes", source_bytes);
  const auto size = static_cast<size_t>(bytes);
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % size != 0)
    fail("cp.async of %d bytes: %p or %p is not aligned to them", bytes, shared, global);
  check_shared(shared, size, "cp.async");
  const void* code = __builtin_return_address(0);
  const AsyncCopy copy{shared, global, size, static_cast<size_t>(source_bytes), code, coin()};
  if (copy.source_bytes > 0) track_read(global, copy.source_bytes, code);
  track_pending_write(shared, size, code);
  if (copy.landed) land(copy);
  current_thread->open_group.push_back(copy);
}

void cp_async_commit() {
  Thread& self = *current_thread;
  self.committed_groups.push_back(std::move(self.open_group));
  self.open_group.clear();
}

void cp_async_wait(int groups) {
  auto& committed = current_thread->committed_groups;
  const auto keep = static_cast<size_t>(groups);
  if (committed.size() <= keep) return;
  const auto end = committed.end() - static_cast<std::ptrdiff_t>(keep);
  for (auto group = committed.begin(); group != end; ++group)
    for (const AsyncCopy& copy : *group) {
      if (copy.source_bytes > 0) track_read(copy.source, copy.source_bytes, copy.code);
      track_write(copy.destination, copy.bytes, copy.code);
      if (!copy.landed) land(copy);
    }
  committed.erase(committed.begin(), end);
}

}  // namespace cudasim
