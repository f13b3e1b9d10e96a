// One training step told operator by operator, with what was measured in it.

#include <fstream>

#include "backends.h"
#include "cli/cli.h"
#include "cli/walkthrough_html.h"
#include "cli/walkthrough_options.h"
#include "cli/walkthrough_print.h"
#include "cli/walkthrough_topics.h"

namespace qshard {
namespace {

constexpr const char* kFooter =
    R"(Without options: hidden 512, 8 query and 4 kv heads of 64, ffn 1024, two layers, 2 × 8 tokens a rank.
Exit code 0 when every check is met, 1 otherwise.

Examples:
  mpirun -n 4 qshard walkthrough
  mpirun -n 3 qshard walkthrough --model data/configs/small30m.json --layer 5 --seq 32
  mpirun -n 4 qshard walkthrough --tensor q_proj --rank 2 --values
  mpirun -n 4 qshard walkthrough --format json > step.json
  mpirun -n 4 qshard walkthrough --html step.html
  mpirun -n 4 qshard walkthrough --topic ring
  mpirun -n 4 qshard walkthrough --trace step.trace.json      # open it in ui.perfetto.dev)";

void write_html(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  if (!file.flush()) fail("cannot write {}", path);
}

int run_walkthrough_command(WalkthroughCommand& c, World& world) {
  settle(c, world);
  collectively(world, [&] {
    if (world.rank() == 0 && !c.html.empty()) write_html(c.html, "");  // or a message at once
  });
  Backend backend = make_backend(c.options.backend, world);
  PrintStyle style;
  style.markdown = c.format == "md";
  style.color = c.format == "text" && stdout_takes_color();
  if (!c.topic.empty()) {
    const TopicText told = tell_topic(c.topic, c.options, style, world, backend);
    if (world.rank() == 0) fmt::print("{}", told.text);
    return told.ok ? kExitDone : kExitFailed;
  }
  const WalkthroughReport report = run_walkthrough(c.options, world, backend);
  collectively(world, [&] {
    if (world.rank() == 0 && !c.html.empty()) write_html(c.html, walkthrough_html(report.document));
  });
  if (world.rank() != 0) return report.ok ? kExitDone : kExitFailed;
  if (c.format == "json")
    fmt::print("{}\n", report.document.dump(1, ' ', false, Document::error_handler_t::replace));
  else
    fmt::print("{}", walkthrough_text(report.document, style));
  return report.ok ? kExitDone : kExitFailed;
}

}  // namespace

void add_walkthrough(CLI::App& app, Command& run) {
  auto c = std::make_shared<WalkthroughCommand>();
  CLI::App* sub = app.add_subcommand(
      "walkthrough", "one training step, operator by operator: what is computed, held and moved");
  sub->footer(kFooter);
  add_options(*sub, *c);
  sub->callback(
      [c, &run] { run = [c](World& world) { return run_walkthrough_command(*c, world); }; });
}

}  // namespace qshard
