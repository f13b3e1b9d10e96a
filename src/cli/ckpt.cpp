// Checkpoints: listed, shown, checked, compared, and turned into Hugging Face folders and back.
#include <memory>

#include "cli/ckpt_print.h"
#include "cli/cli.h"
#include "train/hf_folder.h"
#include "train/metrics.h"

namespace qshard {
namespace {

constexpr const char* kFooter = R"(Examples:
  qshard ckpt ls runs/a/checkpoints
  mpirun -n 4 qshard ckpt verify runs/a/checkpoints/step-00001000.h5
  mpirun -n 4 qshard ckpt diff a/step-00001000.h5 b/step-00001000.h5
  qshard ckpt export runs/a/checkpoints/step-00001000.h5 --to hf qwen3-mine --dtype bf16
  mpirun -n 4 qshard ckpt import --from hf Qwen3-0.6B start.h5
  mpirun -n 4 qshard train --config run.json --resume start.h5 --init weights-only

Exit codes of verify and diff: 0 intact, or the same · 1 damaged, or different)";

struct CkptCommand {
  std::string file, other;  // what is looked at or read; what it is compared with or becomes
  std::string format = "text", kind, dtype = "f32";
  double max_shard_gb = 5;
  int64_t top = 10;
  bool overwrite = false;
  bool json() const { return format == "json"; }
};

// What one process does while every rank learns how it went.
template <typename Fn>
int on_rank0(World& world, Fn action) {
  collectively(world, [&] {
    if (world.rank() == 0) action();
  });
  return kExitDone;
}

int list(const CkptCommand& c, World& world) {
  return on_rank0(world, [&] { print_folder(c.file, c.json()); });
}

int show(const CkptCommand& c, World& world) {
  return on_rank0(world, [&] { print_checkpoint(c.file, c.json()); });
}

// A file that cannot be checked is an error; with JSON also a document.
int verify(const CkptCommand& c, World& world) {
  CheckResult result;
  try {
    result = check_checkpoint(world, c.file);
  } catch (const AgreedError& error) {
    if (c.json() && world.rank() == 0) print_check(c.file, result, error.what(), true);
    throw;
  }
  if (world.rank() == 0) print_check(c.file, result, "", c.json());
  return result.damaged.empty() ? kExitDone : kExitFailed;
}

int diff(const CkptCommand& c, World& world) {
  const CheckpointDifferences found = diff_checkpoints(world, c.file, c.other);
  if (world.rank() == 0) print_differences(c.file, c.other, found, c.top, c.json());
  return found.same() ? kExitDone : kExitFailed;
}

int export_hf(const CkptCommand& c, World& world) {
  HfExportOptions options{parse_dtype(c.dtype), static_cast<int64_t>(c.max_shard_gb * 1e9),
                          c.overwrite};
  const HfExportReport r = export_checkpoint(world, c.file, c.other, options);
  if (world.rank() == 0)
    fmt::print("{}: config.json and {} tensors, {} of {}, in {} file(s)\n", c.other, r.tensors,
               human_bytes(static_cast<double>(r.bytes)), c.dtype, r.files);
  return kExitDone;
}

int import_hf(const CkptCommand& c, World& world) {
  import_checkpoint(world, c.file, c.other, c.overwrite,
                    [](const std::string& text) { fmt::print("warning: {}\n", text); });
  if (world.rank() == 0)
    fmt::print("{}: written; train with --resume {} --init weights-only\n", c.other, c.other);
  return kExitDone;
}

// The subcommands and the options that several of them share.
class Subcommands {
 public:
  Subcommands(CLI::App& ckpt, Command& run) : ckpt_(ckpt), run_(run) {}
  CLI::App& add(const char* name, const char* doc, int (*action)(const CkptCommand&, World&)) {
    CLI::App* sub = ckpt_.add_subcommand(name, doc);
    sub->callback([c = c_, action, &run = run_] {
      run = [c, action](World& world) { return action(*c, world); };
    });
    return *sub;
  }
  void format(CLI::App& sub) {
    one_of(sub, "--format", c_->format, "text, or one JSON document", {"text", "json"});
  }
  void one_of(CLI::App& sub, const char* name, std::string& value, const char* doc,
              std::vector<std::string> values) {
    sub.add_option(name, value, doc)->check(CLI::IsMember(values))->capture_default_str();
  }
  CkptCommand& values() { return *c_; }

 private:
  CLI::App& ckpt_;
  Command& run_;
  std::shared_ptr<CkptCommand> c_ = std::make_shared<CkptCommand>();
};

}  // namespace

void add_ckpt(CLI::App& app, Command& run) {
  CLI::App* ckpt = app.add_subcommand("ckpt", "list, check, compare, export, import checkpoints");
  ckpt->require_subcommand(1);
  ckpt->footer(kFooter);
  Subcommands subs(*ckpt, run);
  CkptCommand& c = subs.values();

  CLI::App& ls = subs.add("ls", "the checkpoints of a folder, by their headers", list);
  ls.add_option("folder", c.file, "folder with step-*.h5")->required();
  CLI::App& shown = subs.add("show", "attributes, tensors and shapes of one file", show);
  shown.add_option("file", c.file, "checkpoint")->required();
  CLI::App& checked = subs.add("verify", "check every checksum, on all ranks", verify);
  checked.add_option("file", c.file, "checkpoint")->required();
  CLI::App& compared = subs.add("diff", "the largest differences, tensor by tensor", diff);
  compared.add_option("a", c.file, "checkpoint")->required();
  compared.add_option("b", c.other, "checkpoint")->required();
  compared.add_option("--top", c.top, "tensors shown, largest rel L2 first; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  for (CLI::App* sub : {&ls, &shown, &checked, &compared}) subs.format(*sub);

  CLI::App& out = subs.add("export", "the weights as a Hugging Face folder", export_hf);
  out.add_option("checkpoint", c.file, "checkpoint")->required();
  out.add_option("folder", c.other, "folder to write")->required();
  out.add_option("--to", c.kind, "hf")->required()->check(CLI::IsMember({"hf"}));
  subs.one_of(out, "--dtype", c.dtype, "of the weights", {"f32", "bf16"});
  out.add_option("--max-shard-gb", c.max_shard_gb, "largest file, GB of 10^9 bytes")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  out.add_flag("--overwrite", c.overwrite, "replace the weights of a folder that is not empty");
  CLI::App& in = subs.add("import", "a Hugging Face folder as checkpoint of step 0", import_hf);
  in.add_option("folder", c.file, "folder with config.json and safetensors")->required();
  in.add_option("checkpoint", c.other, "file to write")->required();
  in.add_option("--from", c.kind, "hf")->required()->check(CLI::IsMember({"hf"}));
  in.add_flag("--overwrite", c.overwrite, "replace the file");
}

}  // namespace qshard
