// Operations of streams and the random legal order in which they run.
//
// An operation becomes ready when all that it depends on is done: the operation before it in its
// stream and the events that the stream waited for. While the host enqueues and while it waits, the
// scheduler runs ready operations in an order that the seed decides. Logical clocks record what is
// ordered before what, independently of the order that was drawn.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace cudasim {

// clock[lane] = sequence number of that lane's latest operation known to have completed. Each
// stream is a lane, each stream of an instantiated graph another; lane 0 is the host.
using Clock = std::vector<uint32_t>;
constexpr int HOST_LANE = 0;
void join(Clock& into, const Clock& from);

// Starts an operation, with device memory open. An empty result: it is complete. Otherwise the
// result is polled until true, and opens device memory when it needs it.
using Poll = std::function<bool()>;
using Begin = std::function<Poll()>;

struct Operation;
using OperationRef = std::shared_ptr<Operation>;

struct Operation {
  std::string name;
  Begin begin;
  Poll poll;
  int lane = 0;
  uint32_t sequence = 0;  // in its lane, from 1
  uint32_t id = 0;        // in the table of all operations, from 1
  Clock clock;            // what is ordered before its start; at the end, itself too
  std::vector<OperationRef> predecessors;  // until it starts
  std::vector<OperationRef> successors;
  int unmet = 0;  // predecessors and chained operations that are not done
  bool started = false, done = false;
  bool awaited = false;  // the host has asked for it
};

// The start of an operation, kept for the tracker's reports after the operation is gone.
struct OperationRecord {
  int lane;
  uint32_t sequence;
  std::string name;
};
const OperationRecord& operation_record(uint32_t id);

// Every call of the simulated libraries holds one. The outermost closes device memory at its end.
class ApiCall {
 public:
  ApiCall();
  ~ApiCall();
  ApiCall(const ApiCall&) = delete;
  ApiCall& operator=(const ApiCall&) = delete;
};

int new_lane();
uint32_t next_sequence(int lane);

// Adds an operation after `predecessors`. `chained` (may be null) must also be done before it
// starts, but no memory ordering follows from it.
OperationRef submit(std::string name, int lane, std::vector<OperationRef> predecessors, Begin begin,
                    const OperationRef& chained = nullptr);
// Runs `body` at once as an operation of the host, ordered after what the host waited for.
void run_on_host_lane(const std::string& name, const std::function<void()>& body);

// Runs some ready operations: none, a few or many, as the seed decides.
void run_some();
// One random action; false when nothing is ready. For host code that waits for other ranks.
bool step();
// Runs until the operation is done, and orders the host behind it. Null: returns at once.
void wait_for(const OperationRef& operation);
void wait_for_all();
// True if the operation is done; orders the host behind it then. Makes some progress otherwise.
bool query(const OperationRef& operation);
// How many operations the host has asked for, or for all of them, without knowing from what it had
// waited for that they were done. The order that was drawn does not matter.
int64_t host_waits();
// Called between polls that did not complete anything.
void pause_between_polls();

// The running operation, if any.
bool operation_running();
uint32_t running_operation_id();
// True if the operation `id` is ordered before the running one.
bool ordered_before_running(uint32_t id);

void print_current_operation();  // to stderr, for reports

}  // namespace cudasim
