// A backend whose operators leave spans in a Trace, with the tensors they get.
//
// FLOPs are those of the mathematics, without recomputation: 2·N·O·I of a product, 4·D a pair of
// positions of causal attention and twice that in backward; a few an element of everything else
// (see traced_ops.cpp). Bytes are the least traffic with memory: every operand read once, every
// result written once, what is added to or updated in place both. A span ends when its results are
// there, on GPUs as well.
#pragma once

#include <memory>
#include <span>

#include "base/trace.h"
#include "device/ops.h"

namespace qshard {

struct OpTensor {
  const char* role;  // in, weight, out
  const char* name;  // as in device/ops.h
  Tensor tensor;
};

// Sees every operator right after it ran, recorded or not. Tensors are in the device's memory.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void after(const Span& span, std::span<const OpTensor> tensors) = 0;
};

// `ops` with spans in the trace, for as long as they live. `observer` may be null.
std::unique_ptr<Ops> make_traced_ops(std::unique_ptr<Ops> ops, Device& device, Trace& trace,
                                     OpObserver* observer = nullptr);

// Wraps backend.ops from construction to destruction. What was made with the wrapped backend, such
// as an Engine, goes first. `observer` may be null.
class TracedBackend {
 public:
  TracedBackend(Backend& backend, Trace& trace, OpObserver* observer = nullptr);
  ~TracedBackend();
  TracedBackend(const TracedBackend&) = delete;

 private:
  Backend& backend_;
};

}  // namespace qshard
