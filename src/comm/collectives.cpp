#include "comm/collectives.h"

#include "comm/transports.h"

namespace qshard {

std::unique_ptr<Collectives> make_collectives(const std::string& transport, World& world,
                                              Backend& backend, int full_buffers) {
  if (transport == "shm") return make_shm_collectives(world, backend);
  if (transport == "mpi") return make_mpi_collectives(world, backend, full_buffers);
  fail_usage("--comm.transport {}: expected shm or mpi on the CPU", transport);
}

}  // namespace qshard
