// The MPI world of the program: one per process, made first in main and passed by reference.
//
// Its communicators are duplicates with MPI_ERRORS_RETURN; every call goes through QS_MPI, which
// throws with MPI's own text. Waits between units and layers are the transports' business.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"

namespace qshard {

class World {
 public:
  // MPI_Init_thread (MPI_THREAD_MULTIPLE asked, FUNNELED needed), node communicator, host names.
  // Throws a usage error when Slurm started more tasks than MPI sees (see broken_launch()).
  World(int* argc, char*** argv);
  ~World() = default;  // does not finalize: after an error the other ranks may never come along
  World& operator=(const World&) = delete;
  void finalize();  // the good path, collective
  // The same ranks with communicators of their own, for a second thread (needs threads_may_call()).
  // It waits asleep, so that it takes no core from the first one. Collective; lives until
  // finalize().
  std::unique_ptr<World> duplicate() const;
  // The ranks that give the same color, numbered in rank order, with communicators of their own.
  // Collective; lives until finalize().
  std::unique_ptr<World> split(int color) const;
  bool in_background() const { return in_background_; }  // made by duplicate()
  // A world of this process alone, on its node. Made by any rank at any time.
  static std::unique_ptr<World> alone();
  // Rank 0 of ranks that do not exist, `ranks_per_node` on each node: for planning. It has sizes,
  // but no communicators.
  static std::unique_ptr<World> imagined(int ranks, int ranks_per_node);
  bool is_imagined() const { return comm_ == MPI_COMM_NULL; }
  bool threads_may_call() const { return threads_may_call_; }  // MPI_THREAD_MULTIPLE
  [[noreturn]] void abort(int code) noexcept;  // MPI_Abort: ends every rank within seconds

  int rank() const { return rank_; }
  int size() const { return size_; }
  // A node is a machine. For tests of what happens between nodes, QSHARD_RANKS_PER_NODE=K in the
  // environment makes nodes of K successive ranks of a machine.
  int node_rank() const { return node_rank_; }  // rank among the ranks of this node
  int node_size() const { return node_size_; }
  int nodes() const { return nodes_; }
  std::vector<int> nodes_by_rank() const;  // numbered by their lowest ranks; collective
  const std::string& host() const { return host_; }
  // All ranks of the program on this machine, also those that are not in this world.
  MPI_Comm machine_comm() const { return machine_comm_; }
  int machine_rank() const { return machine_rank_; }
  int machine_size() const { return machine_size_; }
  // CPUs that they may use together: the union of their affinity masks.
  int cpus() const { return cpus_; }
  const std::vector<int>& own_cpus() const { return own_cpus_; }  // that this rank may use
  int job_cpus() const { return job_cpus_; }  // that Slurm gave to the job on this node; 0: unknown
  int threads_per_rank() const { return std::max(1, cpus_ / machine_size_); }
  // A rank that is waited for may need the core of the rank that waits.
  bool ranks_share_cores() const { return machine_size_ > cpus_; }
  MPI_Comm comm() const { return comm_; }
  MPI_Comm node_comm() const { return node_comm_; }
  std::string mpi_version() const;  // "Open MPI v4.1.4"

  void barrier() const;
  // In place; every rank gets the same bits: values are combined in rank order on each rank.
  void all_reduce_sum(double* values, int n) const;
  void all_reduce_sum(int64_t* values, int n) const;
  void all_reduce_max(double* values, int n) const;                // NaN on any rank gives NaN
  std::string broadcast(const std::string& text, int root) const;  // root's text on every rank
  // On rank 0: every rank's text, by rank; elsewhere empty.
  std::vector<std::string> gather(const std::string& text) const;

 private:
  World() = default;
  World(const World&) = default;  // of all but the communicators' ownership: for parts and copies
  void find_machine();
  void find_node(MPI_Comm within, int color);
  void complete(MPI_Request request) const;
  template <typename T>
  std::vector<T> all_gather(const T* values, int n) const;  // by rank
  void broadcast(void* data, int64_t bytes, int root) const;
  bool threads_may_call_ = false, in_background_ = false;
  MPI_Comm comm_ = MPI_COMM_NULL, node_comm_ = MPI_COMM_NULL, machine_comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, node_rank_ = 0, node_size_ = 1, nodes_ = 1;
  int machine_rank_ = 0, machine_size_ = 1, cpus_ = 1;
  int job_cpus_ = 0;
  std::vector<int> own_cpus_;
  std::string host_;
};

// Runs fn on every rank; when it throws on any, every rank throws one AgreedError with the exit
// code of the lowest failing rank and the messages of the failing ranks (named with rank and host
// unless all ranks failed alike; at most four, then a count). Collective: use it for whatever can
// fail on one rank alone, such as opening files. fn itself must not communicate: a rank that throws
// would leave the others waiting.
void collectively(const World& world, const std::function<void()>& fn);

// What is wrong with the launch, or an empty text. srun with an `--mpi=` that does not fit the MPI
// library starts N programs that are each rank 0 of 1; that is refused unless
// QSHARD_ALLOW_SINGLETON=1. `environment`: variables as they were before MPI_Init.
std::string broken_launch(const std::map<std::string, std::string>& environment, int mpi_size);

std::string mpi_error_text(int code);

}  // namespace qshard

#define QS_MPI(call)                                                                            \
  do {                                                                                          \
    int code_ = (call);                                                                         \
    if (code_ != MPI_SUCCESS) [[unlikely]]                                                      \
      ::qshard::fail("{} failed: {} [{}:{}]", #call, ::qshard::mpi_error_text(code_), __FILE__, \
                     __LINE__);                                                                 \
  } while (0)
