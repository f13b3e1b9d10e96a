// Names for Nsight Systems and other profilers that take NVTX: a range in the domain "qshard" for
// each span that `--trace` would have: operators (AdamW's as well), gathers, reductions.
//
// Always in the CUDA build, since without a profiler nothing is wrapped: NVTX gives no domain then.
// A range is the call on the host; the profiler finds the kernels that it launched.
#pragma once

#include "base/trace.h"

namespace qshard {

// A trace that records nothing and passes its spans to NVTX, for device/traced_ops.h and
// comm/traced_collectives.h. Null when no profiler is attached. Lives as long as the process.
Trace* profiler_trace();

}  // namespace qshard
