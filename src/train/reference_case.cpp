#include "train/reference_case.h"

#include "base/config.h"
#include "io/file.h"
#include "io/safetensors.h"

namespace qshard {
namespace {

using nlohmann::json;

int64_t positive(const json& j, const char* key, const std::string& where) {
  if (!j.contains(key) || !j[key].is_number_integer() || j[key].get<int64_t>() < 1)
    fail("{}: \"{}\" must be a positive integer", where, key);
  return j[key].get<int64_t>();
}

// This rank's rows of a [steps, accum, world·batch, T] tensor: the case's own rows where the number
// of ranks is the case's, otherwise the same rows of the global batch dealt out over the ranks
// there are.
std::vector<int32_t> own_rows(const SafetensorsFile& file, const char* name, const ReferenceCase& c,
                              int rank) {
  const Tensor& t = file[name];
  const Shape expected{c.steps, c.accum, c.ranks * c.B, c.T};
  if (!(t.shape == expected))
    fail("{}: {} expected {}, found {}", file.path(), name, expected.str(), t.shape.str());
  const int32_t* values = t.as<int32_t>();
  const int64_t global = c.ranks * c.B * c.T, own = c.B * c.T;
  std::vector<int32_t> rows;
  for (int64_t i = 0; i < c.steps * c.accum; ++i) {
    const int32_t* from = values + i * global + rank * own;
    rows.insert(rows.end(), from, from + own);
  }
  return rows;
}

}  // namespace

ReferenceCase load_reference_case(const std::string& folder, const World& world, bool ranks_any) {
  ReferenceCase c;
  const std::string path = folder + "/train.json", config = folder + "/config.json";
  c.train = parse_json(read_file(path), path);
  c.config = Qwen3Config::from_json(parse_json(read_file(config), config), config);
  const int64_t case_ranks = positive(c.train, "world", path),
                rows = case_ranks * positive(c.train, "batch", path);
  c.ranks = world.size();
  if (c.ranks != case_ranks && !ranks_any)
    fail_usage("{}: the case is for {} ranks, this run has {}: use mpirun -n {} or --ranks-any",
               folder, case_ranks, c.ranks, case_ranks);
  if (rows % c.ranks)
    fail_usage("{}: {} rows a micro-batch do not divide over {} ranks", folder, rows, c.ranks);
  c.B = rows / c.ranks;
  c.T = positive(c.train, "seq", path);
  c.accum = positive(c.train, "accum", path);
  c.steps = positive(c.train, "steps", path);
  const SafetensorsFile batches(folder + "/batches.safetensors");
  c.inputs = own_rows(batches, "inputs", c, world.rank());
  c.labels = own_rows(batches, "labels", c, world.rank());
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const int64_t V = c.config.vocab_size;
    if (c.inputs[i] < 0 || c.inputs[i] >= V ||
        (c.labels[i] != -100 && (c.labels[i] < 0 || c.labels[i] >= V)))
      fail("{}: id {} or label {} is outside the vocabulary of {}", batches.path(), c.inputs[i],
           c.labels[i], V);
  }
  return c;
}

}  // namespace qshard
