// The steps of a layer as they are told, with what was measured in each.
#pragma once

#include "train/walkthrough_records.h"

namespace qshard {

// unit: the layer that is told.
Document describe_steps(const std::string& unit, const std::vector<RankRecord>& ranks);

// The index in these of the step that a span belongs to, or null.
Document step_of(const Span& span, const std::string& unit, const MeshShape& mesh);

}  // namespace qshard
