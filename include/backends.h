// Which backends and transports this build has: the only place that knows (with src/backends.cpp).
#pragma once

#include <memory>
#include <string>

#include "comm/collectives.h"
#include "comm/world.h"
#include "device/ops.h"

namespace qshard {

// name: "cpu" or "cuda". One that this build lacks is a usage error that says how to build it.
// Collective: an error on any rank is thrown on all.
Backend make_backend(const std::string& name, const World& world);

// The transport for "auto", otherwise `transport` itself: shm (for auto) and mpi go with the
// backend cpu, nccl with cuda. Another pair is a usage error.
std::string choose_transport(const std::string& transport, const std::string& backend);

// transport: as for choose_transport(); `full_buffers` as in make_collectives(). Collective.
std::unique_ptr<Collectives> make_transport(const std::string& transport, World& world,
                                            Backend& backend, int full_buffers);

}  // namespace qshard
