// The MPI world of the program: one per process, made first in main and passed by reference.
//
// The communicator is a duplicate with MPI_ERRORS_RETURN; every call goes through QS_MPI, which
// throws with MPI's own text. Barrier-like waits are left to the transports.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/check.h"

namespace qshard {

class World {
 public:
  // MPI_Init_thread (MPI_THREAD_MULTIPLE asked, FUNNELED needed), node communicator, host names.
  // Throws a usage error when Slurm started more tasks than MPI sees (singletons) unless
  // QSHARD_ALLOW_SINGLETON=1.
  World(int* argc, char*** argv);
  ~World();  // does not finalize; call finalize() on the good path
  void finalize();
  [[noreturn]] void abort(int code) noexcept;  // MPI_Abort: ends every rank within seconds

  int rank() const { return rank_; }
  int size() const { return size_; }
  int node_rank() const { return node_rank_; }   // rank among the ranks of this node
  int node_size() const { return node_size_; }
  int nodes() const { return nodes_; }
  const std::string& host() const { return host_; }
  int cpus() const { return cpus_; }             // CPUs that the ranks of this node may use together (union of their affinity masks)
  int threads_per_rank() const { return std::max(1, cpus_ / node_size_); }
  MPI_Comm comm() const { return comm_; }
  MPI_Comm node_comm() const { return node_comm_; }
  std::string mpi_version() const;               // "Open MPI v4.1.4"

  void barrier() const;
  void all_reduce_sum(double* values, int n) const;  // in place; the same bits on every rank, rank order
  void all_reduce_max(double* values, int n) const;
  void all_reduce_sum(int64_t* values, int n) const;
  std::string broadcast(const std::string& text, int root) const;  // root's text on every rank
  std::vector<std::string> gather(const std::string& text) const;  // on rank 0: every rank's text; elsewhere empty

 private:
  MPI_Comm comm_ = MPI_COMM_NULL, node_comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, node_rank_ = 0, node_size_ = 1, nodes_ = 1, cpus_ = 1;
  std::string host_;
};

// Runs fn on every rank; when it throws on any, every rank throws one AgreedError with the message of
// the lowest failing rank (named with its host unless all ranks failed alike). Collective: use it for
// whatever can fail on one rank alone, such as opening files.
void collectively(const World& world, const std::function<void()>& fn);

std::string mpi_error_text(int code);

}  // namespace qshard

#define QS_MPI(call)                                                                          \
  do {                                                                                        \
    int code_ = (call);                                                                       \
    if (code_ != MPI_SUCCESS) [[unlikely]]                                                    \
      ::qshard::fail("{} failed: {} [{}:{}]", #call, ::qshard::mpi_error_text(code_), __FILE__, \
                     __LINE__);                                                               \
  } while (0)
