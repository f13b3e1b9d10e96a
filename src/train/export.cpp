#include "train/export.h"

#include <set>

namespace qshard {

void export_model(const World& world, Qwen3Model& model, ExportWhat what, const std::string& path,
                  float scale) {
  std::vector<std::vector<float>> values;
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (int u = 0; u < model.num_units(); ++u) {
    Unit& unit = model.unit(u);
    for (int i = 0; i < unit.size(); ++i) {
      const Tensor rows = what == ExportWhat::weights ? unit.master(i) : unit.grad_shard(i);
      values.push_back(gather_to_rank0(world, rows.as<float>(), rows.numel()));
      if (scale != 1)
        for (float& v : values.back()) v *= scale;
      const ParamSpec& spec = unit.layout().params()[i];
      tensors.emplace_back(spec.name, Tensor(values.back().data(), DType::f32, spec.shape));
    }
  }
  collectively(world, [&] {
    if (world.rank() == 0) write_safetensors(path, tensors, {{"format", "pt"}});
  });
}

void import_weights(const World& world, Qwen3Model& model, const SafetensorsFile& file) {
  collectively(world, [&] {
    std::set<std::string> known;
    for (int u = 0; u < model.num_units(); ++u) {
      Unit& unit = model.unit(u);
      for (int i = 0; i < unit.size(); ++i) {
        const ParamSpec& spec = unit.layout().params()[i];
        known.insert(spec.name);
        if (!file.contains(spec.name)) fail("{}: tensor {} is missing", file.path(), spec.name);
        if (!(file[spec.name].shape == spec.shape))
          fail("{}: {} expected {} (from the config), found {}", file.path(), spec.name, spec.shape.str(),
               file[spec.name].shape.str());
        const ParamLayout& layout = unit.layout()[i];
        const RowRange rows = layout.rows_of(world.rank());
        file.read_f32(spec.name, rows.begin * layout.row_numel, rows.size() * layout.row_numel,
                      unit.master(i).as<float>());
      }
    }
    for (const std::string& name : file.names())
      if (!known.count(name) && !(name == "lm_head.weight" && model.config().tie_word_embeddings))
        fail("{}: tensor {} does not belong to this model", file.path(), name);
  });
  for (int u = 0; u < model.num_units(); ++u) {
    model.unit(u).cast_to_compute();
    model.unit(u).publish();
  }
}

}  // namespace qshard
