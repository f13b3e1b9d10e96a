// The functions that gcc's -fsanitize=thread calls before each access, linked instead of libtsan.
// Linking this file is what turns the tracker on.
#include <cstddef>

#include "tracker.h"

namespace {
[[maybe_unused]] const bool enabled = (cudasim::tracker_enabled = true);
}

#define HOOKS(bytes)                                                   \
  void __tsan_read##bytes(void* address) {                             \
    cudasim::track_read(address, bytes, __builtin_return_address(0));  \
  }                                                                    \
  void __tsan_write##bytes(void* address) {                            \
    cudasim::track_write(address, bytes, __builtin_return_address(0)); \
  }                                                                    \
  void __tsan_unaligned_read##bytes(void* address) {                   \
    cudasim::track_read(address, bytes, __builtin_return_address(0));  \
  }                                                                    \
  void __tsan_unaligned_write##bytes(void* address) {                  \
    cudasim::track_write(address, bytes, __builtin_return_address(0)); \
  }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* address, size_t bytes) {
  cudasim::track_read(address, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  cudasim::track_write(address, bytes, __builtin_return_address(0));
}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
// Host code: guards of function-local static objects, reference counts.
unsigned char __tsan_atomic8_load(const volatile unsigned char* address, int order) {
  (void)order;
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
int __tsan_atomic32_fetch_add(volatile int* address, int value, int order) {
  (void)order;
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
}
