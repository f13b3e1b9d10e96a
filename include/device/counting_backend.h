// A backend that computes nothing and holds nothing, for planning: the code of a real step runs on
// it, and what that asks of device and operators is counted. Addresses are made up and must not be
// used; copies to the host read zeros. Wrap it in a TracedBackend for the operators' shapes and
// FLOPs.
#pragma once

#include "device/ops.h"

namespace qshard {

// has_host: the device is a GPU, whose host() has memory of its own.
Backend make_counting_backend(bool has_host = false);

}  // namespace qshard
