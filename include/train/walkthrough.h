// One real training step, told operator by operator, with what was measured in it.
//
// [Note: Walkthrough] An Engine with a traced backend and transport takes a step to warm up and
// then the one that is told. Every number comes from that step: bytes from the transport's own
// count, shard sizes from the buffers, shapes from the tensors that operators got, memory and times
// from the spans. The checks compare these with independent arithmetic and with a run of one
// process.
#pragma once

#include <functional>
#include <string>

#include "train/ckpt_tools.h"
#include "train/engine.h"

namespace qshard {

struct WalkthroughOptions {
  Qwen3Config config;
  std::string model;  // where the config is from, for the setting
  // A folder with config.json, model.safetensors, batches.safetensors and activations.safetensors
  // of layer 0 (see test/reference/README.md), or "": random weights and tokens.
  std::string reference;
  int64_t batch = 2, seq = 8, accumulation = 1;
  FsdpOptions fsdp;
  std::string transport = "shm", backend = "cpu";
  uint64_t seed = 1;
  int64_t layer = 0;   // that is told
  std::string tensor;  // a parameter whose values are shown, by the end of its name; or ""
  int64_t rank = 0;    // on which they are looked at
  std::string trace;   // file for a Chrome trace, or ""
  // For tests: a transport with a planted error around the real one.
  std::function<std::unique_ptr<Collectives>(std::unique_ptr<Collectives>)> wrap_transport;

  int64_t unit() const { return 1 + layer / fsdp.layers_per_unit; }  // that holds the layer
};

struct WalkthroughReport {
  Document document;  // on rank 0; bytes, elements and FLOPs are integers, times nanoseconds
  bool ok = false;    // all checks, on every rank
};

// Shape of the README's table: hidden 512, 8 query and 4 kv heads of 64, ffn 1024; two layers.
Qwen3Config walkthrough_config();

// Collective.
WalkthroughReport run_walkthrough(const WalkthroughOptions& options, World& world,
                                  Backend& backend);

}  // namespace qshard
