// Causal attention with grouped kv heads on the CPU; shapes as in device/ops.h.
//
// [Note: CPU attention]
// A task is one (sequence, kv head). It packs that head's K and V once, then walks over blocks of
// kQueryRows query rows. A block's scores S [rows, keys up to the diagonal] lie in scratch as a
// whole, so the softmax is exact and needs no rescaling; tiles above the diagonal are skipped.
// Backward recomputes S from the saved log-sum-exp. Scratch is linear in T and belongs to the
// thread.
//
// All seven products run through one register-blocked kernel over 32-bit units: one f32, or a pair
// of bf16 that lie next to each other along the summed dimension (the operand of dpbf16). Keys,
// queries and head_dim are padded with zeros in scratch to whole tiles.
#pragma once

#include "cpu/parallel.h"
#include "device/ops.h"

namespace qshard::cpu {

// How bf16 tensors are multiplied: in pairs by avx512_bf16, or converted to f32. fp16 ones are
// always converted.
enum class Bf16Products { native, converted };
inline constexpr Bf16Products kBestBf16Products =
#ifdef __AVX512BF16__
    Bf16Products::native;
#else
    Bf16Products::converted;
#endif

struct AttentionForward {
  Tensor q, k, v, o, lse;
};
struct AttentionBackward {
  Tensor q, k, v, o, d_o, lse, dq, dk, dv;
};

// Floats of scratch that the team needs in `scratch` of the functions below.
int64_t attention_scratch(const AttentionShape& s, int threads);

void attention_forward(const Team& team, const AttentionForward& a, const AttentionShape& s,
                       float* scratch, Bf16Products products = kBestBf16Products);
void attention_backward(const Team& team, const AttentionBackward& a, const AttentionShape& s,
                        float* scratch, Bf16Products products = kBestBf16Products);

}  // namespace qshard::cpu
