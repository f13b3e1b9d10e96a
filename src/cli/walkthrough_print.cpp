#include "cli/walkthrough_print.h"

#include <algorithm>

#include "cli/page.h"
#include "train/metrics.h"

namespace qshard {
namespace {

// --- words

std::string grouped(int64_t n) {
  std::string digits = fmt::format("{}", n);
  for (int at = static_cast<int>(digits.size()) - 3; at > (n < 0); at -= 3)
    digits.insert(static_cast<size_t>(at), 1, ',');
  return digits;
}

std::string bytes_text(int64_t n) { return human_bytes(static_cast<double>(n)); }

std::string time_text(int64_t ns) {
  const double us = static_cast<double>(ns) / 1e3;
  return us < 1000 ? fmt::format("{:.0f} µs", us) : fmt::format("{:.2f} ms", us / 1e3);
}

std::string flops_text(int64_t n) {
  const double value = static_cast<double>(n);
  if (value >= 1e9) return fmt::format("{:.2f} GFLOP", value / 1e9);
  if (value >= 1e6) return fmt::format("{:.2f} MFLOP", value / 1e6);
  if (value >= 1e3) return fmt::format("{:.2f} kFLOP", value / 1e3);
  return fmt::format("{} FLOP", n);
}

// One value where all ranks agree, otherwise the least and the most.
template <typename Text>
std::string of_ranks(const Document& values, Text text) {
  const auto all = values.get<std::vector<int64_t>>();
  const auto [least, most] = std::minmax_element(all.begin(), all.end());
  if (text(*least) == text(*most)) return text(*least);
  return text(*least) + " – " + text(*most);
}

std::string shape_text(const Document& shape) {
  std::string text;
  for (const Document& n : shape) text += (text.empty() ? "" : ", ") + n.dump();
  return "[" + text + "]";
}

std::string tensor_text(const Document& t) {
  return fmt::format("{} {} {}", t["name"].get<std::string>(), shape_text(t["shape"]),
                     t["dtype"].get<std::string>());
}

std::string operator_text(const Document& op) {
  std::string in, out;
  for (const Document& t : op["tensors"]) {
    std::string& side = t["role"] == "out" ? out : in;
    side += (side.empty() ? "" : ", ") + tensor_text(t);
  }
  const auto calls = op["calls"].get<int64_t>();
  return fmt::format("{}{}: {} → {}", op["name"].get<std::string>(),
                     calls > 1 ? fmt::format(" × {}", calls) : "", in, out);
}

// --- sections

std::string text_of(const Document& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void print_setting(Page& page, const Document& d) {
  const Document& s = d["setting"];
  auto n = [&](const char* key) { return grouped(s[key].get<int64_t>()); };
  page.title(fmt::format("qshard walkthrough: one training step of layers.{} on {} rank(s)",
                         n("layer"), n("ranks")));
  page.section("Setting");
  page.line(fmt::format(
      "model: {}; {} layer(s), hidden {}, {} query and {} kv heads of {}, ffn {}, "
      "vocabulary {}{}; {} parameters",
      text_of(s["model"]), n("num_hidden_layers"), n("hidden_size"), n("num_attention_heads"),
      n("num_key_value_heads"), n("head_dim"), n("intermediate_size"), n("vocab_size"),
      s["tie_word_embeddings"].get<bool>() ? ", tied" : "", n("parameters")));
  page.line(fmt::format("batch: {} × {} tokens a rank, {} micro-batch(es)", n("batch"), n("seq"),
                        n("accumulation")));
  page.line(
      fmt::format("numbers: parameters {}, gradients travel as {}; sums, norms, master "
                  "weights and moments f32",
                  text_of(s["param_dtype"]), text_of(s["reduce_dtype"])));
  page.line(fmt::format(
      "moved by transport {}, computed by backend {}; reshard after forward {}, "
      "{} layer(s) a unit, {} unit(s) gathered ahead in forward, {} in backward",
      text_of(s["transport"]), text_of(s["backend"]), text_of(s["reshard_after_forward"]),
      n("layers_per_unit"), n("forward_prefetch"), n("backward_prefetch")));
  if (s["replicas"] != 1)
    page.line(
        fmt::format("mesh: {} replicas of {} ranks; the ranks of a replica share one copy of "
                    "the weights, ranks with the same rows add up their gradients",
                    n("replicas"), n("shards")));
  if (s["reshard_ranks"] != 0)
    page.line(fmt::format("groups: layers stay on {} ranks from forward to backward",
                          n("reshard_ranks")));
}

const Document& told_unit(const Document& d) {
  return d["units"][d["setting"]["unit"].get<size_t>()];
}

// "[128, 512]", or the first and the last shape where ranks differ.
std::string shards_text(const Document& shards) {
  std::string least = shape_text(shards.back()["shape"]), most = shape_text(shards[0]["shape"]);
  return least == most ? most : most + " … " + least;
}

void print_parameters(Page& page, const Document& d) {
  const Document& unit = told_unit(d);
  const std::string name = text_of(unit["name"]);
  const std::string prefix =
      d["setting"]["layers_per_unit"] == 1 ? "model." + name + "." : "model.layers.";
  page.section("Parameters of " + name + ", sharded on dimension 0");
  std::vector<Row> rows;
  for (const Document& p : unit["parameters"]) {
    Document elements, bytes;
    for (const Document& shard : p["shards"]) {
      elements.push_back(shard["elements"]);
      bytes.push_back(shard["bytes"]);
    }
    std::string shown = text_of(p["name"]).substr(prefix.size());
    shown = shown.substr(0, shown.rfind(".weight"));
    rows.push_back({shown, shape_text(p["shape"]), shards_text(p["shards"]),
                    of_ranks(elements, grouped), of_ranks(bytes, bytes_text)});
  }
  Document bytes;
  const int64_t size = unit["bytes"].get<int64_t>() / unit["elements"].get<int64_t>();
  for (const Document& n : unit["elements_of_rank"]) bytes.push_back(n.get<int64_t>() * size);
  rows.push_back({"total", grouped(unit["elements"].get<int64_t>()),
                  bytes_text(unit["bytes"].get<int64_t>()) + " in all",
                  of_ranks(unit["elements_of_rank"], grouped), of_ranks(bytes, bytes_text)});
  page.table({"parameter", "shape", "a rank's shard", "elements a rank", "bytes"}, rows);
  page.line(
      fmt::format("The other units are sharded alike: root ({} elements: embedding, final "
                  "norm, head) and all other layers.",
                  grouped(d["units"][0]["elements"].get<int64_t>())));
}

void print_initial_state(Page& page, const Document& d) {
  page.section("Before the step: what a rank holds");
  std::vector<Row> rows;
  for (const auto& [segment, ignored] : d["initial_state"][0]["allocated"].items()) {
    Document bytes;
    for (const Document& rank : d["initial_state"]) bytes.push_back(rank["allocated"][segment]);
    rows.push_back({segment, of_ranks(bytes, bytes_text)});
  }
  Document held;
  for (const Document& rank : d["initial_state"]) held.push_back(rank["parameters_held"]);
  page.table({"allocated once, used in every step", "bytes"}, rows);
  page.line(
      fmt::format("Parameters that a rank can read now, its own rows of all units: {}. Below, "
                  "\"holds\" is that and the full gradients being written: what FSDP frees "
                  "and takes again.",
                  of_ranks(held, bytes_text)));
  if (d["setting"]["replicas"] != 1 || d["setting"]["reshard_ranks"] != 0)
    page.line(
        "Counted with it: a rank's part of the sums over replicas, and the rows that its group "
        "keeps.");
}

std::string step_name(const Document& step) {
  return fmt::format("{:>3}  {}", text_of(step["number"]), text_of(step["title"]));
}

void print_step(Page& page, const Document& step) {
  std::vector<std::string> details = {text_of(step["formula"])};
  if (!step["same_pass_as"].is_null()) {
    page.entry(step_name(step), fmt::format("in the pass of {}", text_of(step["same_pass_as"])),
               details);
    return;
  }
  if (step["calls"] == 0) {
    page.entry(step_name(step), "not needed", {});
    return;
  }
  for (const Document& op : step["operators"]) details.push_back(operator_text(op));
  const bool moves = step["lane"] != "compute";
  std::string measured = of_ranks(step["time_ns"], time_text);
  if (step["flops"] != 0) measured = flops_text(step["flops"].get<int64_t>()) + " · " + measured;
  const std::string logical = of_ranks(step["logical_bytes"], bytes_text);
  if (moves)
    details.push_back(fmt::format("sent in a ring {}; really copied {}", logical,
                                  of_ranks(step["copied_bytes"], bytes_text)));
  else
    measured += fmt::format(" · {} moved", logical);
  if (step.contains("unit_before") && step["unit_before"] != step["unit_after"])
    details.push_back(fmt::format("this unit's parameters on a rank: {} → {}",
                                  of_ranks(step["unit_before"], bytes_text),
                                  of_ranks(step["unit_after"], bytes_text)));
  if (of_ranks(step["in_flight_ns"], grouped) != "0")
    details.push_back(fmt::format(
        "{} from its start to the end of the wait; the rank was in its calls for {}",
        of_ranks(step["in_flight_ns"], time_text), of_ranks(step["time_ns"], time_text)));
  details.push_back(fmt::format("a rank holds {} before, {} after",
                                of_ranks(step["held_before"], bytes_text),
                                of_ranks(step["held_after"], bytes_text)));
  page.entry(step_name(step), measured, details);
}

void print_transition(Page& page, const Document& d) {
  const Document& t = d["transition"];
  page.section(fmt::format("From {} to {}", text_of(t["from"]), text_of(t["to"])));
  if (t["output"].is_null()) return;
  page.line(
      fmt::format("The output {} becomes the input of {} in place: activations stay on their "
                  "rank.",
                  tensor_text(t["output"]), text_of(t["to"])));
  if (t.contains("next_gather_began_ns_before_layer") &&
      !t["next_gather_began_ns_before_layer"].is_null()) {
    const auto ahead = t["next_gather_began_ns_before_layer"].get<int64_t>();
    page.line(fmt::format("Its gather began {} {} step 1 of {} on rank 0.",
                          time_text(std::abs(ahead)), ahead > 0 ? "before" : "after",
                          text_of(t["from"])));
  }
  for (const Document& e : t["events"])
    page.entry(fmt::format("{} of {}", text_of(e["name"]), text_of(e["unit"])),
               time_text(e["time_ns"].get<int64_t>()),
               {fmt::format("sent in a ring {}; rank 0 holds {} → {}",
                            bytes_text(e["logical_bytes"].get<int64_t>()),
                            bytes_text(e["held_before"].get<int64_t>()),
                            bytes_text(e["held_after"].get<int64_t>()))});
}

void print_steps(Page& page, const Document& d) {
  const char* shown = "";
  const std::pair<const char*, const char*> phases[] = {
      {"forward", "Forward"}, {"backward", "Backward, in reverse"}, {"optimizer", "Optimizer"}};
  for (const auto& [phase, heading] : phases) {
    page.section(fmt::format("{}{}", heading,
                             *shown ? "" : ": FLOPs and bytes of a rank, time over the ranks"));
    shown = phase;
    for (const Document& step : d["steps"])
      if (step["phase"] == phase) print_step(page, step);
    if (phase == std::string("forward")) print_transition(page, d);
  }
}

Document sum_of(const Document& row, std::initializer_list<const char*> keys) {
  Document sums;
  for (size_t r = 0; r < row["gathers"].size(); ++r) {
    int64_t sum = 0;
    for (const char* key : keys) sum += row[key][r].get<int64_t>();
    sums.push_back(sum);
  }
  return sums;
}

constexpr std::initializer_list<const char*> kLogical = {
    "gather_logical_bytes", "reduce_logical_bytes", "all_reduce_logical_bytes"};
constexpr std::initializer_list<const char*> kCopied = {
    "gather_copied_bytes", "reduce_copied_bytes", "all_reduce_copied_bytes"};

Row traffic_row(const std::string& name, const Document& row, bool replicas) {
  auto bytes = [&](const char* key) { return of_ranks(row[key], bytes_text); };
  Row cells = {name, of_ranks(row["gathers"], grouped) + " · " + bytes("gather_logical_bytes"),
               of_ranks(row["reduces"], grouped) + " · " + bytes("reduce_logical_bytes")};
  if (replicas)
    cells.push_back(of_ranks(row["all_reduces"], grouped) + " · " +
                    bytes("all_reduce_logical_bytes"));
  cells.push_back(of_ranks(sum_of(row, kLogical), bytes_text));
  cells.push_back(of_ranks(sum_of(row, kCopied), bytes_text));
  return cells;
}

void print_communication(Page& page, const Document& d) {
  page.section("Communication of the step, per rank");
  const bool replicas = d["setting"]["replicas"] != 1;
  std::vector<Row> rows;
  for (const Document& unit : d["communication"]["units"])
    rows.push_back(traffic_row(text_of(unit["unit"]), unit, replicas));
  rows.push_back(traffic_row("all", d["communication"]["total"], replicas));
  Row head = {"unit", "gathers", "reductions", "in a ring", "copied"};
  if (replicas) head.insert(head.begin() + 3, "all-reduces");
  page.table(head, rows);
  page.line(
      "In a ring: what a ring all-gather or reduce-scatter sends per rank, (N−1)/N of the "
      "whole; an all-reduce is both. Copied: what this rank's transport copied, sent, or read from "
      "other "
      "ranks' memory; rows that it reads where they lie cost nothing.");
  const Document& unit = d["communication"]["units"][d["setting"]["unit"].get<size_t>()];
  const int64_t gathers = unit["gathers"][0], reduces = unit["reduces"][0],
                sums = unit["all_reduces"][0];
  std::string sum;
  for (int64_t i = 0; i < gathers && gathers + reduces <= 8; ++i)
    sum += bytes_text(unit["gather_logical_bytes"][0].get<int64_t>() / gathers) + " + ";
  for (int64_t i = 0; i < reduces && gathers + reduces <= 8; ++i)
    sum += bytes_text(unit["reduce_logical_bytes"][0].get<int64_t>() / reduces) + " + ";
  if (sums && !sum.empty())
    sum += bytes_text(unit["all_reduce_logical_bytes"][0].get<int64_t>()) + " + ";
  const int64_t total = sum_of(unit, kLogical)[0];
  if (!sum.empty()) sum = sum.substr(0, sum.size() - 3) + " = ";
  page.line(fmt::format("{}: {}{} ({} bytes) per rank, unit and step", text_of(unit["unit"]), sum,
                        bytes_text(total), grouped(total)));
}

void print_values(Page& page, const Document& v) {
  page.section(fmt::format("{} {} on its way, rank {}", text_of(v["tensor"]),
                           shape_text(v["shape"]), v["rank"].get<int64_t>()));
  for (const Document& stage : v["stages"]) {
    const int64_t columns = stage["columns"], ends = stage["shown_at_each_end"];
    std::vector<std::string> lines;
    int64_t last = stage["rows"][0].get<int64_t>() - 1;
    for (const Document& line : stage["lines"]) {
      if (line["row"].get<int64_t>() != last + 1) lines.push_back("…");
      last = line["row"];
      std::string text = fmt::format("row {:>5} ", last);
      for (size_t c = 0; c < line["values"].size(); ++c) {
        if (columns > 2 * ends && c == static_cast<size_t>(ends)) text += " …";
        text += fmt::format(" {:>9.2e}", line["values"][c].get<double>());
      }
      lines.push_back(text);
    }
    if (lines.empty()) lines.push_back("no rows: this rank's shard is empty");
    page.entry(text_of(stage["stage"]), text_of(stage["meaning"]), lines);
  }
}

}  // namespace

std::string walkthrough_text(const Document& d, const PrintStyle& style) {
  Page page(style);
  print_setting(page, d);
  print_parameters(page, d);
  print_initial_state(page, d);
  print_steps(page, d);
  print_communication(page, d);
  if (d.contains("values")) print_values(page, d["values"]);
  page.section("Key points, measured in this run");
  int64_t failed = 0;
  for (const Document& c : d["checks"]) {
    page.check(c["ok"], text_of(c["name"]), text_of(c["expected"]), text_of(c["found"]));
    failed += !c["ok"].get<bool>();
  }
  page.verdict(failed == 0, failed ? fmt::format("walkthrough: FAILED {} of {} checks", failed,
                                                 d["checks"].size())
                                   : fmt::format("walkthrough: ok, {} checks", d["checks"].size()));
  return page.take();
}

}  // namespace qshard
