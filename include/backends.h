// Which backends and transports this build has: the only place that knows (with src/backends.cpp).
#pragma once

#include <memory>
#include <string>

#include "comm/collectives.h"
#include "comm/transport_options.h"
#include "comm/world.h"
#include "device/ops.h"

namespace qshard {

// name: "cpu" or "cuda". One that this build lacks is a usage error that says how to build it.
// Collective: an error on any rank is thrown on all.
Backend make_backend(const std::string& name, const World& world);

bool moves_gpu_memory(const std::string& transport);  // rather than the host's

// The options with the transport that "auto" stands for: shm (for auto) and mpi go with the backend
// cpu, nccl (for auto) and mpi-cuda with cuda. Another pair, or an option of another transport, is
// a usage error.
TransportOptions choose_transport(TransportOptions options, const std::string& backend);

// What choose_transport() chooses for the backend's kind.
std::string transport_name(const TransportOptions& options, const Backend& backend);

// options: as for choose_transport(); `full_buffers` as in make_collectives(). Collective.
std::unique_ptr<Collectives> make_transport(const TransportOptions& options, World& world,
                                            Backend& backend, int full_buffers);

}  // namespace qshard
