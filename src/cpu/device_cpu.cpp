#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "cpu/backend_cpu.h"
#include "cpu/ops_cpu.h"
#include "device/host_memory.h"

namespace qshard {
namespace {

constexpr size_t kCacheLine = 64, kHugePage = size_t{2} << 20;

// Huge pages for all but what would fill one in part, which would take memory that nobody uses: of
// Qwen3-0.6B on 2 ranks, 2 of each 33 MB. Hints, which may be refused.
void advise_huge_pages(char* data, size_t bytes) {
  const size_t whole = bytes / kHugePage * kHugePage;
  madvise(data, whole, MADV_HUGEPAGE);
  if (bytes > whole) madvise(data + whole, bytes - whole, MADV_NOHUGEPAGE);
}

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(int threads) : threads_(threads) {}

  std::string name() const override;

  void* allocate(size_t bytes) override {
    if (bytes == 0) return nullptr;
    const size_t alignment = bytes >= kHugePage ? kHugePage : kCacheLine;
    const size_t rounded = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    void* data = nullptr;
    if (rounded < bytes || posix_memalign(&data, alignment, rounded) != 0) return nullptr;
    if (alignment == kHugePage) advise_huge_pages(static_cast<char*>(data), rounded);
    std::memset(data, 0, rounded);
    return data;
  }

  void release(void* data, size_t) noexcept override { std::free(data); }
  int64_t bytes_available() const override { return host_bytes_available(); }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes) std::memmove(to, from, bytes);
  }
  void zero(void* data, size_t bytes) override {
    if (bytes) std::memset(data, 0, bytes);
  }
  void download_start(void* to, const void* from, size_t bytes) override;
  void download_wait() override;
  void order(Queue first, Queue then) override {
    if (first == Queue::downloads && then == Queue::operators) download_wait();
  }

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  int threads_;
  std::mutex mutex_;
  std::condition_variable copied_;
  std::vector<Copy> copies_;  // that nobody has begun
  int begun_ = 0;             // that are being made
};

// Made by those who wait for them, together: the thread of a save beside the operators, if a core
// is free, and what is then left, the one that wants to change the source.
void CpuDevice::download_start(void* to, const void* from, size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (size_t at = 0; at < bytes; at += kHugePage)
    copies_.push_back({static_cast<std::byte*>(to) + at, static_cast<const std::byte*>(from) + at,
                       std::min(kHugePage, bytes - at)});
}

void CpuDevice::download_wait() {
  std::unique_lock lock(mutex_);
  while (!copies_.empty()) {
    const Copy next = copies_.back();
    copies_.pop_back();
    ++begun_;
    lock.unlock();
    copy(next.to, next.from, next.bytes);
    lock.lock();
    --begun_;
  }
  copied_.notify_all();
  copied_.wait(lock, [this] { return copies_.empty() && begun_ == 0; });
}

std::string CpuDevice::name() const {
#if defined(__AVX512BF16__)
  constexpr const char* isa = "AVX-512, avx512_bf16";
#elif defined(__AVX512F__)
  constexpr const char* isa = "AVX-512";
#elif defined(__AVX2__)
  constexpr const char* isa = "AVX2";
#else
  constexpr const char* isa = "baseline x86-64";
#endif
  return fmt::format("cpu ({}, {}, {} thread{})", isa, cpu::gemm_library(), threads_,
                     threads_ == 1 ? "" : "s");
}

// The compiler may have used any instruction set of its target, anywhere: better a message here
// than an illegal instruction later. __builtin_cpu_supports takes literals only, hence a macro.
void check_instruction_sets() {
#define QS_NEEDS(feature)                                                                        \
  QS_CHECK(__builtin_cpu_supports(feature),                                                      \
           "this program was compiled for a CPU with {} and this one has none: compile on this " \
           "kind of node, or with make ARCH=x86-64-v3",                                          \
           feature)
#ifdef __AVX2__
  QS_NEEDS("avx2");
#endif
#ifdef __FMA__
  QS_NEEDS("fma");
#endif
#ifdef __AVX512F__
  QS_NEEDS("avx512f");
#endif
#ifdef __AVX512BW__
  QS_NEEDS("avx512bw");
#endif
#ifdef __AVX512VL__
  QS_NEEDS("avx512vl");
#endif
#ifdef __AVX512DQ__
  QS_NEEDS("avx512dq");
#endif
#ifdef __AVX512BF16__
  QS_NEEDS("avx512bf16");
#endif
#undef QS_NEEDS
}

}  // namespace

Backend make_cpu_backend(int threads) {
  check_instruction_sets();
  QS_CHECK(threads >= 1, "a CPU backend needs at least 1 thread, {} asked for", threads);
  omp_set_num_threads(threads);  // before OpenMP starts any: its default is every core
  Backend backend;
  backend.device = std::make_unique<CpuDevice>(threads);
  backend.ops = std::make_unique<cpu::CpuOps>(*backend.device, threads);
  return backend;
}

}  // namespace qshard
