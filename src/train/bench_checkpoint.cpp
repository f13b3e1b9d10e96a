#include <filesystem>

#include "train/bench.h"
#include "train/checkpointer.h"
#include "train/engine.h"
#include "train/stopwatch.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

// A folder of rank 0's making, gone at the end with what was saved in it.
class ScratchFolder {
 public:
  ScratchFolder(const std::string& parent, const World& world)
      : path_((fs::path(parent) / "qshard-bench-checkpoint").string()) {
    collectively(world, [&] {
      if (world.rank() != 0) return;
      if (!fs::create_directories(path_))
        fail_usage("{} exists: choose another --dir, or remove it", path_);
      mine_ = true;
    });
  }
  ~ScratchFolder() {
    std::error_code ignored;
    if (mine_) fs::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool mine_ = false;
};

Document line_of(const char* what, int64_t bytes, const Times& times) {
  return {{"operation", what},
          {"bytes", bytes},
          {"time_ms", times.median * 1e3},
          {"lowest_ms", times.lowest * 1e3},
          {"highest_ms", times.highest * 1e3},
          {"gb_per_s", static_cast<double>(bytes) / times.median * 1e-9}};
}

}  // namespace

Document bench_checkpoint(const BenchOptions& o, const std::string& parent, World& world,
                          Backend& backend) {
  const ScratchFolder folder(parent, world);
  const Qwen3Config config = bench_model(o);
  FsdpOptions fsdp;
  fsdp.param_dtype = parse_dtype(o.param_dtype);
  Sharding sharding = make_sharding(o.transport, fsdp, world, backend);
  Qwen3Model model(config, fsdp, 1, 1, sharding, backend);
  model.init_parameters(1);
  CheckpointState state;
  state.model = config.to_json();
  state.run = Document::object();
  const int64_t bytes = 3 * int64_t{sizeof(float)} * config.num_parameters();
  Stopwatch watch(world, *backend.device, o.warm_up, o.repeats);
  auto times = [&](const std::function<void()>& work, const std::function<void()>& prepare) {
    return times_of(watch.time(work, prepare), o.warm_up);
  };
  const auto next = [&] { ++state.step; };
  Document doc = {{"folder", folder.path()}, {"rows", Document::array()}};
  CheckpointOptions options;
  options.save.keep_last = 1;
  {
    Checkpointer saver(options, folder.path(), *sharding.mesh, backend, model);
    doc["rows"].push_back(line_of("save", bytes, times([&] { saver.save(state); }, next)));
    const std::string path = find_checkpoint(world, folder.path(), [](const std::string&) {});
    const auto load = [&] {
      load_checkpoint(world, path, checkpoint_tensors(model, false), false,
                      Staging(*backend.device));
    };
    doc["rows"].push_back(line_of("load from the page cache", bytes, times(load, [] {})));
  }
  if (!world.threads_may_call()) return doc;
  options.async = true;
  Checkpointer saver(options, folder.path(), *sharding.mesh, backend, model);
  const auto settle = [&] { saver.finish(), next(); };
  // What it holds up at most: an update that follows at once.
  const Times copied = times([&] { saver.save(state), backend.device->download_wait(); }, settle);
  doc["rows"].push_back(line_of("save in the background: copied", bytes, copied));
  const Times whole = times([&] { saver.save(state), saver.finish(); }, settle);
  doc["rows"].push_back(line_of("save in the background: on disk", bytes, whole));
  saver.finish();
  return doc;
}

}  // namespace qshard
