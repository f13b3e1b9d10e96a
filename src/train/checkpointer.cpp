#include "train/checkpointer.h"

#include "io/hdf5_file.h"

namespace qshard {

std::vector<CheckpointTensor> checkpoint_tensors(const World& world, Qwen3Model& model,
                                                 bool model_only) {
  std::vector<CheckpointTensor> tensors;
  for (int u = 0; u < model.num_units(); ++u) {
    const Unit& unit = model.unit(u);
    for (int i = 0; i < unit.size(); ++i) {
      const ParamSpec& spec = unit.layout().params()[i];
      const int64_t first = unit.layout()[i].rows_of(world.rank()).begin;
      tensors.push_back({"/model/" + spec.name, spec.shape, first, unit.master(i)});
      if (model_only) continue;
      tensors.push_back({"/optim/exp_avg/" + spec.name, spec.shape, first, unit.exp_avg(i)});
      tensors.push_back({"/optim/exp_avg_sq/" + spec.name, spec.shape, first, unit.exp_avg_sq(i)});
    }
  }
  return tensors;
}

Checkpointer::Checkpointer(const CheckpointOptions& options, const std::string& folder,
                           const World& world, Backend& backend, Qwen3Model& model)
    : options_(options), folder_(folder), world_(world), backend_(backend), model_(model) {
  options_.save.piece_bytes = options.piece_mb << 20;
  options_.save.alignment = options.alignment_kb << 10;
  collectively(world_, [&] {
    parse_hints(options_.save.hints);
    if (options_.async && !world_.threads_may_call())
      fail_usage(
          "checkpoint.async needs an MPI library with MPI_THREAD_MULTIPLE, {} offers less: "
          "use --checkpoint.async false",
          world_.mpi_version());
  });
  if (options_.async) background_world_ = world.duplicate();
}

Checkpointer::~Checkpointer() {
  if (thread_.joinable()) thread_.join();
}

// A copy of all tensors; its memory is kept from save to save.
std::vector<CheckpointTensor> Checkpointer::snapshot() {
  std::vector<CheckpointTensor> tensors = checkpoint_tensors(world_, model_, false);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (snapshot_.size() == i)
      snapshot_.emplace_back(*backend_.device, DType::f32, tensors[i].rows.shape,
                             Segment::workspace, "snapshot");
    backend_.device->copy(snapshot_[i]->data, tensors[i].rows.data, tensors[i].rows.bytes());
    tensors[i].rows = snapshot_[i];
  }
  return tensors;
}

void Checkpointer::save(const CheckpointState& state) {
  finish();
  last_step_ = state.step;
  if (!options_.async) {
    report_ = save_checkpoint(world_, folder_, state, checkpoint_tensors(world_, model_, false),
                              options_.save);
    report_ready_ = true;
    return;
  }
  thread_ = std::thread([this, state, tensors = snapshot()] {
    try {
        report_ = save_checkpoint(*background_world_, folder_, state, tensors, options_.save);
      report_ready_ = true;
    } catch (...) {
      failure_ = std::current_exception();
      failed_ = true;
    }
  });
}

void Checkpointer::finish() {
  if (thread_.joinable()) thread_.join();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

std::optional<SaveReport> Checkpointer::take_report() {
  if (!report_ready_.exchange(false)) return std::nullopt;
  return report_;
}

}  // namespace qshard
