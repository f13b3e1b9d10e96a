#include "train/walkthrough_records.h"

#include <xxhash.h>

#include <algorithm>

#include "train/step_recorder.h"

namespace qshard {
namespace {

Traffic difference(const Traffic& a, const Traffic& b) {
  return {a.gathers - b.gathers,
          a.gather_logical_bytes - b.gather_logical_bytes,
          a.gather_copied_bytes - b.gather_copied_bytes,
          a.reduces - b.reduces,
          a.reduce_logical_bytes - b.reduce_logical_bytes,
          a.reduce_copied_bytes - b.reduce_copied_bytes};
}

std::vector<int64_t> numbers_of(const Traffic& t) {
  return {t.gathers, t.gather_logical_bytes, t.gather_copied_bytes,
          t.reduces, t.reduce_logical_bytes, t.reduce_copied_bytes};
}

Traffic traffic_of(const Document& n) { return {n[0], n[1], n[2], n[3], n[4], n[5]}; }

// The name of a unit's replica sum is the unit's with this behind it.
bool is_replica_sum(const Span& span) { return span.unit.ends_with(ReplicaSum::kNameSuffix); }

}  // namespace

int64_t UnitRecord::buffer_elements() const {
  int64_t elements = 0;
  for (const ParamRecord& p : params) elements += p.shard_elements;
  return elements;
}

int64_t UnitRecord::buffer_bytes() const {
  int64_t bytes = 0;
  for (const ParamRecord& p : params) bytes += p.shard_bytes;
  return bytes;
}

const char* among_name(Among among) {
  constexpr const char* names[] = {"shards", "group", "replicas"};
  return names[static_cast<int>(among)];
}

bool is_transport(const Span& span) {
  return span.lane == Lane::gather || span.lane == Lane::reduce;
}

Among among(const Span& span, const MeshShape& mesh) {
  if (is_replica_sum(span)) return Among::replicas;
  return mesh.group > 0 && span.ranks == mesh.group ? Among::group : Among::shards;
}

int ranks_among(Among among, const MeshShape& mesh) {
  return among == Among::shards ? mesh.shards : among == Among::group ? mesh.group : mesh.replicas;
}

const UnitRecord& RankRecord::unit_of(const Span& span) const {
  std::string name = span.unit;
  if (is_replica_sum(span)) name.resize(name.size() - std::string(ReplicaSum::kNameSuffix).size());
  const auto found =
      std::find_if(units.begin(), units.end(), [&](const auto& u) { return u.name == name; });
  QS_CHECK(found != units.end(), "a span of the unknown unit {}", span.unit);
  return *found;
}

std::vector<UnitRecord> record_units(Engine& engine) {
  std::vector<UnitRecord> units;
  for (int u = 0; u < engine.model().num_units(); ++u) {
    const Unit& unit = engine.model().unit(u);
    UnitRecord& record = units.emplace_back();
    record.name = unit.name();
    for (int i = 0; i < unit.size(); ++i) {
      const ParamSpec& spec = unit.layout().params()[i];
      const Tensor shard = engine.collectives().shard(u, i), master = unit.master(i);
      record.params.push_back({spec.name,
                               {spec.shape.begin(), spec.shape.end()},
                               unit.rows(i).begin,
                               master.numel() / unit.layout()[i].row_numel,
                               master.numel(),
                               shard.numel(),
                               static_cast<int64_t>(shard.bytes())});
    }
  }
  return units;
}

std::vector<std::pair<std::string, int64_t>> record_memory(const Device& device) {
  std::vector<std::pair<std::string, int64_t>> memory;
  for (Segment segment : {Segment::shards, Segment::moments, Segment::params, Segment::gradients,
                          Segment::activations, Segment::workspace, Segment::communication})
    memory.emplace_back(segment_name(segment), device.bytes_held(segment));
  return memory;
}

StepTraffic record_traffic(const Sharding& sharding, const StepTraffic& before) {
  auto since = [](const std::unique_ptr<Collectives>& transport, const Traffic& earlier) {
    return transport ? difference(transport->traffic(), earlier) : Traffic();
  };
  return {since(sharding.collectives, before.shards), since(sharding.group_gathers, before.group),
          since(sharding.replica_sums, before.replicas)};
}

uint64_t hash_weights(Engine& engine, Device& device) {
  uint64_t hash = 0;
  for (int u = 0; u < engine.model().num_units(); ++u)
    for (int i = 0; i < engine.model().unit(u).size(); ++i) {
      const std::vector<float> values = host_values(device, engine.model().unit(u).master(i));
      hash = XXH3_64bits_withSeed(values.data(), values.size() * sizeof(float), hash);
    }
  return hash;
}

void to_json(Document& json, const RankRecord& record) {
  const StepTraffic& t = record.traffic;
  json = {{"rank", record.rank},
          {"replica", record.replica},
          {"place", record.place},
          {"host", record.host},
          {"mesh", {record.mesh.replicas, record.mesh.shards, record.mesh.group}},
          {"spans", record.spans},
          {"memory", record.memory},
          {"weights", record.weights},
          {"traffic", {numbers_of(t.shards), numbers_of(t.group), numbers_of(t.replicas)}}};
  for (const UnitRecord& unit : record.units) {
    Document params = Document::array();
    for (const ParamRecord& p : unit.params)
      params.push_back(
          {p.name, p.shape, p.first_row, p.rows, p.elements, p.shard_elements, p.shard_bytes});
    json["units"].push_back({{"name", unit.name}, {"params", params}});
  }
}

void from_json(const Document& json, RankRecord& record) {
  json.at("rank").get_to(record.rank);
  json.at("replica").get_to(record.replica);
  json.at("place").get_to(record.place);
  json.at("host").get_to(record.host);
  const Document& mesh = json.at("mesh");
  record.mesh.replicas = mesh.at(0), record.mesh.shards = mesh.at(1),
  record.mesh.group = mesh.at(2);
  json.at("spans").get_to(record.spans);
  json.at("memory").get_to(record.memory);
  json.at("weights").get_to(record.weights);
  const Document& t = json.at("traffic");
  record.traffic = {traffic_of(t.at(0)), traffic_of(t.at(1)), traffic_of(t.at(2))};
  for (const Document& u : json.at("units")) {
    UnitRecord& unit = record.units.emplace_back();
    u.at("name").get_to(unit.name);
    for (const Document& p : u.at("params"))
      unit.params.push_back({p[0], p[1], p[2], p[3], p[4], p[5], p[6]});
  }
}

}  // namespace qshard
