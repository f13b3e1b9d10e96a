#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <vector>

#include "report.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef __x86_64__
#error "cudasim switches fibers in x86-64 assembly; add switch_stack for this processor"
#endif

// void switch_stack(void** save, void* to): saves the callee-saved registers of the System V ABI
// and the stack pointer in *save, continues at `to`. Ends in pop + jmp: a `ret` to another stack
// is mispredicted every time. The floating-point control words are not changed by kernels.
asm(R"(
.text
.globl cudasim_switch_stack
.type cudasim_switch_stack, @function
cudasim_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size cudasim_switch_stack, .-cudasim_switch_stack
)");
extern "C" void cudasim_switch_stack(void** save, void* to);

namespace cudasim {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK_BYTES = 256 << 10;  // red zones around every local variable
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr size_t GUARD_BYTES = 4096;
constexpr int SAVED_REGISTERS = 6;

std::vector<char*> pool;

char* take_stack() {
  if (!pool.empty()) {
    char* stack = pool.back();
    pool.pop_back();
    return stack;
  }
  void* map = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) fail("no memory for the stack of one more thread of a block");
  mprotect(map, GUARD_BYTES, PROT_NONE);
  return static_cast<char*>(map) + GUARD_BYTES;
}

}  // namespace

void start_fiber(Fiber& fiber, void (*entry)()) {
  fiber.stack = take_stack();
  fiber.stack_bytes = STACK_BYTES;
  fiber.sanitizer_stack = nullptr;
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(fiber.stack, STACK_BYTES);
#endif
  void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES);
  *--top = nullptr;  // keeps the stack 16-byte aligned at entry, as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < SAVED_REGISTERS; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void enter_fiber([[maybe_unused]] Fiber& main_fiber) {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!main_fiber.stack) {
    main_fiber.stack = static_cast<char*>(const_cast<void*>(bottom));
    main_fiber.stack_bytes = bytes;
  }
#endif
}

void switch_fiber(Fiber& from, Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&from.sanitizer_stack, to.stack, to.stack_bytes);
#endif
  cudasim_switch_stack(&from.stack_pointer, to.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(from.sanitizer_stack, nullptr, nullptr);
#endif
}

void leave_fiber(Fiber& from, Fiber& to) {
  pool.push_back(from.stack);
  from.stack = nullptr;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(nullptr, to.stack, to.stack_bytes);
#endif
  void* discarded;
  cudasim_switch_stack(&discarded, to.stack_pointer);
  __builtin_unreachable();
}

}  // namespace cudasim
