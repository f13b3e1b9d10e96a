#include "model/qwen3_model.h"

#include "model/qwen3_params.h"

namespace qshard {
namespace {

// Logits of one chunk: large enough that the head's weight is streamed few times, small against the
// layers' activations of the models whose vocabulary makes it matter.
constexpr int64_t kLogitsBytes = int64_t{256} << 20;

int64_t even_chunk(int64_t tokens, int64_t vocab) {
  const int64_t most = std::max<int64_t>(1, kLogitsBytes / (vocab * 4));
  const int64_t chunks = (tokens + most - 1) / most;
  return (tokens + chunks - 1) / chunks;
}

}  // namespace

Qwen3Model::Qwen3Model(const Qwen3Config& config, const FsdpOptions& fsdp, int64_t B, int64_t T,
                       Sharding& sharding, Backend& backend)
    : config_(config),
      param_dtype_(fsdp.param_dtype),
      checkpoint_(fsdp.activation_checkpoint),
      layers_per_unit_(fsdp.layers_per_unit),
      shape_(config, B, T),
      backend_(backend),
      ops_(*backend.ops),
      head_chunk_(even_chunk(shape_.N, config.vocab_size)) {
  FsdpOptions options = fsdp;
  options.reshard_ranks = sharding.mesh->shape().group;  // none where it would be all shards
  make_units(options, sharding);

  Device& device = *backend.device;
  const LayerShape& s = shape_;
  activations_.reserve(layers_.size());
  for (int u = 0; u + 1 < num_units(); ++u) {
    LentMemory lent;
    if (fsdp.gradients_over_activations) lent = LentMemory(units_[u]->grad_shards());
    for (int l = u * layers_per_unit_; l < layers_end(u); ++l)
      activations_.emplace_back(s, param_dtype_, device, layers_[l].name, checkpoint_,
                                l ? &activations_.front() : nullptr, lent);
  }
  workspace_ = std::make_unique<LayerWorkspace>(s, param_dtype_, config.rope_theta, device);
  auto allocate = [&](DType dtype, Shape shape, Segment segment, const char* what) {
    return Buffer(device, dtype, shape, segment, what);
  };
  ids_ = allocate(DType::i32, {s.N}, Segment::activations, "ids");
  labels_ = allocate(DType::i32, {s.N}, Segment::activations, "labels");
  final_ = allocate(DType::f32, {s.N, s.C}, Segment::activations, "final");
  final_rstd_ = allocate(DType::f32, {s.N}, Segment::activations, "final_rstd");
  final_normed_ = allocate(param_dtype_, {s.N, s.C}, Segment::activations, "final_normed");
  logits_ = allocate(DType::f32, {head_chunk_, config.vocab_size}, Segment::workspace, "logits");
  losses_ = allocate(DType::f32, {s.N}, Segment::workspace, "losses");
  d_res_ = allocate(DType::f32, {s.N, s.C}, Segment::workspace, "d_res");
  if (param_dtype_ != DType::f32)
    d_res_p_ = allocate(param_dtype_, {s.N, s.C}, Segment::workspace, "d_res_p");
}

void Qwen3Model::make_units(const FsdpOptions& options, Sharding& sharding) {
  const int64_t L = config_.num_hidden_layers, k = options.layers_per_unit;
  if (k < 1 || k > std::max<int64_t>(L, 1))
    throw AgreedError(
        fmt::format("fsdp.layers_per_unit {}: expected 1 to {}, the model's layers", k, L),
        kExitUsage);
  root_ =
      std::make_unique<Unit>("root", root_params(config_), true, true, options, sharding, backend_);
  std::vector<Unit*> order;
  for (int64_t first = 0; first < L; first += k) {
    const int64_t end = std::min(first + k, L);
    units_.push_back(std::make_unique<Unit>(
        layers_name(first, end), layers_params(config_, first, end), options.keeps_layers(),
        !options.reduce_every_microbatch, options, sharding, backend_));
    order.push_back(units_.back().get());
    for (int64_t l = first; l < end; ++l)
      layers_.push_back(
          {layers_name(l, l + 1), *order.back(), static_cast<int>(l - first) * kLayerParams});
  }
  sharding.finish_setup();
  if (options.offloads()) slots_ = make_slots(options);
  for (int i = 0; i < num_units(); ++i) unit(i).attach(slots_.get());
  prefetch_ = std::make_unique<Prefetch>(*root_, order, options);
}

std::unique_ptr<StateSlots> Qwen3Model::make_slots(const FsdpOptions& options) {
  int64_t largest = 1;
  for (int i = 0; i < num_units(); ++i) largest = std::max(largest, unit(i).shard_elements());
  const int states = options.param_dtype == DType::f32 ? 2 : 3;  // moments, and the master weights
  return std::make_unique<StateSlots>(backend_, states, std::min(options.offload_piece, largest));
}

void Qwen3Model::init_parameters(uint64_t seed) {
  for (int i = 0; i < num_units(); ++i)
    unit(i).init_parameters(seed, static_cast<float>(config_.initializer_range));
}

void Qwen3Model::masters_written() {
  for (int i = 0; i < num_units(); ++i) {
    unit(i).cast_to_compute();
    unit(i).publish();
  }
}

void Qwen3Model::copy_in(TokenBatch batch) {
  backend_.device->enqueue_copy(ids_->data, batch.ids, ids_->bytes());
  backend_.device->enqueue_copy(labels_->data, batch.labels, labels_->bytes());
}

Tensor Qwen3Model::head_weight(bool gradient) const {
  const int i = config_.tie_word_embeddings ? kEmbedTokens : kLmHead;
  return gradient ? root_->grad(i) : root_->param(i);
}

void Qwen3Model::forward(TokenBatch batch, Tensor loss_sum) {
  run_forward(batch, false);
  ops_.mark(root_->name(), "forward", "head and loss");
  head(0, false, loss_sum);
  prefetch_->end_forward();
}

Tensor Qwen3Model::next_logits(const int32_t* ids, int64_t at) {
  run_forward({ids, ids}, false);  // nothing looks at the labels
  ops_.mark(root_->name(), "forward", "head");
  const Tensor logits = logits_.tensor().row_range(0, 1);
  ops_.linear(final_normed_.tensor().row_range(at, at + 1), head_weight(false), logits);
  prefetch_->end_forward();
  return logits;
}

void Qwen3Model::run_forward(TokenBatch batch, bool backward_follows) {
  const int L = static_cast<int>(layers_.size());
  ops_.mark(root_->name(), "forward", "embedding");
  copy_in(batch);
  prefetch_->begin_forward();
  ops_.embedding(ids_, root_->param(kEmbedTokens), L ? activations_[0].x : final_);
  for (int u = 0; u + 1 < num_units(); ++u) {
    prefetch_->enter_forward(u);
    for (int l = u * layers_per_unit_; l < layers_end(u); ++l)
      layer_forward(ops_, shape_, layers_[l], activations_[l], *workspace_,
                    l + 1 < L ? activations_[l + 1].x : final_);
    prefetch_->leave_forward(u, backward_follows);
  }
  ops_.mark(root_->name(), "forward", "final RMSNorm");
  ops_.rms_norm(final_, root_->param(kFinalNorm), shape_.eps, final_normed_, final_rstd_);
}

void Qwen3Model::forward_backward(TokenBatch batch, float weight, MicroBatch micro,
                                  Tensor loss_sum) {
  run_forward(batch, true);
  ops_.mark(root_->name(), "backward", "head and loss");
  prefetch_->begin_backward(micro);
  const bool accumulate = root_->grad_accumulates();
  // Leaves the gradient of final_normed in d_norm.
  head(micro.factors ? Factor::of(&micro.factors->loss) : Factor(weight * micro.loss_scale), true,
       loss_sum);

  ops_.mark(root_->name(), "backward", "final RMSNorm");
  const Tensor d_res = d_res_, d_res_p = param_dtype_ == DType::f32 ? d_res_ : d_res_p_;
  backend_.device->zero(d_res.data, d_res.bytes());
  ops_.rms_norm_grad(workspace_->d_norm, final_, root_->param(kFinalNorm), final_rstd_, d_res,
                     d_res_p.data == d_res.data ? Tensor() : d_res_p, root_->grad(kFinalNorm),
                     accumulate);
  const int last = static_cast<int>(layers_.size()) - 1;
  for (int u = num_units() - 2; u >= 0; --u) {
    prefetch_->enter_backward(u);
    for (int l = layers_end(u) - 1; l >= u * layers_per_unit_; --l) {
      if (checkpoint_ != ActivationCheckpoint::none && l < last)
        layer_recompute(ops_, shape_, layers_[l], activations_[l], *workspace_, checkpoint_);
      layer_backward(ops_, shape_, layers_[l], activations_[l], *workspace_, d_res, d_res_p);
    }
    prefetch_->leave_backward(u);
  }
  ops_.mark(root_->name(), "backward", "embedding");
  const Tensor d_embed = root_->grad(kEmbedTokens);
  if (!config_.tie_word_embeddings && !accumulate)
    backend_.device->zero(d_embed.data, d_embed.bytes());
  ops_.embedding_grad(ids_, d_res, d_embed);
  prefetch_->end_backward();
}

// Head and cross-entropy, chunk by chunk, so that at most head_chunk() rows of logits exist.
void Qwen3Model::head(Factor weight, bool backward, Tensor loss_sum) {
  const int64_t V = config_.vocab_size;
  const Tensor w = head_weight(false), normed = final_normed_, labels = labels_, losses = losses_;
  bool accumulate = backward && root_->grad_accumulates();
  for (int64_t begin = 0; begin < shape_.N; begin += head_chunk_) {
    const int64_t end = std::min(begin + head_chunk_, shape_.N);
    const Tensor x = normed.row_range(begin, end);                     // [n,C] P
    const Tensor logits = logits_.tensor().row_range(0, end - begin);  // [n,V] f32
    // The gradient lies over the logits: same row starts, in P.
    Tensor d_logits(logits.data, param_dtype_, logits.shape);
    d_logits.ld = V * static_cast<int64_t>(sizeof(float) / dtype_size(param_dtype_));
    ops_.linear(x, w, logits);
    ops_.cross_entropy(logits, labels.row_range(begin, end), weight, backward ? d_logits : Tensor(),
                       losses.row_range(begin, end));
    if (!backward) continue;
    ops_.linear_wgrad(d_logits, x, head_weight(true), accumulate);
    ops_.linear_dgrad(d_logits, w, workspace_->d_norm.tensor().row_range(begin, end), false);
    accumulate = true;
  }
  ops_.add_sum(losses, loss_sum);
}

}  // namespace qshard
