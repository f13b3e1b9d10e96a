#include "train/verify.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include "base/config.h"
#include "train/export.h"
#include "train/metrics.h"
#include "train/reference_case.h"

namespace qshard {
namespace {

using nlohmann::json;

// Runs fn, which reads train.json, and names the file when a field is missing or has another type.
template <typename Fn>
auto reading_train_json(const VerifyOptions& options, Fn fn) {
  try {
    return fn();
  } catch (const json::exception& error) {
    fail("{}/train.json: {}; expected the fields of test/reference/README.md", options.folder,
         error.what());
  }
}

// Where the replay writes what it compares: the user's folder, or one that goes away.
class OutputFolder {
 public:
  OutputFolder() = default;
  OutputFolder(const OutputFolder&) = delete;
  ~OutputFolder() {
    std::error_code ignored;
    if (temporary_) std::filesystem::remove_all(path_, ignored);
  }
  void create(const std::string& wanted) {
    temporary_ = wanted.empty();
    path_ =
        temporary_
            ? (std::filesystem::temp_directory_path() / fmt::format("qshard-verify-{}", getpid()))
                  .string()
            : wanted;
    std::filesystem::create_directories(path_);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool temporary_ = false;
};

AdamWOptions optimizer(const json& o) {
  AdamWOptions a;
  a.beta1 = o.at("betas").at(0);
  a.beta2 = o.at("betas").at(1);
  a.eps = o.at("eps");
  a.weight_decay = o.at("weight_decay");
  a.clip = o.at("clip");
  a.decay_matrices_only = o.at("decay") == "matrices";
  return a;
}

VerifyRow compare_steps(const char* quantity, const json& results, const json& expected) {
  VerifyRow row{quantity, 0, 0, 0, ""};
  for (size_t s = 0; s < expected.size(); ++s) {
    const double truth = expected[s].at(quantity), ours = results[s].at(quantity);
    double error = ours == truth ? 0 : std::abs(ours - truth) / std::abs(truth);
    if (!std::isfinite(error)) error = INFINITY;
    if (error > row.error) row.error = error, row.where = fmt::format("step {}", s + 1);
  }
  return row;
}

// PyTorch's own error and the limit that follows from it.
void set_limit(VerifyRow& row, const ReferenceCase& c, const std::string& dtype, const char* key,
               double f32_floor) {
  row.pytorch = c.train.at("pytorch_fsdp2_error").at(dtype).at(key);
  row.limit = dtype == "f32" ? std::max(3 * row.pytorch, f32_floor) : 2 * row.pytorch;
}

double norm_of(const SafetensorsFile& file) {
  double sum = 0;
  for (const std::string& name : file.names()) {
    std::vector<float> values(file[name].numel());
    file.read_f32(name, 0, file[name].numel(), values.data());
    for (float v : values) sum += double{v} * v;
  }
  return std::sqrt(sum);
}

// A case may hold the gradient of step 1 as it is before clipping or as the optimizer uses it; its
// own norm tells which. Returns the factor for ours.
float gradient_scale(const VerifyOptions& options, const ReferenceCase& c, double clip) {
  const double norm = c.train.at("expected").at(0).at("grad_norm");
  const float factor = clip_factor(norm, clip);
  const double recorded = norm_of(SafetensorsFile(options.folder + "/step1_grads.safetensors"));
  return std::abs(recorded - norm * factor) < std::abs(recorded - norm) ? factor : 1.0f;
}

json replay(ReferenceCase& c, Engine& engine, const std::string& out, float grad_scale) {
  const double lr = c.train.at("optim").at("lr");
  json results = json::array();
  const int64_t micro = c.B * c.T;
  for (int64_t s = 0; s < c.steps; ++s) {
    std::vector<TokenBatch> batches;
    for (int64_t a = 0; a < c.accum; ++a) {
      const int64_t at = (s * c.accum + a) * micro;
      batches.push_back({&c.inputs[at], &c.labels[at]});
    }
    StepResult r = engine.compute_gradients(batches);
    for (; r.overflow; r = engine.compute_gradients(batches))
      engine.update(r, lr);  // lowers the scale of the loss: the truth skips no step
    if (s == 0)
      export_model(engine.mesh(), engine.model(), ExportWhat::gradients,
                   out + "/step1_grads.safetensors", grad_scale);
    engine.update(r, lr);
    results.push_back(
        {{"step", s + 1}, {"loss", r.loss}, {"grad_norm", r.grad_norm}, {"tokens", r.kept}});
  }
  export_model(engine.mesh(), engine.model(), ExportWhat::weights, out + "/final.safetensors");
  return results;
}

}  // namespace

VerifyRow compare_files(const std::string& quantity, const std::string& ours_path,
                        const std::string& truth_path) {
  const SafetensorsFile ours(ours_path), truth(truth_path);
  VerifyRow row{quantity, 0, 0, 0, ""};
  for (const std::string& name : ours.names())
    if (!truth.contains(name))
      fail("{}: tensor {} is missing, nothing to compare with", truth_path, name);
  for (const std::string& name : truth.names()) {
    const int64_t n = truth[name].numel();
    if (!(ours[name].shape == truth[name].shape))
      fail("{}: {} expected {}, found {}", ours_path, name, truth[name].shape.str(),
           ours[name].shape.str());
    std::vector<float> a(n), b(n);
    ours.read_f32(name, 0, n, a.data());
    truth.read_f32(name, 0, n, b.data());
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; ++i) {
      difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
      norm += double{b[i]} * b[i];
    }
    double error = std::sqrt(difference) / (std::sqrt(norm) + 1e-30);
    if (!std::isfinite(error)) error = INFINITY;
    if (error > row.error) row.error = error, row.where = name;
  }
  return row;
}

namespace {

std::vector<VerifyRow> compare(const VerifyOptions& options, const ReferenceCase& c,
                               const json& results, const std::string& out) {
  const json& expected = c.train.at("expected");
  std::vector<VerifyRow> rows = {
      compare_steps("loss", results, expected), compare_steps("grad_norm", results, expected),
      compare_files("step1_grads", out + "/step1_grads.safetensors",
                    options.folder + "/step1_grads.safetensors"),
      compare_files("final", out + "/final.safetensors", options.folder + "/final.safetensors")};
  const std::string& dtype = options.param_dtype;
  set_limit(rows[0], c, dtype, "loss", 1e-6);
  set_limit(rows[1], c, dtype, "grad_norm", 3e-6);
  set_limit(rows[2], c, dtype, "step1_grads_rel_l2", 1e-5);
  set_limit(rows[3], c, dtype, "final_rel_l2", 2e-5);
  VerifyRow kept{"tokens", 0, 0, 0, ""};
  for (size_t s = 0; s < expected.size(); ++s)
    if (results[s]["tokens"] != expected[s].at("tokens"))
      kept.error = 1, kept.where = fmt::format("step {}", s + 1);
  rows.push_back(kept);
  return rows;
}

}  // namespace

VerifyReport verify_reference(const VerifyOptions& options, World& world, Backend& backend) {
  ReferenceCase c;
  FsdpOptions fsdp = options.fsdp;
  AdamWOptions adamw;
  OutputFolder folder;  // on rank 0
  float grad_scale = 1;
  std::unique_ptr<HfWeights> weights;
  collectively(world, [&] {
    fsdp.param_dtype = parse_dtype(options.param_dtype);
    fsdp.reduce_dtype = parse_dtype(options.reduce_dtype);
    fsdp.activation_checkpoint = parse_activation_checkpoint(options.activation_checkpoint);
    c = load_reference_case(options.folder, world, options.ranks_any);
    reading_train_json(options, [&] {
      adamw = optimizer(c.train.at("optim"));
      if (static_cast<int64_t>(c.train.at("expected").size()) != c.steps)
        fail("{}/train.json: {} steps, but {} expected results", options.folder, c.steps,
             c.train["expected"].size());
    });
    weights = std::make_unique<HfWeights>(options.folder);
    if (world.rank() == 0) {
      grad_scale =
          reading_train_json(options, [&] { return gradient_scale(options, c, adamw.clip); });
      folder.create(options.out);
    }
  });
  Engine engine(c.config, fsdp, adamw, options.transport, c.B, c.T, world, backend);
  import_weights(world, engine.model(), *weights,
                 [](const std::string& text) { say("warning  {}", text); });
  const std::string& out = folder.path();
  const json results = replay(c, engine, out, grad_scale);

  VerifyReport report;
  report.transport = engine.collectives().name();
  if (engine.scaler()) report.loss_scale = engine.scaler()->scale();
  collectively(world, [&] {
    if (world.rank() != 0) return;
    report.rows = reading_train_json(options, [&] { return compare(options, c, results, out); });
    report.ok = std::all_of(report.rows.begin(), report.rows.end(),
                            [](const VerifyRow& row) { return row.ok(); });
    if (options.out.empty()) return;
    std::ofstream file(out + "/result.json");
    file << results.dump(1) << '\n';
    if (!file.flush()) fail("cannot write {}/result.json", out);
  });
  report.ok = world.broadcast(report.ok ? "ok" : "failed", 0) == "ok";
  return report;
}

}  // namespace qshard
