#include "train/checkpointer.h"

#include "io/hdf5_file.h"

namespace qshard {

std::vector<CheckpointTensor> checkpoint_tensors(Qwen3Model& model, bool model_only) {
  std::vector<CheckpointTensor> tensors;
  for (int u = 0; u < model.num_units(); ++u) {
    const Unit& unit = model.unit(u);
    for (int i = 0; i < unit.size(); ++i) {
      const ParamSpec& spec = unit.layout().params()[i];
      const int64_t first = unit.rows(i).begin;
      tensors.push_back({kModelGroup + spec.name, spec.shape, first, unit.master(i)});
      if (model_only) continue;
      tensors.push_back({kExpAvgGroup + spec.name, spec.shape, first, unit.exp_avg(i)});
      tensors.push_back({kExpAvgSqGroup + spec.name, spec.shape, first, unit.exp_avg_sq(i)});
    }
  }
  return tensors;
}

Checkpointer::Checkpointer(const CheckpointOptions& options, const std::string& folder,
                           const Mesh& mesh, Backend& backend, Qwen3Model& model)
    : options_(options), folder_(folder), mesh_(mesh), backend_(backend), model_(model) {
  options_.save.piece_bytes = options.piece_mb << 20;
  options_.save.alignment = options.alignment_kb << 10;
  collectively(mesh_.world(), [&] {
    parse_hints(options_.save.hints);
    if (options_.async && !mesh_.world().threads_may_call())
      fail_usage(
          "checkpoint.async needs an MPI library with MPI_THREAD_MULTIPLE, {} offers less: "
          "use --checkpoint.async false",
          mesh_.world().mpi_version());
  });
  if (!options_.async) return;
  background_world_ = mesh.shards().duplicate();
  if (mesh_.replica() == 0) make_room();
}

Checkpointer::~Checkpointer() {
  if (thread_.joinable()) thread_.join();
}

// Before the first step: to get memory takes longer than to fill it.
void Checkpointer::make_room() {
  int64_t n = 0;
  for (const CheckpointTensor& t : checkpoint_tensors(model_, false)) n += t.rows.numel();
  snapshot_ = Buffer(backend_.device->host(), DType::f32, {n}, Segment::workspace, "snapshot");
}

// All tensors in host memory, complete after download_wait() of the device.
std::vector<CheckpointTensor> Checkpointer::start_snapshot() {
  std::vector<CheckpointTensor> tensors = checkpoint_tensors(model_, false);
  int64_t at = 0;
  for (CheckpointTensor& t : tensors) {
    const Tensor copy = snapshot_->row_range(at, at + t.rows.numel());
    backend_.device->download_start(copy.data, t.rows.data, t.rows.bytes());
    at += t.rows.numel();
    t.rows = copy;
  }
  return tensors;
}

void Checkpointer::save(const CheckpointState& state) {
  finish();
  last_step_ = state.step;
  if (!options_.async) {
    mesh_.on_first_replica([&] {
      report_ = save_checkpoint(mesh_.shards(), folder_, state, checkpoint_tensors(model_, false),
                                options_.save, Staging(*backend_.device));
      report_ready_ = true;
    });
    return;
  }
  if (mesh_.replica() > 0) return;
  thread_ = std::thread([this, state, tensors = start_snapshot()] {
    try {
      backend_.device->download_wait();
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
  if (!options_.async) return;
  mesh_.on_first_replica([&] {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  });
}

std::optional<SaveReport> Checkpointer::take_report() {
  if (!report_ready_.exchange(false)) return std::nullopt;
  return report_;
}

}  // namespace qshard
