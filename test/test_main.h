// Every test program is an MPI program: test_world() is its World, also with one rank.
#pragma once

#include <gtest/gtest.h>

#include "comm/world.h"
#include "device/ops.h"

namespace qshard {

World& test_world();
Backend& test_backend();  // the CPU backend, with this rank's share of threads

}  // namespace qshard
