#include "train/engine.h"

#include <cmath>

#include "backends.h"

namespace qshard {
namespace {

// The lowest rank for which `yes` holds, or size() when there is none; the same on every rank.
int lowest_rank(const World& world, bool yes) {
  double highest = yes ? -world.rank() : -world.size();
  world.all_reduce_max(&highest, 1);
  return static_cast<int>(-highest);
}

// Ranks of the groups over which layers stay sharded from forward to backward; 0: none.
int choose_group(const FsdpOptions& fsdp, int shards, const std::string& transport) {
  const int k = fsdp.reshard_ranks;
  if (!fsdp.reshards_to_group() || k == shards) return 0;
  if (k < 2 || k > shards || shards % k)
    fail_usage(
        "fsdp.reshard_ranks {}: expected a divisor of the {} ranks of a replica, at least 2{}", k,
        shards, k == 1 ? "; to keep whole layers: fsdp.reshard_after_forward false" : "");
  if (transport == "shm")
    fail_usage(
        "fsdp.reshard_ranks {} saves nothing with the transport shm: a node holds each layer once, "
        "so that a gather in backward moves nothing anyway. Leave it 0, or comm.transport mpi",
        k);
  return k;
}

// The largest scale, up to the given one, that makes the weight of a label a power of two.
// Gradients of logits, softmax − onehot, then round the same on any number of ranks, and those near
// −1 best.
float exact_scale(double scale, float weight) {
  return static_cast<float>(std::exp2(std::floor(std::log2(scale * double{weight}))) /
                            double{weight});
}

}  // namespace

MeshShape choose_shape(const FsdpOptions& fsdp, const std::vector<int>& nodes,
                       const std::string& transport) {
  MeshShape shape = choose_mesh(fsdp.mesh, nodes);
  shape.group = choose_group(fsdp, shape.shards, transport);
  if (fsdp.offload_optimizer && !moves_gpu_memory(transport))
    fail_usage(
        "fsdp.offload optimizer takes states from a GPU's memory to the host's; with the transport "
        "{} they are in the host's memory already. Leave it none, or device.backend cuda",
        transport);
  return shape;
}

Sharding make_sharding(const MeshShape& shape, const FsdpOptions& fsdp, World& world,
                       const MakeTransport& make) {
  Sharding sharding;
  sharding.mesh = std::make_unique<Mesh>(world, shape);
  const Mesh& mesh = *sharding.mesh;
  mesh.in_parts([&] { sharding.collectives = make(mesh.shards(), fsdp.full_buffers()); });
  if (shape.replicas > 1) mesh.in_parts([&] { sharding.replica_sums = make(mesh.replicas(), 1); });
  if (shape.group > 0)
    mesh.in_parts([&] { sharding.group_gathers = make(mesh.group(), fsdp.full_buffers()); });
  return sharding;
}

Sharding make_sharding(const TransportOptions& transport, const FsdpOptions& fsdp, World& world,
                       Backend& backend, const WrapTransport& wrap) {
  const std::vector<int> nodes = world.nodes_by_rank();
  MeshShape shape;
  collectively(world,
               [&] { shape = choose_shape(fsdp, nodes, transport_name(transport, backend)); });
  return make_sharding(shape, fsdp, world, [&](World& ranks, int full_buffers) {
    auto made = make_transport(transport, ranks, backend, full_buffers);
    return wrap ? wrap(std::move(made), ranks) : std::move(made);
  });
}

Engine::Engine(const Qwen3Config& config, const FsdpOptions& fsdp, const AdamWOptions& adamw,
               const TransportOptions& transport, int64_t B, int64_t T, World& world,
               Backend& backend)
    : Engine(config, fsdp, adamw, make_sharding(transport, fsdp, world, backend), B, T, backend) {}

Engine::Engine(const Qwen3Config& config, const FsdpOptions& fsdp, const AdamWOptions& adamw,
               Sharding sharding, int64_t B, int64_t T, Backend& backend)
    : world_(sharding.mesh->world()),
      backend_(backend),
      adamw_(adamw),
      divide_factor_(fsdp.gradient_divide_factor),
      sharding_(std::move(sharding)) {
  model_ = std::make_unique<Qwen3Model>(config, fsdp, B, T, sharding_, backend);
  if (fsdp.param_dtype == DType::fp16) scaler_.emplace();
  sums_ = Buffer(*backend.device, DType::f64, {2}, Segment::workspace, "sums of a step");
}

void Engine::zero_sums() const { backend_.device->zero(sums_->data, sums_->bytes()); }

Engine::Sums Engine::read_sums() const {
  double sums[2];
  backend_.device->copy(sums, sums_->data, sizeof sums);
  return {sums[0], sums[1]};
}

int64_t Engine::count_kept(const std::vector<TokenBatch>& batches) const {
  int64_t kept = 0;
  for (const TokenBatch& batch : batches)
    for (int64_t i = 0; i < model_->shape().N; ++i) kept += batch.labels[i] >= 0;
  world_.all_reduce_sum(&kept, 1);
  return kept;
}

StepResult Engine::step(const std::vector<TokenBatch>& micro_batches, double lr) {
  const StepResult result = compute_gradients(micro_batches);
  update(result, lr);
  return result;
}

StepResult Engine::compute_gradients(const std::vector<TokenBatch>& micro_batches) {
  StepResult result;
  result.kept = count_kept(micro_batches);
  if (result.kept == 0) {
    result.updated = false;
    return result;
  }
  const double divisor = divide_factor_ > 0 ? divide_factor_ : static_cast<double>(result.kept);
  if (scaler_) result.loss_scale = scaler_->scale();
  const float weight = static_cast<float>(static_cast<double>(world_.size()) / divisor);
  if (scaler_) applied_loss_scale_ = exact_scale(scaler_->scale(), weight);
  if (graphs_)
    graphs_->gradients(micro_batches, GradFactors::of(weight, applied_loss_scale_, world_.size()),
                       [&](const std::vector<TokenBatch>& batches, const GradFactors* factors) {
                         enqueue_gradients(batches, weight, factors);
                       });
  else
    enqueue_gradients(micro_batches, weight, nullptr);
  const Sums own = read_sums();
  double sums[2] = {own.loss, own.grad_squares};
  world_.all_reduce_sum(sums, 2);
  result.loss = sums[0] / static_cast<double>(result.kept);
  result.grad_norm = std::sqrt(sums[1]);
  if (std::isfinite(result.loss) && std::isfinite(result.grad_norm)) return result;
  // The sums are the same on every rank, so all ranks take the same branch.
  if (result.loss_scale <= 1) fail_not_finite(own.loss, result);
  result.overflow = true;
  result.updated = false;
  return result;
}

void Engine::enqueue_gradients(const std::vector<TokenBatch>& micro_batches, float weight,
                               const GradFactors* factors) {
  const size_t n = micro_batches.size();
  zero_sums();
  for (size_t a = 0; a < n; ++a)
    model_->forward_backward(micro_batches[a], weight,
                             {a == 0, a + 1 == n, applied_loss_scale_, factors}, loss_sum());
  if (mesh().replica() == 0)  // all replicas have the same gradients
    for (int u = 0; u < model_->num_units(); ++u)
      add_grad_sum_squares(model_->unit(u), *backend_.ops, grad_sum());
}

void Engine::fail_not_finite(double own_loss, const StepResult& result) const {
  throw AgreedError(fmt::format(
      "step {}: {} is not finite{} ({}); stopped before the update, the weights are those of "
      "step {}. Lower the learning rate, clip gradients, or check the data",
      steps_done_ + 1, std::isfinite(result.loss) ? "the gradient norm" : "the loss",
      scaler_ ? " at loss scale 1" : "", find_cause(own_loss), steps_done_));
}

// One bad weight reaches every rank with the next gather, and one bad loss every gradient with the
// next reduction: weights are looked at first, gradients not at all.
std::string Engine::find_cause(double own_loss) const {
  const std::string name = bad_parameter();
  const int holder = lowest_rank(world_, !name.empty());
  if (holder < world_.size())
    return fmt::format("rank {} holds a weight of {} that is not finite", holder,
                       world_.broadcast(name, holder));
  const int origin = lowest_rank(world_, !std::isfinite(own_loss));
  if (origin < world_.size())
    return fmt::format("first on rank {}, all weights are finite", origin);
  return "weights and losses of all ranks are finite";
}

// Name of the first parameter of which this rank's rows hold a value that is not finite; or "".
std::string Engine::bad_parameter() const {
  std::string name;
  for (int u = 0; u < model_->num_units(); ++u) {
    Unit& unit = model_->unit(u);
    unit.visit_states(Unit::StateUse::master_is_read, [&](const Unit::States& s) {
      if (!name.empty()) return;
      zero_sums();
      backend_.ops->add_sum_squares(s.master, grad_sum());
      if (!std::isfinite(read_sums().grad_squares)) name = unit.layout().params()[s.param].name;
    });
  }
  return name;
}

void Engine::update(const StepResult& result, double lr) {
  ++steps_done_;
  if (scaler_ && result.kept > 0) scaler_->update(result.overflow);
  if (!result.updated) return;
  ++updates_;  // what AdamW's bias correction counts
  // A snapshot may still be read from the weights.
  backend_.device->order(Queue::downloads, Queue::operators);
  const float scale = clip_factor(result.grad_norm, adamw_.clip);
  const auto enqueue = [&](const UpdateFactors* factors) {
    for (int u = 0; u < model_->num_units(); ++u)
      adamw_update(model_->unit(u), *backend_.ops, adamw_, lr, updates_, scale, factors);
  };
  if (!graphs_) return enqueue(nullptr);
  const auto factors = [&](bool decays) {
    return adamw_step(adamw_, decays, lr, updates_, scale).factors();
  };
  graphs_->update({factors(true), factors(false)}, enqueue);
}

double Engine::evaluate(const std::vector<TokenBatch>& batches) {
  const int64_t kept = count_kept(batches);
  zero_sums();
  for (const TokenBatch& batch : batches) model_->forward(batch, loss_sum());
  const double own_loss = read_sums().loss;
  double loss = own_loss;
  world_.all_reduce_sum(&loss, 1);
  if (!std::isfinite(loss))
    throw AgreedError(fmt::format("the evaluation's loss after step {} is not finite ({})",
                                  steps_done_, find_cause(own_loss)));
  return kept ? loss / static_cast<double>(kept) : 0.0;
}

}  // namespace qshard
