// What every rank saw of a walkthrough's step, and what its spans belong to.
#pragma once

#include "base/trace.h"
#include "train/ckpt_tools.h"
#include "train/engine.h"

namespace qshard {

// Elements and bytes are read from the rank's buffers.
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

  int64_t buffer_elements() const;  // of all parameters, padding included
  int64_t buffer_bytes() const;
};

// The ranks between which a call of a transport moves, see Sharding.
enum class Among : uint8_t { shards, group, replicas };
const char* among_name(Among among);

// Of a step, by each transport's own count.
struct StepTraffic {
  Traffic shards, group, replicas;

  Traffic sum() const {
    Traffic all = shards;
    return (all += group) += replicas;
  }
};

struct RankRecord {
  int rank = 0, replica = 0, place = 0;  // see [Note: Mesh]
  std::string host;
  MeshShape mesh;
  std::vector<Span> spans;
  std::vector<UnitRecord> units;  // root, then the layers
  StepTraffic traffic;
  std::vector<std::pair<std::string, int64_t>> memory;  // allocated, by segment
  uint64_t weights = 0;  // a hash of this rank's rows of the f32 weights after the step

  const UnitRecord& unit_of(const Span& span) const;  // for a replica sum the unit that is summed
};

void to_json(Document& json, const RankRecord& record);
void from_json(const Document& json, RankRecord& record);

bool is_transport(const Span& span);  // a call of a transport, not an operator
Among among(const Span& span, const MeshShape& mesh);
int ranks_among(Among among, const MeshShape& mesh);

// All units; sizes from the transport of the shards.
std::vector<UnitRecord> record_units(Engine& engine);
std::vector<std::pair<std::string, int64_t>> record_memory(const Device& device);
// Since `before`, which is the same of an earlier moment.
StepTraffic record_traffic(const Sharding& sharding, const StepTraffic& before = {});
uint64_t hash_weights(Engine& engine, Device& device);

}  // namespace qshard
