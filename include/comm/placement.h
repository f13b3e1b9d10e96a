// Where a node's ranks may run, and what is likely wrong with it.
#pragma once

#include <string>

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
// and
// 20. 0 when it does not say.
int job_cpus_of_node(const std::string& cpus_per_node, int node);

}  // namespace qshard
