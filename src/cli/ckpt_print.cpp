#include "cli/ckpt_print.h"

#include <cmath>
#include <span>

#include "train/metrics.h"

namespace qshard {
namespace {

void print_json(const Document& doc) {
  fmt::print("{}\n", doc.dump(2, ' ', false, Document::error_handler_t::replace));
}

// JSON has no number for it.
Document number(double value) { return std::isfinite(value) ? Document(value) : Document("inf"); }

std::string text(const Document& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

}  // namespace

void print_folder(const std::string& folder, bool json) {
  const Document all = list_folder(folder);
  if (json) return print_json({{"folder", folder}, {"checkpoints", all}});
  if (all.empty()) fmt::print("{}: no checkpoints (files *.h5)\n", folder);
  for (const Document& d : all) {
    const std::string size = human_bytes(d["bytes"].get<double>()), file = text(d["file"]);
    if (d["complete"].get<bool>())
      fmt::print("step {:>8}  {:>9}  {:<20}  {:>4} rank(s)  complete  {}\n", text(d["step"]), size,
                 text(d["written_at"]), text(d["ranks"]), file);
    else
      fmt::print("step {:>8}  {:>9}  NOT USABLE  {}: {}\n", '?', size, file, text(d["problem"]));
  }
}

void print_checkpoint(const std::string& path, bool json) {
  const Document doc = describe_checkpoint(path);
  if (json) return print_json(doc);
  for (const auto& [name, value] : doc.items())
    if (name != "datasets") fmt::print("{:<12} {}\n", name, text(value));
  for (const Document& d : doc["datasets"])
    fmt::print("{:<4} {:<16} {}\n", text(d["dtype"]), d["shape"].dump(), text(d["name"]));
}

void print_check(const std::string& path, const CheckResult& result, const std::string& problem,
                 bool json) {
  const bool ok = problem.empty() && result.damaged.empty();
  if (json) {
    Document doc = {{"file", path},
                    {"ok", ok},
                    {"datasets", result.datasets},
                    {"bytes", result.bytes},
                    {"damaged", result.damaged}};
    if (!problem.empty()) doc["problem"] = problem;
    return print_json(doc);
  }
  for (const std::string& name : result.damaged) fmt::print("{}: wrong checksum\n", name);
  fmt::print("{}: {} datasets, {}: {}\n", path, result.datasets,
             human_bytes(static_cast<double>(result.bytes)),
             ok ? "intact" : fmt::format("{} DAMAGED", result.damaged.size()));
}

void print_differences(const std::string& a, const std::string& b,
                       const CheckpointDifferences& found, int64_t top, bool json) {
  const size_t all = found.tensors.size();
  const auto shown = std::span(found.tensors).first(top > 0 ? std::min<size_t>(top, all) : all);
  if (json) {
    Document largest = Document::array();
    for (const TensorDifference& t : shown)
      largest.push_back({{"dataset", t.dataset},
                         {"rel_l2", number(t.rel_l2)},
                         {"max_abs", number(t.max_abs)},
                         {"elements", t.elements}});
    return print_json({{"a", a},
                       {"b", b},
                       {"same", found.same()},
                       {"attributes", found.attributes},
                       {"structure", found.structure},
                       {"compared", found.compared},
                       {"different", all},
                       {"largest", largest}});
  }
  for (const auto* lines : {&found.attributes, &found.structure})
    for (const std::string& line : *lines) fmt::print("{}\n", line);
  if (all > 0) fmt::print("{:>10}  {:>10}  {:>10}\n", "rel L2", "max abs", "elements");
  for (const TensorDifference& t : shown)
    fmt::print("{:>10.3e}  {:>10.3e}  {:>10}  {}\n", t.rel_l2, t.max_abs, t.elements, t.dataset);
  fmt::print("{} of {} datasets differ: {}\n", all, found.compared,
             found.same() ? "the same" : "DIFFERENT");
}

}  // namespace qshard
