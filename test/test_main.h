// Every test program is an MPI program: test_world() is its World, also with one rank.
//
// A test counts as failed when it failed on any rank; all ranks begin each test together. Rank 0
// prints; the others print their failures only, prefixed with rank. Every rank exits with 1 when
// any test failed. A test that runs longer than QSHARD_TEST_TIMEOUT seconds (default 120, 0: no
// limit) is named and ends the job.
#pragma once

#include <gtest/gtest.h>

#include "comm/world.h"
#include "device/ops.h"

namespace qshard {

World& test_world();
Backend& test_backend();  // the CPU backend, with this rank's share of threads

}  // namespace qshard
