// Device memory, pinned host memory, and who may touch which of them when.
//
// Device memory is readable and writable only while an operation of a stream runs: any other access
// (host code that dereferences a device pointer) faults and is reported. Each allocation ends at a
// page that faults, up to the alignment; the bytes between are checked for overwriting. New memory
// is filled with 0xFF (NaN in every floating-point type). Freed addresses fault and are not reused.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cudasim {

enum class Space : uint8_t { device, pinned };

struct Allocation {
  char* base;
  size_t bytes;
  int number;  // in the order of allocation, for reports
  Space space;
  bool live;
};

// Null when the simulated device (CUDASIM_MEMORY_MB, default 4096) has too little memory left.
char* allocate(Space space, size_t bytes, size_t alignment = 256);
bool release(Space space, void* base);  // false: not the base of a live allocation
size_t device_bytes_total();
size_t device_bytes_used();

// The allocation, live or freed, that the address lies in; null if none.
const Allocation* find_allocation(const void* address);
bool is_device_address(const void* address);  // in the range of device addresses, allocated or not

// Host memory that the program registered (cudaHostRegister).
bool register_host(void* base, size_t bytes);
bool unregister_host(void* base);
bool is_pinned(const void* address, size_t bytes);

// Fails unless [address, address + bytes) lies in one live allocation of device memory.
void check_device_range(const void* address, size_t bytes, const char* user);
// Reports bytes written between the end of an allocation and its page's end.
void check_slack();

// Device memory is open from the first open_device_memory() until close_device_memory().
void open_device_memory();
void close_device_memory();

// [device_base(), device_base() + ADDRESS_BYTES) is the range of device addresses, followed by as
// many of pinned memory.
constexpr size_t ADDRESS_BYTES = size_t(256) << 30;
char* device_base();
bool in_arena(const void* address);  // device or pinned

// For reports: "allocation #3 of 4096 bytes (device), byte 128".
const char* describe_address(const void* address);

}  // namespace cudasim
