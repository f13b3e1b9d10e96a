// The steps of a layer as they are told, with what was measured in each.
#pragma once

#include "train/walkthrough_records.h"

namespace qshard {

// The layer that is told, and the unit that holds it: operators have the name of their layer, the
// transport's calls and AdamW that of the unit.
struct Told {
  std::string layer, unit;
};

Document describe_steps(const Told& told, const std::vector<RankRecord>& ranks);

// The index in these of the step that a span belongs to, or null.
Document step_of(const Span& span, const Told& told, const MeshShape& mesh);

}  // namespace qshard
