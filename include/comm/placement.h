// Where a node's ranks may run, and what is likely wrong with it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/world.h"

namespace qshard {

struct Placement {    // of the ranks of one node
  int ranks = 1;      // on this node
  int allowed = 1;    // CPUs that they may use together
  int narrowest = 1;  // CPUs that the rank with the fewest may use
  int machine = 1;    // CPUs of the node
  int job = 0;        // CPUs of the node that Slurm gave to the job; 0: no Slurm, or unknown
};

// Of this node. Collective.
Placement find_placement(const World& world);

// What is wrong, and the likely option of Slurm or mpirun; empty when all is well.
std::string placement_warning(const Placement& placement);

// CPUs of the job on its node number `node`, from SLURM_JOB_CPUS_PER_NODE: "36(x2),20" are 36, 36
// and 20. 0 when it does not say.
int job_cpus_of_node(const std::string& cpus_per_node, int node);

std::vector<int> parse_cpu_list(const std::string& list);  // "0-3,8"; empty when it is not one

// CPUs of each NUMA node of this machine; empty where Linux does not tell.
std::map<int, std::vector<int>> find_numa_nodes(
    const std::string& folder = "/sys/devices/system/node");

// What is wrong with a rank that may use these CPUs and whose GPU is at NUMA node `gpu_node` (-1:
// no GPU, or not known): CPUs far from the GPU, or of more NUMA nodes than they need. Empty when
// all is well, or where the rank is not bound.
std::string numa_warning(const std::vector<int>& cpus, const std::map<int, std::vector<int>>& nodes,
                         int gpu_node);

}  // namespace qshard
