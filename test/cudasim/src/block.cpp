#include "block.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <string>

#include "cudasim/device.h"
#include "report.h"
#include "shared_region.h"
#include "tracker.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cudasim {

Thread* current_thread = nullptr;

namespace {

constexpr int WARP = 32;
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;
constexpr unsigned char POISON = 0xFF;

// Which ready thread runs next. Two policies, drawn for each block: any ready thread, or one of a
// favourite warp until none of it is ready. The first alone keeps the warps in step, which hides
// writes that come too early.
class ReadyThreads {
 public:
  void reset(int threads) {
    by_warp_.assign(static_cast<size_t>((threads + WARP - 1) / WARP), {});
    stay_in_warp_ = coin();
    favourite_ = -1;
    count_ = 0;
  }

  void push(int thread) {
    by_warp_[static_cast<size_t>(thread / WARP)].push_back(thread);
    ++count_;
  }

  int pop() {
    if (!stay_in_warp_ || favourite_ < 0 || warp(favourite_).empty()) choose_warp();
    std::vector<int>& threads = warp(favourite_);
    const size_t index = random_below(static_cast<uint32_t>(threads.size()));
    const int thread = threads[index];
    threads[index] = threads.back();
    threads.pop_back();
    --count_;
    return thread;
  }

  bool empty() const { return count_ == 0; }

 private:
  std::vector<int>& warp(int index) { return by_warp_[static_cast<size_t>(index)]; }

  void choose_warp() {  // weighted by the number of ready lanes
    uint32_t skip = random_below(static_cast<uint32_t>(count_));
    for (favourite_ = 0; skip >= warp(favourite_).size(); ++favourite_)
      skip -= static_cast<uint32_t>(warp(favourite_).size());
  }

  std::vector<std::vector<int>> by_warp_;
  bool stay_in_warp_ = false;
  int favourite_ = -1;
  size_t count_ = 0;
};

struct Warp {
  uint32_t alive = 0;    // lanes that have not exited
  uint32_t arrived = 0;  // lanes that wait in the collective
  uint32_t mask = 0;     // lanes that the collective names
  void* frames[WARP] = {};
  Combine combine = nullptr;
  const char* name = nullptr;
  Site site;
};

struct Barrier {
  std::vector<int> waiting;
  const char* name = nullptr;
  Site site;
  int sum = 0;       // of the predicates handed in
  int last_sum = 0;  // of the last completed barrier
};

class BlockRunner {
 public:
  void run(const Launch& launch);

  int barrier(const char* name, int value, Site site);
  void collective(const char* name, uint32_t mask, void* frame, Combine combine, Site site);

  const Launch* launch() const { return launch_; }
  uint32_t block() const { return block_; }
  const SharedRange& shared() const { return shared_; }

 private:
  static void thread_entry();
  void live_of_a_stack();
  void begin_block(uint32_t index);
  void end_of_thread();
  void select(Thread& next);
  void switch_away();
  void complete_collective(Warp& warp, int warp_index);
  [[noreturn]] void deadlock();
  Thread& thread(int index) { return threads_[static_cast<size_t>(index)]; }

  const Launch* launch_ = nullptr;
  uint32_t block_ = 0;
  int live_ = 0;
  SharedRange shared_{};
  std::deque<Thread> threads_;  // stable addresses
  std::vector<Warp> warps_;
  Barrier barrier_;
  ReadyThreads ready_;
  Thread main_;
};

BlockRunner runner;

bool same_place(Site a, Site b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

void poison_shared(const SharedRange& shared) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(shared.dynamic_begin, shared.dynamic_capacity);
#endif
  std::memset(shared.begin, POISON, static_cast<size_t>(shared.dynamic_begin - shared.begin));
  std::memset(shared.dynamic_begin, POISON, shared.dynamic_bytes);
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(shared.dynamic_begin + shared.dynamic_bytes,
                              shared.dynamic_capacity - shared.dynamic_bytes);
#endif
}

void BlockRunner::run(const Launch& launch) {
  launch_ = &launch;
  gridDim = launch.grid;
  blockDim = launch.block;
  shared_ = shared_region(launch.dynamic_bytes);
  const uint32_t blocks = launch.grid.x * launch.grid.y * launch.grid.z;
  std::vector<uint32_t> order(blocks);
  for (uint32_t i = 0; i < blocks; ++i) {
    const uint32_t j = random_below(i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  for (uint32_t index : order) {
    begin_block(index);
    main_.stack = nullptr;
    current_thread = &main_;
    Thread& first = thread(ready_.pop());
    start_fiber(first, thread_entry);
    select(first);
    switch_fiber(main_, first);
  }
  current_thread = nullptr;
  launch_ = nullptr;
}

void BlockRunner::begin_block(uint32_t index) {
  const dim3 &grid = launch_->grid, &block = launch_->block;
  const int threads = static_cast<int>(block.x * block.y * block.z);
  block_ = index;
  blockIdx = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
  poison_shared(shared_);
  warps_.assign(static_cast<size_t>((threads + WARP - 1) / WARP), {});
  barrier_ = {};
  ready_.reset(threads);
  live_ = threads;
  while (threads_.size() < static_cast<size_t>(threads)) threads_.emplace_back();
  for (int i = 0; i < threads; ++i) {
    Thread& t = thread(i);
    const auto u = static_cast<uint32_t>(i);
    t.index = {u % block.x, u / block.x % block.y, u / block.x / block.y};
    t.linear = i;
    t.lane = i % WARP;
    t.warp = i / WARP;
    t.barriers = t.warp_syncs = 0;
    t.waits_in = nullptr;
    t.open_group.clear();
    t.committed_groups.clear();
    warps_[static_cast<size_t>(t.warp)].alive |= 1u << t.lane;
    ready_.push(i);
  }
}

void BlockRunner::thread_entry() {
  enter_fiber(runner.main_);
  runner.live_of_a_stack();
}

// Runs threads of the block to their ends, one after the other: a thread that has not begun yet
// begins on the stack of the one that has just ended.
void BlockRunner::live_of_a_stack() {
  for (;;) {
    launch_->invoke(launch_->arguments);
    end_of_thread();
    Thread& ended = *current_thread;
    if (ready_.empty()) {
      current_thread = &main_;
      leave_fiber(ended, main_);
    }
    Thread& next = thread(ready_.pop());
    select(next);
    if (next.stack) leave_fiber(ended, next);
    next.stack = ended.stack;
    next.stack_bytes = ended.stack_bytes;
    ended.stack = nullptr;
  }
}

void BlockRunner::end_of_thread() {
  Thread& ended = *current_thread;
  for (const auto& group : ended.committed_groups)
    if (!group.empty()) fail("the thread ends before it has waited for its cp.async copies");
  if (!ended.open_group.empty())
    fail("the thread ends before it has waited for its cp.async copies");
  Warp& warp = warps_[static_cast<size_t>(ended.warp)];
  warp.alive &= ~(1u << ended.lane);
  --live_;
  if (!barrier_.waiting.empty())
    fail("divergent barrier: the thread ends while %zu others wait in %s at %s:%d",
         barrier_.waiting.size(), barrier_.name, barrier_.site.file, barrier_.site.line);
  if (warp.arrived && warp.arrived == (warp.mask & warp.alive))
    complete_collective(warp, ended.warp);
  if (ready_.empty() && live_ > 0) deadlock();
}

void BlockRunner::select(Thread& next) {
  current_thread = &next;
  threadIdx = next.index;
}

void BlockRunner::switch_away() {
  if (ready_.empty()) deadlock();
  Thread& from = *current_thread;
  Thread& next = thread(ready_.pop());
  if (&next == &from) return;
  if (!next.stack) start_fiber(next, thread_entry);
  select(next);
  switch_fiber(from, next);
}

void BlockRunner::deadlock() {
  std::map<std::string, int> places;
  for (const Thread& t : threads_)
    if (t.stack && t.waits_in)
      ++places[std::string(t.waits_in) + " at " + t.waits_at.file + ":" +
               std::to_string(t.waits_at.line)];
  std::string text;
  for (const auto& [place, count] : places)
    text += "\n  " + std::to_string(count) + " threads wait in " + place;
  fail("divergent barrier or collective: no thread of the block can go on%s", text.c_str());
}

int BlockRunner::barrier(const char* name, int value, Site site) {
  Thread& self = *current_thread;
  if (barrier_.waiting.empty()) {
    barrier_.name = name;
    barrier_.site = site;
    barrier_.sum = 0;
  } else if (!same_place(site, barrier_.site)) {
    fail("divergent barrier: %s at %s:%d while %zu threads wait in %s at %s:%d", name, site.file,
         site.line, barrier_.waiting.size(), barrier_.name, barrier_.site.file, barrier_.site.line);
  }
  barrier_.sum += value;
  barrier_.waiting.push_back(self.linear);
  self.waits_in = name;
  self.waits_at = site;
  if (++self.barriers == 0) fail("more than 65535 barriers in one kernel");
  if (static_cast<int>(barrier_.waiting.size()) == live_) {
    for (int index : barrier_.waiting) {
      thread(index).waits_in = nullptr;
      ready_.push(index);
    }
    barrier_.waiting.clear();
    barrier_.last_sum = barrier_.sum;
  }
  switch_away();
  return barrier_.last_sum;
}

void BlockRunner::collective(const char* name, uint32_t mask, void* frame, Combine combine,
                             Site site) {
  Thread& self = *current_thread;
  Warp& warp = warps_[static_cast<size_t>(self.warp)];
  if (!(mask >> self.lane & 1))
    fail("%s at %s:%d: lane %d is not in its own mask %08x", name, site.file, site.line, self.lane,
         mask);
  if (warp.arrived && (warp.mask != mask || warp.name != name || !same_place(site, warp.site)))
    fail("divergent warp: %s (mask %08x) at %s:%d while lanes wait in %s (mask %08x) at %s:%d",
         name, mask, site.file, site.line, warp.name, warp.mask, warp.site.file, warp.site.line);
  if (!warp.arrived) {
    std::fill(std::begin(warp.frames), std::end(warp.frames), nullptr);
    warp.mask = mask;
    warp.name = name;
    warp.site = site;
    warp.combine = combine;
  }
  warp.arrived |= 1u << self.lane;
  warp.frames[self.lane] = frame;
  self.waits_in = name;
  self.waits_at = site;
  if (warp.arrived == (mask & warp.alive)) complete_collective(warp, self.warp);
  switch_away();
}

void BlockRunner::complete_collective(Warp& warp, int warp_index) {
  if (warp.combine) warp.combine(warp.frames, warp.arrived);
  for (int lane = 0; lane < WARP; ++lane)
    if (warp.arrived >> lane & 1) {
      thread(warp_index * WARP + lane).waits_in = nullptr;
      ready_.push(warp_index * WARP + lane);
    }
  warp.arrived = 0;
}

}  // namespace

void run_grid(const Launch& launch) { runner.run(launch); }
uint32_t current_block() { return runner.block(); }
const Launch* current_launch() { return runner.launch(); }
const SharedRange& shared_range() { return runner.shared(); }

void check_shared(const void* address, size_t bytes, const char* user) {
  const auto* begin = static_cast<const char*>(address);
  const char* end = begin + bytes;
  const SharedRange& shared = runner.shared();
  if (begin < shared.begin || end > shared.end) fail("%s: %p is not shared memory", user, address);
  const char* dynamic_end = shared.dynamic_begin + shared.dynamic_bytes;
  if (end > dynamic_end && begin < shared.dynamic_begin + shared.dynamic_capacity)
    fail("%s: %td bytes behind the end of the launch's %zu bytes of dynamic shared memory", user,
         end - dynamic_end, shared.dynamic_bytes);
}

void warp_collective(const char* name, uint32_t mask, void* frame, Combine combine, Site site) {
  runner.collective(name, mask, frame, combine, site);
}

int block_barrier(const char* name, int value, Site site) {
  return runner.barrier(name, value, site);
}

void warp_sync(uint32_t mask, Site site) {
  warp_collective("__syncwarp", mask, nullptr, nullptr, site);
  if (mask == ALL_LANES && ++current_thread->warp_syncs == 0)
    fail("more than 65535 __syncwarp in one kernel");
}

int lane_index() { return current_thread->lane; }

namespace {

struct ShuffleFrame {
  const void* value;
  unsigned char result[16];
  size_t bytes;
  int source;
};

void combine_shuffle(void** frames, uint32_t) {
  for (int lane = 0; lane < WARP; ++lane) {
    auto* frame = static_cast<ShuffleFrame*>(frames[lane]);
    if (!frame) continue;
    const auto* source = static_cast<const ShuffleFrame*>(frames[frame->source]);
    if (!source)
      fail("shuffle: lane %d reads lane %d, which takes no part in it", lane, frame->source);
    std::memcpy(frame->result, source->value, frame->bytes);
  }
}

struct VoteFrame {
  uint32_t value;
  uint32_t result;
};

template <class Fold>
void fold_votes(void** frames, Fold fold) {
  uint32_t result = 0;
  bool first = true;
  for (int lane = 0; lane < WARP; ++lane)
    if (const auto* frame = static_cast<const VoteFrame*>(frames[lane])) {
      result = first ? frame->value : fold(result, frame->value);
      first = false;
    }
  for (int lane = 0; lane < WARP; ++lane)
    if (auto* frame = static_cast<VoteFrame*>(frames[lane])) frame->result = result;
}

Combine vote_combine(WarpFold fold) {
  switch (fold) {
    case WarpFold::bit_or:
      return
          [](void** f, uint32_t) { fold_votes(f, [](uint32_t a, uint32_t b) { return a | b; }); };
    case WarpFold::bit_and:
      return
          [](void** f, uint32_t) { fold_votes(f, [](uint32_t a, uint32_t b) { return a & b; }); };
    case WarpFold::add:
      return
          [](void** f, uint32_t) { fold_votes(f, [](uint32_t a, uint32_t b) { return a + b; }); };
    case WarpFold::max_signed:
      return [](void** f, uint32_t) {
        fold_votes(f, [](uint32_t a, uint32_t b) {
          return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b;
        });
      };
    case WarpFold::max_unsigned:
      return [](void** f, uint32_t) {
        fold_votes(f, [](uint32_t a, uint32_t b) { return std::max(a, b); });
      };
  }
  fail("unknown warp fold");
}

}  // namespace

void warp_shuffle(const char* name, uint32_t mask, void* value, size_t bytes, int source_lane,
                  Site site) {
  ShuffleFrame frame{value, {}, bytes, source_lane};
  if (bytes > sizeof frame.result) fail("%s of %zu bytes", name, bytes);
  warp_collective(name, mask, &frame, combine_shuffle, site);
  std::memcpy(value, frame.result, bytes);
}

uint32_t warp_fold(const char* name, uint32_t mask, uint32_t value, WarpFold fold, Site site) {
  VoteFrame frame{value, 0};
  warp_collective(name, mask, &frame, vote_combine(fold), site);
  return frame.result;
}

void print_current_thread() {
  if (!runner.launch() || !current_thread) return;
  std::fprintf(stderr,
               "  kernel %s\n  block (%u,%u,%u) of (%u,%u,%u), thread (%u,%u,%u) of (%u,%u,%u)\n",
               describe_code(runner.launch()->kernel).c_str(), blockIdx.x, blockIdx.y, blockIdx.z,
               gridDim.x, gridDim.y, gridDim.z, threadIdx.x, threadIdx.y, threadIdx.z, blockDim.x,
               blockDim.y, blockDim.z);
}

}  // namespace cudasim
