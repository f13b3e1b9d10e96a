// Where every element of a unit's parameters lives: the only place that computes an offset, a
// padding or an owner of a shard. See [Note: Padded Shard(0)] in comm/collectives.h.
#pragma once

#include <vector>

#include "comm/collectives.h"
#include "tensor/param_spec.h"

namespace qshard {

// Rows [begin, end) of a parameter's dimension 0; empty when begin == end.
struct RowRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

struct ParamLayout {
  int64_t rows;       // D0
  int64_t row_numel;  // elements of one row
  int64_t chunk;      // ceil(rows / ranks)
  int64_t offset;     // first element in the unit's full buffer
  int ranks;

  RowRange rows_of(int rank) const;  // that rank's true rows
  int64_t numel_of(int rank) const { return rows_of(rank).size() * row_numel; }
  int64_t owner_of(int64_t row) const { return row / chunk; }
  int64_t padded_numel() const { return chunk * ranks * row_numel; }
  Piece piece() const { return {offset, chunk * row_numel}; }
};

class UnitLayout {
 public:
  UnitLayout(std::vector<ParamSpec> params, int ranks);
  const std::vector<ParamSpec>& params() const { return params_; }
  const ParamLayout& operator[](int i) const { return layouts_[i]; }
  int size() const { return static_cast<int>(params_.size()); }
  int64_t elements() const { return elements_; }  // of the full buffer
  std::vector<Piece> pieces() const;
  int64_t numel() const;                // of all parameters, without padding
  int64_t shard_numel(int rank) const;  // without padding

 private:
  std::vector<ParamSpec> params_;
  std::vector<ParamLayout> layouts_;
  int64_t elements_ = 0;
};

}  // namespace qshard
