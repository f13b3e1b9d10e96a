// Fibers: stacks of their own that one OS thread switches between.
#pragma once

#include <cstddef>

namespace cudasim {

struct Fiber {
  void* stack_pointer = nullptr;  // where it continues; null before its first run
  char* stack = nullptr;          // lowest usable byte, null until it is started
  size_t stack_bytes = 0;
  void* sanitizer_stack = nullptr;  // AddressSanitizer's fake stack of a suspended fiber
};

// Gives `fiber` a stack from the pool on which `entry` runs at the first switch to it. `entry` must
// not return: it ends by leave_fiber().
void start_fiber(Fiber& fiber, void (*entry)());
// First statement of each entry function. Fills in `main_fiber`'s stack where a sanitizer wants it.
void enter_fiber(Fiber& main_fiber);
// Suspends `from` (the running fiber) and continues `to`.
void switch_fiber(Fiber& from, Fiber& to);
// Ends the running fiber: its stack returns to the pool, `to` continues.
[[noreturn]] void leave_fiber(Fiber& from, Fiber& to);

}  // namespace cudasim
