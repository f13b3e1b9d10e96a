#include "scheduler.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "memory.h"
#include "mpi_progress.h"
#include "report.h"

namespace cudasim {
namespace {

// How the ready operations are chosen until the next wait of the host.
struct Mood {
  uint32_t eagerness = 1;  // of 3: chance of each further step while the host enqueues
  bool sticky = false;     // stay with one lane as long as it has something ready
};

// Half of the time nothing runs before the host waits: late work shows most missing dependencies.
Mood draw_mood() {
  constexpr uint32_t EAGERNESS[] = {0, 0, 1, 3};
  return {EAGERNESS[random_below(4)], coin()};
}

bool within(const Clock& clock, const Clock& known) {
  for (size_t lane = 0; lane < clock.size(); ++lane)
    if (clock[lane] > (lane < known.size() ? known[lane] : 0)) return false;
  return true;
}

// What this OS thread runs; others may be at host code meanwhile.
thread_local Operation* running_here = nullptr;

class Scheduler {
 public:
  OperationRef submit(OperationRef operation, const OperationRef& chained) {
    operation->id = static_cast<uint32_t>(records_.size());
    records_.push_back({operation->lane, operation->sequence, operation->name});
    operation->clock = host_clock_;
    ++pending_;
    for (const OperationRef& predecessor : operation->predecessors) depend(predecessor, operation);
    if (chained) depend(chained, operation);
    if (operation->unmet == 0) ready_.push_back(operation);
    return operation;
  }

  bool step() {
    if (ready_.empty() || running_here) return false;
    const size_t index = choose();
    OperationRef operation = ready_[index];
    if (!operation->started) start(*operation);
    running_here = operation.get();  // a poll that needs device memory opens it
    operation->done = !operation->poll || operation->poll();
    running_here = nullptr;
    if (operation->done) finish(operation);
    return true;
  }

  void run_some() {
    for (size_t pending = pending_; random_below(3) < mood_.eagerness && step(); --pending)
      if (pending_ == pending) return;  // polled one that waits for another rank
  }

  void wait_for(const OperationRef& operation) {
    if (!operation) return;
    note_wait(*operation);
    while (!operation->done) {
      const size_t pending = pending_;
      if (!step())
        fail("deadlock: the host waits for \"%s\", and nothing that it depends on can run",
             operation->name.c_str());
      if (pending == pending_) pause_between_polls();
    }
    join(host_clock_, operation->clock);
    change_mood();
  }

  void wait_for_all() {
    if (pending_ > 0 || !within(everything_, host_clock_)) ++host_waits_;
    while (pending_ > 0) {
      const size_t pending = pending_;
      if (!step()) fail("deadlock: %zu operations wait for each other", pending_);
      if (pending == pending_) pause_between_polls();
    }
    join(host_clock_, everything_);
    change_mood();
  }

  void run_on_host_lane(const std::string& name, const std::function<void()>& body) {
    Operation operation;
    operation.name = name;
    operation.lane = HOST_LANE;
    operation.sequence = next_sequence(HOST_LANE);
    operation.id = static_cast<uint32_t>(records_.size());
    records_.push_back({HOST_LANE, operation.sequence, name});
    operation.clock = host_clock_;
    run_as(operation, body);
    complete_clock(operation);
    join(host_clock_, operation.clock);
  }

  int new_lane() {
    sequences_.push_back(0);
    return static_cast<int>(sequences_.size()) - 1;
  }

  uint32_t next_sequence(int lane) { return ++sequences_[static_cast<size_t>(lane)]; }
  const OperationRecord& record(uint32_t id) const { return records_[id]; }
  size_t pending() const { return pending_; }  // operations that are not done

  void note_wait(Operation& operation) {
    const auto lane = static_cast<size_t>(operation.lane);
    const bool known = lane < host_clock_.size() && operation.sequence <= host_clock_[lane];
    if (!known && !operation.awaited) ++host_waits_;
    operation.awaited = true;
  }
  int64_t host_waits() const { return host_waits_; }

  std::recursive_mutex& mutex() { return mutex_; }
  int depth = 0;  // of nested ApiCalls, under the mutex

 private:
  static void depend(const OperationRef& predecessor, const OperationRef& operation) {
    if (predecessor->done) return;
    predecessor->successors.push_back(operation);
    ++operation->unmet;
  }

  size_t choose() {
    if (mood_.sticky)
      for (size_t i = 0; i < ready_.size(); ++i)
        if (ready_[i]->lane == favourite_ && !ready_[i]->started) return i;
    const size_t index = random_below(static_cast<uint32_t>(ready_.size()));
    favourite_ = ready_[index]->lane;
    return index;
  }

  void start(Operation& operation) {
    for (const OperationRef& predecessor : operation.predecessors)
      join(operation.clock, predecessor->clock);
    operation.predecessors.clear();
    run_as(operation, [&] { operation.poll = operation.begin(); });
    operation.started = true;
  }

  template <class Body>
  void run_as(Operation& operation, Body body) {
    open_device_memory();
    running_here = &operation;
    body();
    running_here = nullptr;
  }

  void finish(const OperationRef& operation) {
    ready_.erase(std::find(ready_.begin(), ready_.end(), operation));
    --pending_;
    complete_clock(*operation);
    for (const OperationRef& successor : operation->successors)
      if (--successor->unmet == 0) ready_.push_back(successor);
    operation->successors.clear();
    operation->begin = nullptr;
    operation->poll = nullptr;
  }

  void complete_clock(Operation& operation) {
    const auto lane = static_cast<size_t>(operation.lane);
    if (operation.clock.size() <= lane) operation.clock.resize(lane + 1);
    operation.clock[lane] = operation.sequence;
    join(everything_, operation.clock);
  }

  void change_mood() {
    mood_ = draw_mood();
    favourite_ = -1;
  }

  std::recursive_mutex mutex_;
  std::vector<OperationRef> ready_;
  std::vector<OperationRecord> records_{{HOST_LANE, 0, "nothing"}};
  std::vector<uint32_t> sequences_{0};
  size_t pending_ = 0;
  int64_t host_waits_ = 0;
  Clock host_clock_, everything_;
  int favourite_ = -1;
  Mood mood_ = draw_mood();
};

Scheduler& scheduler() {
  static Scheduler* instance = new Scheduler;  // used by destructors of static objects
  return *instance;
}

}  // namespace

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

ApiCall::ApiCall() {
  scheduler().mutex().lock();
  ++scheduler().depth;
}

ApiCall::~ApiCall() {
  if (--scheduler().depth == 0 && !mpi_holds_device_memory()) close_device_memory();
  scheduler().mutex().unlock();
}

int new_lane() { return scheduler().new_lane(); }
uint32_t next_sequence(int lane) { return scheduler().next_sequence(lane); }

OperationRef submit(std::string name, int lane, std::vector<OperationRef> predecessors, Begin begin,
                    const OperationRef& chained) {
  auto operation = std::make_shared<Operation>();
  operation->name = std::move(name);
  operation->lane = lane;
  operation->sequence = next_sequence(lane);
  operation->predecessors = std::move(predecessors);
  operation->begin = std::move(begin);
  return scheduler().submit(std::move(operation), chained);
}

void run_on_host_lane(const std::string& name, const std::function<void()>& body) {
  scheduler().run_on_host_lane(name, body);
}

void run_some() { scheduler().run_some(); }
bool step() { return scheduler().step(); }
void wait_for(const OperationRef& operation) { scheduler().wait_for(operation); }
void wait_for_all() { scheduler().wait_for_all(); }

bool query(const OperationRef& operation) {
  if (operation && !operation->done) {
    scheduler().note_wait(*operation);
    const size_t pending = scheduler().pending();
    for (uint32_t steps = 1 + random_below(64); steps > 0 && !operation->done && step();) --steps;
    run_some();
    if (scheduler().pending() == pending) pause_between_polls();
  }
  if (operation && !operation->done) return false;
  wait_for(operation);
  return true;
}

int64_t host_waits() { return scheduler().host_waits(); }

// Ranks may outnumber cores: one that only polls sleeps, so that the others get on.
void pause_between_polls() {
  scheduler().mutex().unlock();
  usleep(50);
  scheduler().mutex().lock();
}

bool operation_running() { return running_here != nullptr; }

uint32_t running_operation_id() { return running_here ? running_here->id : 0; }

bool ordered_before_running(uint32_t id) {
  const Clock& clock = running_here->clock;
  const OperationRecord& record = scheduler().record(id);
  const auto lane = static_cast<size_t>(record.lane);
  return lane < clock.size() && clock[lane] >= record.sequence;
}

const OperationRecord& operation_record(uint32_t id) { return scheduler().record(id); }

void print_current_operation() {
  if (running_here)
    std::fprintf(stderr, "  in \"%s\", operation %u of lane %d\n", running_here->name.c_str(),
                 running_here->sequence, running_here->lane);
}

}  // namespace cudasim
