#include "train/walkthrough_checks.h"

#include <cmath>
#include <cstring>

#include "backends.h"
#include "io/safetensors.h"
#include "model/qwen3_params.h"
#include "train/export.h"

namespace qshard {
namespace {

// The largest relative error of rounding to a 16-bit dtype.
double roundoff_of(DType dtype) { return dtype == DType::fp16 ? 0x1p-11 : 0x1p-8; }

double relative_l2(double difference, double norm) {
  if (!std::isfinite(difference)) return INFINITY;
  return difference == 0 ? 0 : std::sqrt(difference) / (std::sqrt(norm) + 1e-30);
}

}  // namespace

double mean_gradient_bound(const std::string& transport, DType reduce_dtype,
                           const MeshShape& mesh) {
  if (reduce_dtype == DType::f32) return 0;
  auto roundings = [&](int ranks) { return transport == "nccl" ? ranks : 1; };
  int n = roundings(mesh.shards);
  if (mesh.replicas > 1) n += roundings(mesh.replicas) + 1;
  return std::pow(1 + roundoff_of(reduce_dtype), n) - 1;
}

WalkthroughCheck check_mean_gradient(const WalkthroughOptions& o, const Mesh& mesh, Device& device,
                                     const Unit& unit, const StepRecorder& recorder) {
  constexpr int64_t kPart = 1 << 16;
  const World& world = mesh.world();
  const double terms = world.size() + static_cast<double>(o.accumulation);
  const DType moved = o.fsdp.reduce_dtype;
  const double relative = terms * 0x1p-22 + mean_gradient_bound(o.transport, moved, mesh.shape());
  // fp16 has no smaller unit than 2^-24, of gradients times the scale of the loss.
  const double roundings =
      static_cast<double>(o.accumulation) + (mesh.shape().replicas > 1 ? 2 : 0);
  const double smallest =
      moved == DType::fp16 ? roundings * 0x1p-25 / recorder.loss_scale() : 1e-37;
  double worst = 0;  // share of the bound
  double difference = 0, norm = 0;
  for (int i = 0; i < unit.size(); ++i) {
    const std::vector<float>& local = recorder.gradient(i);
    const std::vector<float> own = host_values(device, unit.grad_shard(i));
    const ParamLayout& layout = unit.layout()[i];
    const int64_t first = unit.rows(i).begin * layout.row_numel;
    for (int64_t at = 0; at < static_cast<int64_t>(local.size()); at += kPart) {
      const int64_t n = std::min(kPart, static_cast<int64_t>(local.size()) - at);
      std::vector<double> sums(2 * n);
      for (int64_t j = 0; j < n; ++j) {
        sums[j] = local[at + j];
        sums[n + j] = recorder.magnitude(i)[at + j];
      }
      world.all_reduce_sum(sums.data(), static_cast<int>(2 * n));
      for (int64_t j = 0; j < n; ++j) {
        const int64_t k = at + j - first;
        if (k < 0 || k >= static_cast<int64_t>(own.size())) continue;
        const double mean = sums[j] / world.size(), bound = sums[n + j] / world.size() * relative;
        const double error = std::abs(own[k] - mean);
        const double share = error == 0 ? 0 : error / (bound + smallest);
        worst = std::isfinite(share) ? std::max(worst, share) : INFINITY;
        difference += error * error;
        norm += mean * mean;
      }
    }
  }
  double sums[2] = {difference, norm};
  world.all_reduce_sum(sums, 2);
  world.all_reduce_max(&worst, 1);
  return {"mean gradient = average over ranks of the ranks' own gradients",
          fmt::format("to the rounding of {}: {:.1e} of the ranks' magnitudes",
                      dtype_name(o.fsdp.reduce_dtype), relative),
          fmt::format("relative L2 difference {:.1e}, at most {:.2f} of the rounding bound",
                      relative_l2(sums[0], sums[1]), worst),
          worst <= 1 && sums[1] > 0};
}

void set_weights(const WalkthroughOptions& o, const World& world, Qwen3Model& model) {
  if (o.reference.empty()) return model.init_parameters(o.seed);
  std::unique_ptr<HfWeights> weights;
  collectively(world, [&] { weights = std::make_unique<HfWeights>(o.reference); });
  import_weights(world, model, *weights, [](const std::string&) {});
}

WalkthroughCheck check_single_process(const WalkthroughOptions& o, const World& world,
                                      Backend& backend, TokenBatch batch,
                                      const StepRecorder& recorder) {
  WalkthroughCheck check{"the layer's output = that of one process with all weights", "", "", true};
  const double limit = o.fsdp.param_dtype == DType::f32 ? 1e-6 : roundoff_of(o.fsdp.param_dtype);
  check.expected = fmt::format("relative L2 difference below {:.0e}, on rank 0's tokens", limit);
  collectively(world, [&] {
    if (world.rank() != 0) return;
    const std::unique_ptr<World> alone = World::alone();
    Trace trace;
    StepRecorder own(*backend.device);
    const TracedBackend traced(backend, trace, &own);
    WalkthroughOptions cut = o;
    if (o.reference.empty()) cut.config.num_hidden_layers = o.layer + 1;  // or all that it holds
    cut.fsdp.mesh = "full";
    cut.fsdp.layers_per_unit = 1;
    cut.fsdp.reshard_ranks = 0;
    Engine engine(cut.config, cut.fsdp, AdamWOptions(), o.transport, o.batch, o.seq, *alone,
                  backend);
    set_weights(cut, *alone, engine.model());
    const Unit& unit = engine.model().unit(static_cast<int>(cut.unit()));
    own.start(unit.name(), unit.name(), unit.layout(), o.fsdp.param_dtype);
    engine.evaluate({batch});
    const Recorded &a = recorder.tensor("10 residual/add/sum"),
                   &b = own.tensor("10 residual/add/sum");
    double difference = 0, norm = 0;
    for (size_t i = 0; i < b.values.size(); ++i) {
      difference += (double{a.values[i]} - b.values[i]) * (double{a.values[i]} - b.values[i]);
      norm += double{b.values[i]} * b.values[i];
    }
    const double error = relative_l2(difference, norm);
    const bool same =
        std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(float)) == 0;
    check.ok = error <= limit && norm > 0 && a.values.size() == b.values.size();
    check.found = same ? fmt::format("bit for bit the same, {} values", a.values.size())
                       : fmt::format("{:.1e}", error);
  });
  return check;
}

// --- operators against a reference

namespace {

// Values [N, cols] of an operator, or columns of them.
struct Output {
  const char* reference;  // name in activations.safetensors
  const char* key;        // in the recorder
  int64_t begin, cols;
};

// q-norm and k-norm run in one pass with RoPE: their output is nowhere in memory, and is put
// together here from what the pass read and left.
Recorded normed_heads(const StepRecorder& recorder, const LayerShape& s, bool query) {
  const Recorded& qkv = recorder.tensor("2 q/k/v/linear/y");
  const Recorded& rstd = recorder.tensor("3+4 q-norm, k-norm, RoPE/qk_norm_rope/rstd");
  const std::vector<float>& weight = recorder.parameter(query ? kQNorm : kKNorm);
  const int64_t heads = query ? s.H : s.K, first = query ? 0 : s.H;
  Recorded out{s.N, heads * s.D, {}};
  for (int64_t n = 0; n < s.N; ++n)
    for (int64_t h = first; h < first + heads; ++h)
      for (int64_t d = 0; d < s.D; ++d)
        out.values.push_back(qkv.values[n * qkv.cols + h * s.D + d] *
                             rstd.values[n * rstd.cols + h] * weight[d]);
  return out;
}

Recorded columns(const Recorded& from, int64_t begin, int64_t cols) {
  Recorded out{from.rows, cols, {}};
  for (int64_t r = 0; r < from.rows; ++r)
    out.values.insert(out.values.end(), from.values.begin() + r * from.cols + begin,
                      from.values.begin() + r * from.cols + begin + cols);
  return out;
}

}  // namespace

std::vector<WalkthroughCheck> check_activations(const WalkthroughOptions& o, const World& world,
                                                const LayerShape& s, const StepRecorder& recorder) {
  const int64_t HD = s.H * s.D, KD = s.K * s.D;
  const char *qkv = "2 q/k/v/linear/y", *qk = "3+4 q-norm, k-norm, RoPE/qk_norm_rope/qk_out";
  const Output outputs[] = {
      {"step00_hidden_states", "1 input RMSNorm/rms_norm/x", 0, s.C},
      {"step01_input_layernorm", "1 input RMSNorm/rms_norm/y", 0, s.C},
      {"step02_q", qkv, 0, HD},
      {"step02_k", qkv, HD, KD},
      {"step02_v", qkv, HD + KD, KD},
      {"step03_q_norm", nullptr, 0, HD},
      {"step03_k_norm", nullptr, HD, KD},
      {"step04_q_rope", qk, 0, HD},
      {"step04_k_rope", qk, HD, KD},
      {"step05_attention", "5 attention/attention/o", 0, HD},
      {"step06_o_proj", "6 o_proj/linear/y", 0, s.C},
      {"step07_residual", "7+8 residual, RMSNorm/add_rms_norm/sum", 0, s.C},
      {"step08_post_attention_layernorm", "7+8 residual, RMSNorm/add_rms_norm/y", 0, s.C},
      {"step09_gate", "9 SwiGLU MLP/swiglu/gu", 0, s.F},
      {"step09_up", "9 SwiGLU MLP/swiglu/gu", s.F, s.F},
      {"step09_fused", "9 SwiGLU MLP/swiglu/a", 0, s.F},
      {"step09_mlp", "10 residual/add/delta", 0, s.C},
      {"step10_residual", "10 residual/add/sum", 0, s.C}};
  const double limit = o.fsdp.param_dtype == DType::f32    ? 1e-5
                       : o.fsdp.param_dtype == DType::fp16 ? 5e-3
                                                           : 3e-2;
  std::unique_ptr<SafetensorsFile> file;
  collectively(world, [&] {
    file = std::make_unique<SafetensorsFile>(o.reference + "/activations.safetensors");
    for (const Output& out : outputs)
      if ((*file)[out.reference].numel() != world.size() * s.N * out.cols)
        fail("{}: {} {} does not hold {} values", file->path(), out.reference,
             file->shape(out.reference).str(), world.size() * s.N * out.cols);
  });
  std::vector<WalkthroughCheck> checks;
  for (const Output& out : outputs) {
    const Recorded ours = out.key ? columns(recorder.tensor(out.key), out.begin, out.cols)
                                  : normed_heads(recorder, s, out.begin == 0);
    std::vector<float> truth(ours.values.size());
    file->read_f32(out.reference, world.rank() * static_cast<int64_t>(truth.size()),
                   static_cast<int64_t>(truth.size()), truth.data());
    double sums[2] = {0, 0};
    for (size_t i = 0; i < truth.size(); ++i) {
      sums[0] += (double{ours.values[i]} - truth[i]) * (double{ours.values[i]} - truth[i]);
      sums[1] += double{truth[i]} * truth[i];
    }
    world.all_reduce_sum(sums, 2);
    const double error = relative_l2(sums[0], sums[1]);
    checks.push_back({fmt::format("{} as in the reference", out.reference),
                      fmt::format("relative L2 difference below {:.0e}", limit),
                      fmt::format("{:.1e}", error), error <= limit});
  }
  return checks;
}

}  // namespace qshard
