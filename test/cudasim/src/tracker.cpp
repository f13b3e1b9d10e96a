#include "tracker.h"

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "block.h"
#include "memory.h"
#include "report.h"
#include "scheduler.h"

namespace cudasim {

bool tracker_enabled = false;

namespace {

enum Flag : uint8_t { ATOMIC = 1, PENDING = 2 };

// One access to a cell. operation 0: none.
struct Access {
  uint32_t operation, block, code;  // code: offset in the program
  uint16_t barriers, warp_syncs;
  uint16_t thread;
  uint8_t flags;
  uint8_t halves;  // bytes of the cell touched: bit 0 and bit 1
};

// Shadow of CELL_BYTES bytes; all zero: never written. Two readers are kept: if any reader is
// unordered with a later write, one of them is, unless both are of the writing thread's own past.
struct Cell {
  Access write;
  Access reads[2];
};
constexpr size_t CELL_BYTES = 2;  // the smallest type that kernels share between threads

// Values of Cell::write.operation that are no operation.
constexpr uint32_t UNWRITTEN = 0;
constexpr uint32_t HOST = 0xFFFFFFFE;         // written before any operation: pinned memory
constexpr uint32_t UNALLOCATED = 0xFFFFFFFF;  // rest of an allocation's last page

// Device memory is shadowed in two levels: as long as every access was to a whole chunk (memsets,
// copies, products), one cell stands for all of it.
struct Chunk {
  Cell whole;
  bool live;      // part of an allocation
  bool expanded;  // the chunk's own cells are valid
};
constexpr size_t CHUNK_BYTES = 4096;
constexpr size_t CHUNK_CELLS = CHUNK_BYTES / CELL_BYTES;

template <class T>
T* reserve_zeroed(size_t count) {
  void* map = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) fail("cannot reserve the tracker's shadow memory");
  return static_cast<T*>(map);
}

struct Image {
  const char *begin = nullptr, *end = nullptr;
};

// The loaded segments of the program: constants, global variables, code.
Image find_image() {
  Image image;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto* result = static_cast<Image*>(data);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_LOAD) continue;
          const auto* begin = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
          if (!result->begin || begin < result->begin) result->begin = begin;
          result->end = std::max(result->end, begin + header.p_memsz);
        }
        return 1;  // the program itself comes first
      },
      &image);
  return image;
}

class Tracker {
 public:
  Tracker()
      : image_(find_image()),
        shadow_(reserve_zeroed<Cell>(2 * ADDRESS_BYTES / CELL_BYTES)),
        chunks_(reserve_zeroed<Chunk>(2 * ADDRESS_BYTES / CHUNK_BYTES)),
        base_(device_base()) {}

  // Addresses are not used again, so the shadow of [base, base + bytes) is untouched.
  void allocated(char* base, size_t bytes, bool initialised) {
    const auto begin = static_cast<size_t>(base - base_), end = begin + bytes;
    for (size_t chunk = begin / CHUNK_BYTES; chunk * CHUNK_BYTES < end; ++chunk) {
      chunks_[chunk].live = true;
      if (initialised) chunks_[chunk].whole.write.operation = HOST;
      const size_t first = std::max(begin, chunk * CHUNK_BYTES) - chunk * CHUNK_BYTES;
      const size_t last = std::min(end - chunk * CHUNK_BYTES, CHUNK_BYTES);
      if (first == 0 && last == CHUNK_BYTES) continue;
      Cell* cells = expand(chunk);  // marks what does not belong to the allocation
      for (size_t i = 0; i < CHUNK_CELLS; ++i)
        if (i < first / CELL_BYTES || i >= (last + CELL_BYTES - 1) / CELL_BYTES)
          cells[i].write.operation = UNALLOCATED;
    }
  }

  // Gives the shadow's memory back. An access to freed memory faults by itself.
  void released(char* base, size_t bytes) {
    const auto begin = static_cast<size_t>(base - base_);
    const size_t first = begin / CHUNK_BYTES,
                 last = (begin + bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    for (size_t chunk = first; chunk < last; ++chunk) chunks_[chunk] = Chunk{};
    // Neighbouring chunks may share a page of the shadow: only whole pages go.
    constexpr uintptr_t PAGE = 4096;
    const auto from = reinterpret_cast<uintptr_t>(shadow_ + first * CHUNK_CELLS);
    const auto to = reinterpret_cast<uintptr_t>(shadow_ + last * CHUNK_CELLS);
    const uintptr_t page = (from + PAGE - 1) / PAGE * PAGE;
    if (to / PAGE * PAGE > page)
      madvise(reinterpret_cast<void*>(page), to / PAGE * PAGE - page, MADV_DONTNEED);
  }

  void access(const void* address, size_t bytes, bool write, uint8_t flags, const void* code);

 private:
  struct Context {
    const char* address;
    size_t bytes;
    bool write, shared;
    Access self;
  };

  // How many cells an access touches.
  static size_t cells(const char* base, size_t bytes) {
    const size_t first = reinterpret_cast<uintptr_t>(base) % CELL_BYTES;
    return (first + bytes + CELL_BYTES - 1) / CELL_BYTES;
  }

  // The chunk's cells.
  Cell* expand(size_t chunk) {
    Cell* cells = shadow_ + chunk * CHUNK_CELLS;
    if (!chunks_[chunk].expanded) std::fill_n(cells, CHUNK_CELLS, chunks_[chunk].whole);
    chunks_[chunk].expanded = true;
    return cells;
  }

  Access self(uint8_t flags, const void* code) const {
    Access access{};
    access.operation = running_operation_id();
    if (code) access.code = static_cast<uint32_t>(static_cast<const char*>(code) - image_.begin);
    access.flags = flags;
    access.halves = 3;
    if (const Thread* thread = current_thread) {
      access.block = current_block();
      access.thread = static_cast<uint16_t>(thread->linear);
      access.barriers = thread->barriers;
      access.warp_syncs = thread->warp_syncs;
    }
    return access;
  }

  static bool ordered(const Access& earlier, const Access& self) {
    if (earlier.operation == UNWRITTEN || earlier.operation >= HOST) return true;
    if (earlier.operation != self.operation) return ordered_before_running(earlier.operation);
    if (!current_thread) return true;
    if (earlier.block != self.block) return false;
    return earlier.thread == self.thread || earlier.barriers < self.barriers ||
           (earlier.thread / 32 == self.thread / 32 && earlier.warp_syncs < self.warp_syncs);
  }

  void check_foreign(const char* address, bool write, const void* code) const;
  void visit_device(const Context& context);
  void visit_shared(const Context& context);
  static bool freed(const Context& context) {
    const Allocation* allocation = find_allocation(context.address);
    return allocation && !allocation->live;
  }
  static void begin_life(Cell& cell, const Access& self);
  void visit(Cell& cell, const Context& context);
  [[noreturn]] void report(const char* what, const Context& context, const Access* earlier,
                           bool earlier_write) const;
  std::string place(const Access& access) const;

  Image image_;
  Cell* shadow_;
  Chunk* chunks_;
  char* base_;
  std::vector<Cell> shared_shadow_;
};

Tracker& tracker() {
  static Tracker* instance = new Tracker;
  return *instance;
}

std::string Tracker::place(const Access& access) const {
  const OperationRecord& record = operation_record(access.operation);
  std::string text = "\"" + record.name + "\" (operation " + std::to_string(record.sequence) +
                     " of lane " + std::to_string(record.lane) + ")";
  if (access.code)
    text += ", " + describe_code(image_.begin + access.code) + ", block " +
            std::to_string(access.block) + " thread " + std::to_string(access.thread);
  return text;
}

void Tracker::report(const char* what, const Context& context, const Access* earlier,
                     bool earlier_write) const {
  std::string text = std::string(what) + "\n  " +
                     (context.self.flags & ATOMIC ? "atomic update"
                      : context.write             ? "write"
                                                  : "read") +
                     " of " + std::to_string(context.bytes) + " bytes by " + place(context.self);
  if (earlier)
    text += std::string("\n  earlier ") +
            (earlier->flags & ATOMIC ? "atomic update"
             : earlier_write         ? "write"
                                     : "read") +
            " by " + place(*earlier);
  const auto* address = static_cast<const char*>(context.address);
  if (context.shared)
    text +=
        "\n  shared memory, byte " +
        std::to_string(address >= shared_range().dynamic_begin
                           ? address - shared_range().dynamic_begin
                           : address - shared_range().begin) +
        (address >= shared_range().dynamic_begin ? " of the dynamic part" : " of the static part");
  else
    text += std::string("\n  ") + describe_address(address);
  fail("%s", text.c_str());
}

// A kernel's access that is neither to device, pinned nor shared memory: allowed are its own stack,
// the program's constants and variables, and the launch's arguments.
void Tracker::check_foreign(const char* address, bool write, const void* code) const {
  const Thread* thread = current_thread;
  if (!thread) return;
  if (address >= thread->stack && address < thread->stack + thread->stack_bytes) return;
  if (address >= image_.begin && address < image_.end) return;
  const Launch* launch = current_launch();
  const auto* arguments = static_cast<const char*>(launch->arguments);
  if (!write && address >= arguments && address < arguments + launch->argument_bytes) return;
  fail("kernel %s host memory at %p: %s", write ? "writes" : "reads",
       static_cast<const void*>(address), describe_code(code).c_str());
}

void Tracker::visit(Cell& cell, const Context& context) {
  const Access& self = context.self;
  const bool atomic = self.flags & ATOMIC;
  const Access& last = cell.write;
  if (last.operation == UNALLOCATED)
    report("access outside every allocation", context, nullptr, false);
  if (last.operation == self.operation && last.flags & PENDING && current_thread &&
      last.block == self.block &&
      (self.flags & PENDING || !context.write || last.thread != self.thread))
    report("shared memory is touched while a cp.async to it is in flight", context, &last, true);
  const bool reads = !context.write || atomic;
  if (reads && last.operation == UNWRITTEN)
    report("read of uninitialised memory", context, nullptr, false);
  const bool both_atomic = atomic && last.flags & ATOMIC;
  if (self.halves & last.halves && !both_atomic && !ordered(last, self))
    report(context.write ? "race: write after unordered write" : "race: read after unordered write",
           context, &last, true);
  if (context.write) {
    for (const Access& read : cell.reads)
      if (self.halves & read.halves && !ordered(read, self))
        report("race: write after unordered read", context, &read, false);
    cell.write = self;
    return;
  }
  for (Access& read : cell.reads)
    if (read.operation == 0 || ordered(read, self)) {
      read = self;
      return;
    }
  cell.reads[random_below(2)] = self;
}

void Tracker::access(const void* pointer, size_t bytes, bool write, uint8_t flags,
                     const void* code) {
  const auto* address = static_cast<const char*>(pointer);
  const bool device = address >= base_ && address < base_ + 2 * ADDRESS_BYTES;
  const bool shared =
      !device && current_thread && address >= shared_range().begin && address < shared_range().end;
  if (!device && !shared) {
    check_foreign(address, write, code);
    return;
  }
  Context context{address, bytes, write, shared, self(flags, code)};
  if (bytes == 1)
    context.self.halves = static_cast<uint8_t>(1 << (reinterpret_cast<uintptr_t>(address) & 1));
  if (shared)
    visit_shared(context);
  else
    visit_device(context);
}

void Tracker::visit_device(const Context& context) {
  auto offset = static_cast<size_t>(context.address - base_);
  for (size_t left = context.bytes; left > 0;) {
    const size_t chunk = offset / CHUNK_BYTES, first = offset % CHUNK_BYTES;
    const size_t bytes = std::min(left, CHUNK_BYTES - first);
    if (!chunks_[chunk].live)
      report(freed(context) ? "use of freed memory" : "access outside every allocation", context,
             nullptr, false);
    if (bytes == CHUNK_BYTES && !chunks_[chunk].expanded) {
      visit(chunks_[chunk].whole, context);
    } else {
      Cell* cell = expand(chunk) + first / CELL_BYTES;
      for (size_t i = 0; i < cells(context.address, bytes); ++i) visit(cell[i], context);
      if (bytes == CHUNK_BYTES && context.write) {  // one writer of all: as before the first access
        chunks_[chunk].whole = cell[0];
        chunks_[chunk].whole.reads[0] = chunks_[chunk].whole.reads[1] = Access{};
        chunks_[chunk].expanded = false;
      }
    }
    offset += bytes;
    left -= bytes;
  }
}

void Tracker::visit_shared(const Context& context) {
  check_shared(context.address, context.bytes, context.write ? "write" : "read");
  const SharedRange& range = shared_range();
  const auto total = static_cast<size_t>(range.end - range.begin) / CELL_BYTES + 1;
  if (shared_shadow_.size() < total) shared_shadow_.resize(total);
  Cell* cell = &shared_shadow_[static_cast<size_t>(context.address - range.begin) / CELL_BYTES];
  for (Cell* end = cell + cells(context.address, context.bytes); cell < end; ++cell) {
    begin_life(*cell, context.self);
    visit(*cell, context);
  }
}

// Shared memory belongs to one block of one operation: what the cell holds of another is dropped.
// An unwritten cell notes its operation where a written one has the code.
void Tracker::begin_life(Cell& cell, const Access& self) {
  const Access& last = cell.write;
  const uint32_t operation = last.operation == UNWRITTEN ? last.code : last.operation;
  if (operation == self.operation && last.block == self.block) return;
  cell = Cell{};
  cell.write.operation = UNWRITTEN;
  cell.write.code = self.operation;
  cell.write.block = self.block;
}

// Kernels are also instrumented where they run on the host (their launch functions).
bool relevant() { return tracker_enabled && operation_running(); }

}  // namespace

void track_read(const void* address, size_t bytes, const void* code) {
  if (relevant()) tracker().access(address, bytes, false, 0, code);
}

void track_write(void* address, size_t bytes, const void* code) {
  if (relevant()) tracker().access(address, bytes, true, 0, code);
}

void track_atomic(void* address, size_t bytes, const void* code) {
  if (relevant()) tracker().access(address, bytes, true, ATOMIC, code);
}

void track_pending_write(void* address, size_t bytes, const void* code) {
  if (relevant()) tracker().access(address, bytes, true, PENDING, code);
}

void track_operation_read(const void* address, size_t bytes) {
  if (relevant() && in_arena(address)) tracker().access(address, bytes, false, 0, nullptr);
}

void track_operation_write(void* address, size_t bytes) {
  if (relevant() && in_arena(address)) tracker().access(address, bytes, true, 0, nullptr);
}

void tracker_allocated(char* base, size_t bytes, bool initialised) {
  if (tracker_enabled) tracker().allocated(base, bytes, initialised);
}

void tracker_released(char* base, size_t bytes) {
  if (tracker_enabled) tracker().released(base, bytes);
}

}  // namespace cudasim
