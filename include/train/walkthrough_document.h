// The walkthrough's document from the ranks' records; pure arithmetic over what was measured.
#pragma once

#include "train/walkthrough.h"
#include "train/walkthrough_records.h"

namespace qshard {

// Everything but the checks.
Document walkthrough_document(const WalkthroughOptions& options,
                              const std::vector<RankRecord>& ranks);

}  // namespace qshard
