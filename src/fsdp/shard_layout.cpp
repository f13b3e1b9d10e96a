#include "fsdp/shard_layout.h"

#include <algorithm>

namespace qshard {

// Elements: 64 bytes of the widest type that moves (f32) and of bf16 alike.
constexpr int64_t kAlign = 32;

RowRange ParamLayout::rows_of(int rank) const {
  return {std::min(rank * chunk, rows), std::min((rank + 1) * chunk, rows)};
}

UnitLayout::UnitLayout(std::vector<ParamSpec> params, int ranks) : params_(std::move(params)) {
  for (const ParamSpec& p : params_) {
    const int64_t rows = p.shape[0], row_numel = p.shape.row_numel();
    const int64_t chunk = (rows + ranks - 1) / ranks;
    layouts_.push_back({rows, row_numel, chunk, elements_, ranks});
    elements_ += (layouts_.back().padded_numel() + kAlign - 1) / kAlign * kAlign;
  }
}

std::vector<Piece> UnitLayout::pieces() const {
  std::vector<Piece> pieces;
  for (const ParamLayout& l : layouts_) pieces.push_back(l.piece());
  return pieces;
}

int64_t UnitLayout::numel() const {
  int64_t n = 0;
  for (const ParamSpec& p : params_) n += p.shape.numel();
  return n;
}

int64_t UnitLayout::shard_numel(int rank) const {
  int64_t n = 0;
  for (const ParamLayout& l : layouts_) n += l.numel_of(rank);
  return n;
}

}  // namespace qshard
