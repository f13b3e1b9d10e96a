#include "train/export.h"

#include <memory>

#include "device/staging.h"
#include "model/qwen3_params.h"

namespace qshard {
namespace {

struct ShardedTensor {
  const ParamSpec* spec;
  Tensor rows;  // this rank's
};

std::vector<ShardedTensor> sharded_tensors(Qwen3Model& model, ExportWhat what) {
  std::vector<ShardedTensor> tensors;
  for (int u = 0; u < model.num_units(); ++u) {
    const Unit& unit = model.unit(u);
    for (int i = 0; i < unit.size(); ++i)
      tensors.push_back({&unit.layout().params()[i],
                         what == ExportWhat::weights ? unit.master(i) : unit.grad_shard(i)});
  }
  return tensors;
}

}  // namespace

static void export_replica(const World& world, Qwen3Model& model, ExportWhat what,
                           const std::string& path, float scale) {
  const std::vector<ShardedTensor> tensors = sharded_tensors(model, what);
  std::unique_ptr<SafetensorsWriter> writer;  // on rank 0
  collectively(world, [&] {
    if (world.rank() != 0) return;
    std::vector<SafetensorsEntry> entries;
    for (const ShardedTensor& t : tensors)
      entries.push_back({t.spec->name, DType::f32, t.spec->shape});
    writer = std::make_unique<SafetensorsWriter>(path, std::move(entries));
  });
  Staging staging(model.device());
  for (const ShardedTensor& t : tensors) {
    const std::span<const float> rows = staging.read(t.rows);
    std::vector<float> values = gather_to_rank0(world, rows.data(), std::ssize(rows));
    for (float& v : values) v *= scale;
    collectively(world, [&] {
      if (writer) writer->append(Tensor::of(values.data(), t.spec->shape));
    });
  }
  collectively(world, [&] {
    if (writer) writer->commit();
  });
}

void export_model(const Mesh& mesh, Qwen3Model& model, ExportWhat what, const std::string& path,
                  float scale) {
  mesh.on_first_replica([&] { export_replica(mesh.shards(), model, what, path, scale); });
}

void import_weights(const World& world, Qwen3Model& model, const HfWeights& weights,
                    const std::function<void(const std::string&)>& warn) {
  Staging staging(model.device());
  collectively(world, [&] {
    weights.require(all_params(model.config()));
    for (int u = 0; u < model.num_units(); ++u) {
      const Unit& unit = model.unit(u);
      for (int i = 0; i < unit.size(); ++i) {
        const ParamLayout& layout = unit.layout()[i];
        const RowRange rows = unit.rows(i);
        staging.write(unit.master(i), [&](std::span<float> values) {
          weights.read_f32(unit.layout().params()[i].name, rows.begin * layout.row_numel,
                           std::ssize(values), values.data());
        });
      }
    }
  });
  if (model.config().tie_word_embeddings) warn_of_tied_head(world, weights, warn);
  model.masters_written();
}

}  // namespace qshard
