// f32 products of a linear layer whose tokens are few; shapes and views as in device/ops.h.
//
// [Note: Products of few rows] A library packs both operands of a product into its own layout,
// which pays when each packed value is used often. With N tokens a weight is used N times: for
// small N packing costs as much as the product, and the weights should be streamed from memory
// once. Here y = x·wᵀ packs x only, dx = dy·w packs dy only, dw = dyᵀ·x nothing, and w is read in
// the order in which it lies. Every element is one sum in the order of its summed dimension (of dx:
// of the sums of 16 terms), so that it depends neither on N nor on threads.
#pragma once

#include <vector>

#include "cpu/parallel.h"
#include "tensor/tensor.h"

namespace qshard::cpu {

struct Rows {
  int64_t least, most;
  bool contain(int64_t N) const { return least <= N && N <= most; }
};
// N for which each is faster than oneDNN 2.6.3, or as fast. GFLOP/s of a core of Zen 4, of oneDNN
// and of these, over 38 MB of weights of 512 to 2048 rows and columns, both cores at work:
//              AVX-512                            AVX2
//          N = 8       16       32       64      8       16       32
//   y      38  40   48  78   69  91   85  99   32  34   50  56   70  72
//   dx     37  53   58  74   82  79  101  88   22  37   35  47   74  52
//   dw     36  65   53  82   73  92   96  98   35  43   57  37   48  39
#ifdef __AVX512F__
inline constexpr Rows kFewRowsOfLinear{8, 64}, kFewRowsOfDgrad{1, 32}, kFewRowsOfWgrad{1, 64};
#else
inline constexpr Rows kFewRowsOfLinear{8, 16}, kFewRowsOfDgrad{2, 16},
    kFewRowsOfWgrad{1, 0};  // none
#endif

void linear_few_rows(const Team& team, Tensor x, Tensor w, Tensor y, std::vector<float>& scratch);
void linear_dgrad_few_rows(const Team& team, Tensor dy, Tensor w, Tensor dx, bool accumulate,
                           std::vector<float>& scratch);
void linear_wgrad_few_rows(const Team& team, Tensor dy, Tensor x, Tensor dw, bool accumulate);

}  // namespace qshard::cpu
