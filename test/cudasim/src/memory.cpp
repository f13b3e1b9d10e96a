#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "block.h"
#include "report.h"
#include "scheduler.h"
#include "tracker.h"

namespace cudasim {
namespace {

constexpr size_t PAGE = 4096;
constexpr unsigned char POISON = 0xFF;

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void on_fault(int number, siginfo_t* info, void*);

class Memory {
 public:
  Memory() {
    base_ = static_cast<char*>(mmap(nullptr, 2 * ADDRESS_BYTES, PROT_NONE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED) fail("cannot reserve the address range of device memory");
    // Pages behind the end of an empty file fault whatever their protection is.
    empty_file_ = memfd_create("cudasim-guard", 0);
    if (empty_file_ < 0) fail("memfd_create failed");
    total_ = static_cast<size_t>(environment("CUDASIM_MEMORY_MB", 4096)) << 20;
    guarded_ = environment("CUDASIM_GUARD", 1) != 0;
    top_[0] = base_ + PAGE;
    top_[1] = base_ + ADDRESS_BYTES + PAGE;
    install_fault_handler();
  }

  char* allocate(Space space, size_t bytes, size_t alignment) {
    if (space == Space::device && used_ + bytes > total_) return nullptr;
    const size_t span = round_up(bytes, std::max(PAGE, alignment));
    char*& top = top_[space == Space::pinned];
    char* map = base_ + round_up(static_cast<size_t>(top - base_), std::max(PAGE, alignment));
    const char* limit = base_ + ADDRESS_BYTES * (space == Space::pinned ? 2 : 1);
    if (map + span + PAGE > limit) fail("the range of device addresses is used up");
    char* result = map + (span - bytes) / alignment * alignment;
    if (mmap(map, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
        map)
      fail("no memory for an allocation of %zu bytes", bytes);
    guard(map + span, PAGE);
    std::memset(map, POISON, span);
    top = map + span + PAGE;
    if (space == Space::device) {
      used_ += bytes;
      if (!open_) mprotect(map, span, PROT_NONE);
    }
    allocations_[result] = {result, bytes, ++count_, space, true};
    return result;
  }

  bool release(Space space, void* base) {
    auto found = allocations_.find(static_cast<char*>(base));
    if (found == allocations_.end() || !found->second.live || found->second.space != space)
      return false;
    Allocation& allocation = found->second;
    allocation.live = false;
    char* map = base_ + static_cast<size_t>(allocation.base - base_) / PAGE * PAGE;
    guard(map, round_up(static_cast<size_t>(allocation.base + allocation.bytes - map), PAGE));
    if (space == Space::device) used_ -= allocation.bytes;
    return true;
  }

  const Allocation* find(const void* address) const {
    auto next = allocations_.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
    if (next == allocations_.begin()) return nullptr;
    const Allocation& candidate = std::prev(next)->second;
    const auto* byte = static_cast<const char*>(address);
    return byte < candidate.base + candidate.bytes ? &candidate : nullptr;
  }

  // The last allocation that begins at or before the address.
  const Allocation* preceding(const void* address) const {
    auto next = allocations_.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
    return next == allocations_.begin() ? nullptr : &std::prev(next)->second;
  }

  void open() {
    if (open_) return;
    open_ = true;
    protect(PROT_READ | PROT_WRITE);
  }

  void close() {
    if (!open_ || !guarded_) return;
    open_ = false;
    protect(PROT_NONE);
  }

  void check_slack() {
    const bool was_open = open_;
    open();
    for (const auto& [base, allocation] : allocations_) {
      if (!allocation.live) continue;
      const auto* end = reinterpret_cast<const unsigned char*>(base + allocation.bytes);
      const auto* page_end = reinterpret_cast<const unsigned char*>(
          base_ + round_up(static_cast<size_t>(base + allocation.bytes - base_), PAGE));
      for (const auto* byte = end; byte < page_end; ++byte)
        if (*byte != POISON)
          fail(
              "write past the end of allocation #%d of %zu bytes: byte %zu behind its end was "
              "changed by an operation that has run since the last synchronisation",
              allocation.number, allocation.bytes, static_cast<size_t>(byte - end));
    }
    if (!was_open) close();
  }

  char* base() const { return base_; }
  size_t used() const { return used_; }
  size_t total() const { return total_; }
  std::map<char*, size_t>& registered() { return registered_; }

 private:
  void protect(int protection) {
    const size_t bytes = static_cast<size_t>(top_[0] - base_);
    if (mprotect(base_, bytes, protection) != 0) fail("mprotect of device memory failed");
  }

  void guard(char* map, size_t bytes) {
    if (mmap(map, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, empty_file_, 0) != map)
      fail("mmap of a guard page failed");
  }

  static void install_fault_handler() {
    static char stack[64 << 10];
    stack_t alternate{};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
  }

  char* base_ = nullptr;
  char* top_[2] = {};  // next free address of device and pinned memory
  int empty_file_ = -1;
  size_t total_ = 0, used_ = 0;
  int count_ = 0;
  bool open_ = false, guarded_ = true;
  std::map<char*, Allocation> allocations_;
  std::map<char*, size_t> registered_;
};

Memory& memory() {
  static Memory* instance = new Memory;  // outlives every destructor that frees device memory
  return *instance;
}

void on_fault(int number, siginfo_t* info, void* context) {
  const void* address = info->si_addr;
  const auto* registers = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
  const std::string code = describe_code(reinterpret_cast<const void*>(registers[REG_RIP]));
  if (!in_arena(address)) {
    if (current_thread)
      fail("fault by %s: a pointer to no memory, or a vector that is not aligned to its size",
           code.c_str());
    return;  // the default action follows: the handler is reset
  }
  const Allocation* allocation = memory().preceding(address);
  const bool inside = allocation && address < allocation->base + allocation->bytes;
  if (inside && !allocation->live)
    fail("use of freed memory by %s: %s", code.c_str(), describe_address(address));
  if (number == SIGSEGV && !operation_running())
    fail("host code %s dereferences device memory: %s", code.c_str(), describe_address(address));
  fail("access outside every allocation by %s: %s", code.c_str(), describe_address(address));
}

}  // namespace

char* allocate(Space space, size_t bytes, size_t alignment) {
  char* result = memory().allocate(space, bytes, alignment);
  if (result) tracker_allocated(result, bytes, space == Space::pinned);
  return result;
}

bool release(Space space, void* base) {
  const Allocation* allocation = find_allocation(base);
  const size_t bytes = allocation ? allocation->bytes : 0;
  if (!memory().release(space, base)) return false;
  tracker_released(static_cast<char*>(base), bytes);
  return true;
}

size_t device_bytes_total() { return memory().total(); }
size_t device_bytes_used() { return memory().used(); }
const Allocation* find_allocation(const void* address) { return memory().find(address); }
char* device_base() { return memory().base(); }

bool is_device_address(const void* address) {
  const char* base = memory().base();
  return address >= base && address < base + ADDRESS_BYTES;
}

bool in_arena(const void* address) {
  const char* base = memory().base();
  return address >= base && address < base + 2 * ADDRESS_BYTES;
}

bool register_host(void* base, size_t bytes) {
  return memory().registered().emplace(static_cast<char*>(base), bytes).second;
}

bool unregister_host(void* base) {
  return memory().registered().erase(static_cast<char*>(base)) == 1;
}

bool is_pinned(const void* address, size_t bytes) {
  const auto* begin = static_cast<const char*>(address);
  const Allocation* allocation = memory().find(address);
  if (allocation)
    return allocation->space == Space::pinned && allocation->live &&
           begin + bytes <= allocation->base + allocation->bytes;
  const auto& registered = memory().registered();
  auto next = registered.upper_bound(const_cast<char*>(begin));
  if (next == registered.begin()) return false;
  --next;
  return begin + bytes <= next->first + next->second;
}

void check_device_range(const void* address, size_t bytes, const char* user) {
  if (bytes == 0) return;
  const Allocation* allocation = memory().find(address);
  if (!allocation || allocation->space != Space::device)
    fail("%s: %p is not device memory (%s)", user, address, describe_address(address));
  if (!allocation->live) fail("%s: use of freed memory: %s", user, describe_address(address));
  const size_t left =
      static_cast<size_t>(allocation->base + allocation->bytes - static_cast<const char*>(address));
  if (bytes > left)
    fail("%s: %zu bytes, but only %zu are left in %s", user, bytes, left,
         describe_address(address));
}

void check_slack() { memory().check_slack(); }
void open_device_memory() { memory().open(); }
void close_device_memory() { memory().close(); }

const char* describe_address(const void* address) {
  static char text[160];
  const Allocation* allocation = memory().preceding(address);
  if (!in_arena(address) || !allocation) {
    std::snprintf(text, sizeof text, "address %p, in no allocation", address);
    return text;
  }
  const auto offset = static_cast<size_t>(static_cast<const char*>(address) - allocation->base);
  std::snprintf(text, sizeof text, "byte %zu of allocation #%d, which has %zu bytes (%s%s)", offset,
                allocation->number, allocation->bytes,
                allocation->space == Space::device ? "device" : "pinned",
                allocation->live ? "" : ", freed");
  return text;
}

}  // namespace cudasim
