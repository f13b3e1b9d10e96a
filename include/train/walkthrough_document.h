// The walkthrough's document from the ranks' records; pure arithmetic over what was measured.
#pragma once

#include "base/trace.h"
#include "train/walkthrough.h"

namespace qshard {

// What one rank saw. Elements and bytes are read from its buffers.
struct ParamRecord {
  std::string name;
  std::vector<int64_t> shape;
  int64_t first_row = 0, rows = 0;              // true rows of this rank
  int64_t elements = 0;                         // of them, from the master weight's buffer
  int64_t shard_elements = 0, shard_bytes = 0;  // of the transport's buffer, padding included
};
struct UnitRecord {
  std::string name;
  std::vector<ParamRecord> params;
};
struct RankRecord {
  int rank = 0;
  std::string host;
  std::vector<Span> spans;
  std::vector<UnitRecord> units;                        // root, then the layers
  Traffic traffic;                                      // of the step, by the transport's own count
  std::vector<std::pair<std::string, int64_t>> memory;  // allocated, by segment
};

void to_json(Document& json, const RankRecord& record);
void from_json(const Document& json, RankRecord& record);

// Everything but the checks.
Document walkthrough_document(const WalkthroughOptions& options,
                              const std::vector<RankRecord>& ranks);

// Spans of a unit's operators or of the transport's calls for it.
bool is_transport(const Span& span);

}  // namespace qshard
