// A transport that leaves spans in a Trace: a span a call, with the bytes that the transport
// counted meanwhile and the memory that parameters and full gradients hold, and shows units to an
// observer.
#pragma once

#include <memory>

#include "base/trace.h"
#include "comm/collectives.h"

namespace qshard {

// Buffers are those of the transport, in the device's memory, valid during the call.
class UnitObserver {
 public:
  virtual ~UnitObserver() = default;
  virtual void gathered(const std::string& /*unit*/, const void* /*full*/) {}
  virtual void before_reduce(const std::string& /*unit*/, const float* /*full gradient*/) {}
};

// `inner` counts, this one only looks. `observer` may be null.
std::unique_ptr<Collectives> make_traced_collectives(std::unique_ptr<Collectives> inner,
                                                     const World& world, Trace& trace,
                                                     UnitObserver* observer = nullptr);

}  // namespace qshard
