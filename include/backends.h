// Which backends this build has: the only place that knows (with src/backends.cpp).
#pragma once

#include <string>

#include "comm/world.h"
#include "device/ops.h"

namespace qshard {

// name: "cpu". A backend that this build lacks is a usage error that says how to build it.
Backend make_backend(const std::string& name, const World& world);

}  // namespace qshard
