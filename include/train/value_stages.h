// The values of one parameter on its way through a step, cut to what can be shown.
#pragma once

#include "fsdp/shard_layout.h"
#include "train/ckpt_tools.h"

namespace qshard {

// Index in the unit of the one parameter of the layer whose name ends so; anything else is a usage
// error.
int find_parameter(const UnitLayout& layout, int64_t layer, const std::string& name);

class ValueStages {
 public:
  ValueStages(const ParamSpec& spec, RowRange rows)
      : columns_(spec.shape.row_numel()), total_rows_(spec.shape[0]), rows_(rows) {}

  // full: the values cover all rows, otherwise the rank's own.
  void add(const char* stage, const char* meaning, const std::vector<float>& values, bool full);
  Document take() { return std::move(stages_); }

 private:
  int64_t columns_, total_rows_;
  RowRange rows_;
  Document stages_ = Document::array();
};

}  // namespace qshard
