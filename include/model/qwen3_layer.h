// One Qwen3 decoder layer, forward and backward, as straight-line code over Ops.
//
// [Note: Steps of a layer]  1 input RMSNorm · 2 q/k/v products · 3 q-norm, k-norm · 4 RoPE · 5
// causal attention · 6 o_proj · 7 residual · 8 post-attention RMSNorm · 9 SwiGLU MLP · 10 residual.
// All local: nothing here communicates. Steps 3+4 and 7+8 each run as one pass over memory.
//
// P is the parameter dtype, R the residual stream's (f32). Activations kept for backward per token
// and layer: 2C R + (2C + 2(H+2K)D − K·D + H·D + 3F) P and a few statistics.
//
// [Note: Activation checkpointing] selective: a layer keeps its input and what matrix products made
// (2C R + ((H+2K)D + 2F) P a token); norms, RoPE, attention and SwiGLU are computed anew before its
// backward. full: it keeps its input only (C R), and all but the last product and residual are
// computed anew. What is not kept lies in one set of buffers for all layers, in which the last
// layer's values are still there when backward begins. The operators and their inputs are the same,
// so gradients are too, bit for bit.
//
// [Note: Gradients over activations] A unit's gradient shards are written by its reduction, which
// comes after the backward of its layers and so after the last use of their activations, and read
// by the optimizer, before the next forward. Where a step reduces each gradient once, the two share
// memory: activations are placed in the gradient shards first, in memory of their own when those
// are full. (What [Note: Activation checkpointing] shares between layers lies with layer 0, whose
// backward is the last.)
#pragma once

#include <string>
#include <vector>

#include "device/ops.h"
#include "fsdp/unit.h"
#include "model/qwen3_config.h"

namespace qshard {

// One layer's parameters in the unit that holds them.
struct LayerWeights {
  std::string name;  // "layers.3", for messages and traces
  const Unit& unit;
  int first;  // index in the unit of kInputNorm

  Tensor param(int i) const { return unit.param(first + i); }
  Tensor grad(int i) const { return unit.grad(first + i); }
  bool grad_accumulates() const { return unit.grad_accumulates(); }
};

struct LayerShape {
  int64_t B, T, N, C, H, K, D, F;
  float eps;
  LayerShape(const Qwen3Config& config, int64_t B, int64_t T);
  AttentionShape attention() const { return {B, T, H, K, D}; }
  int64_t qkv_cols() const { return (H + 2 * K) * D; }
};

// Memory of somebody else who does not need it for now, given out from its begin on.
class LentMemory {
 public:
  LentMemory() = default;
  explicit LentMemory(const Tensor& t)
      : at_(static_cast<char*>(t.data)), left_(t ? static_cast<int64_t>(t.bytes()) : 0) {}
  Tensor take(DType dtype, Shape shape);  // at 64 bytes; empty when there is too little left

 private:
  char* at_ = nullptr;
  int64_t left_ = 0;
};

// What forward leaves for backward.
struct LayerActivations {
  Tensor x;        // [N,C] R     residual stream at the layer's input
  Tensor rstd1;    // [N]
  Tensor normed1;  // [N,C]
  Tensor qkv;      // [N,(H+2K)D] before q-norm and k-norm
  Tensor rstd_qk;  // [N,H+K]
  Tensor qk;       // [N,(H+K)D]  after norm and RoPE
  Tensor att;      // [N,H·D]
  Tensor lse;      // [B,H,T]
  Tensor mid;      // [N,C] R     residual stream after attention
  Tensor rstd2;    // [N]
  Tensor normed2;  // [N,C]
  Tensor gate_up;  // [N,2F]
  Tensor act;      // [N,F]
  // Has what `mode` keeps in `lent`, or owns it where that is full. The rest is that of `lender`,
  // or its own as well without one.
  LayerActivations(const LayerShape& s, DType param_dtype, Device& device, const std::string& name,
                   ActivationCheckpoint mode, const LayerActivations* lender, LentMemory& lent);

 private:
  std::vector<Buffer> owned_;
};

// Shared by all layers: contents live only inside one forward or backward call.
struct LayerWorkspace {
  Buffer rope;    // [T,D] f32   cos, then sin, of the D/2 frequencies
  Buffer delta;   // [N,C] P     output of o_proj and of down_proj
  Buffer d_norm;  // [N,C] f32   gradient at a norm's output
  Buffer d_act;   // [N,F] P
  Buffer d_att;   // [N,H·D] P
  Buffer d_qkv;   // [N,(H+2K)D] P
  LayerWorkspace(const LayerShape& s, DType param_dtype, double rope_theta, Device& device);
};

// out [N,C] R = the layer's output; its input is a.x.
void layer_forward(Ops& ops, const LayerShape& s, const LayerWeights& layer, LayerActivations& a,
                   LayerWorkspace& w, Tensor out);

// Before layer_backward(): what `mode` has not kept, once more into the same buffers.
void layer_recompute(Ops& ops, const LayerShape& s, const LayerWeights& layer, LayerActivations& a,
                     LayerWorkspace& w, ActivationCheckpoint mode);

// d_res [N,C] R: gradient at the layer's output in, at its input out. d_res_p: its copy in P (the
// same memory when P is R). Writes the layer's full gradient. a.gate_up is overwritten.
void layer_backward(Ops& ops, const LayerShape& s, const LayerWeights& layer, LayerActivations& a,
                    LayerWorkspace& w, Tensor d_res, Tensor d_res_p);

}  // namespace qshard
