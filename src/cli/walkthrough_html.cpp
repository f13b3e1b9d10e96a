#include "cli/walkthrough_html.h"

namespace qshard {
namespace {

constexpr const char* kHead = R"PAGE(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>qshard walkthrough</title>
<style>
:root {
  color-scheme: light dark;
  --page: #fbfbf9; --card: #ffffff; --ink: #1d1f24; --soft: #60646c; --line: #dcdcd6;
  --compute: #2f6fb3; --gather: #c77700; --reduce: #8a3ffc; --replicas: #00838f; --ok: #1a7f4b;
  --bad: #c62828; --pick: #fff3d6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --card: #1c1f25; --ink: #e9eaec; --soft: #a0a5ae; --line: #353a43;
    --compute: #6aa9ea; --gather: #f0a53a; --reduce: #b58bff; --replicas: #4fc3c9; --ok: #55c98a;
    --bad: #ff7b72; --pick: #3a3017;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 8px 0 4px; }
h2 { font-size: 1.15rem; margin: 36px 0 8px; }
p { margin: 6px 0; max-width: 72ch; }
.soft { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin: 10px 0; }
.chip { border: 1px solid var(--line); border-radius: 99px; padding: 1px 10px; font-size: 0.85rem; }
.verdict { font-weight: 600; }
.ok { color: var(--ok); } .bad { color: var(--bad); }
.phase { margin: 12px 0 4px; font-size: 0.8rem; letter-spacing: 0.06em; text-transform: uppercase;
  color: var(--soft); }
.pipe { display: flex; flex-wrap: wrap; gap: 6px; }
.pipe button { font: inherit; text-align: left; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-top: 4px solid var(--compute); border-radius: 8px;
  padding: 6px 8px; width: 126px; min-height: 74px; cursor: pointer; }
.pipe button.moves { border-top-color: var(--gather); }
.pipe button.sums { border-top-color: var(--reduce); }
.pipe button.replicas { border-top-color: var(--replicas); }
.pipe button[aria-pressed="true"] { background: var(--pick); outline: 2px solid var(--ink); }
.pipe b { display: block; font-size: 0.85rem; line-height: 1.25; }
.pipe small { color: var(--soft); font-size: 0.75rem; }
.controls { display: flex; gap: 8px; align-items: center; margin: 12px 0; }
.controls button { font: inherit; padding: 4px 14px; border-radius: 8px; cursor: pointer;
  border: 1px solid var(--line); background: var(--card); color: inherit; }
code { font: 0.86rem/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.88rem; width: 100%; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 500; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.legend { display: flex; flex-wrap: wrap; gap: 14px; font-size: 0.82rem; color: var(--soft); }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 5px; vertical-align: -1px; }
.bar + .bar { margin-top: 3px; }
svg.wide { min-width: 640px; }
.param { display: grid; grid-template-columns: 220px 1fr; gap: 4px 12px; align-items: center;
  margin: 5px 0; }
.bar { display: flex; height: 22px; border: 1px solid var(--line); border-radius: 5px;
  overflow: hidden; }
.bar span { border-right: 2px solid var(--card); font-size: 0.7rem; text-align: center;
  line-height: 22px; color: #fff; overflow: hidden; white-space: nowrap; }
.bar span:last-child { border: 0; }
.checks { list-style: none; padding: 0; margin: 0; }
.checks li { padding: 6px 0; border-bottom: 1px solid var(--line); }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--page);
  padding: 5px 9px; border-radius: 6px; font-size: 0.8rem; max-width: 300px; display: none;
  z-index: 2; }
@media (max-width: 640px) {
  .pipe button { width: calc(33.3% - 4px); min-height: 66px; }
  .param { grid-template-columns: 1fr; }
  h1 { font-size: 1.3rem; }
}
</style>
</head>
<body>
<main id="page"><noscript>This page draws itself: it needs JavaScript.</noscript></main>
<div id="tip" role="status"></div>
<script type="application/json" id="data">
)PAGE";

constexpr const char* kScript = R"PAGE(
</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page"), tip = document.getElementById("tip");
const replicas = data.setting.replicas;
const LANES = ["compute", "gather", "reduce", ...(replicas > 1 ? ["replicas"] : [])];
const laneOf = span => span.among === "replicas" ? "replicas" : span.lane;

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function drawn(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function scaled(n, units, step) {
  let i = 0;
  while (Math.abs(n) >= step && i + 1 < units.length) { n /= step; ++i; }
  return (i ? n.toFixed(2) : Math.round(n)) + " " + units[i];
}
const bytes = n => scaled(n, ["B", "kB", "MB", "GB", "TB"], 1000);
const flops = n => scaled(n, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"], 1000);
const time = ns => ns < 1e6 ? Math.round(ns / 1e3) + " µs" : (ns / 1e6).toFixed(2) + " ms";
const grouped = n => n.toLocaleString("en-US");
function ofRanks(values, text) {
  const least = text(Math.min(...values)), most = text(Math.max(...values));
  return least === most ? least : least + " – " + most;
}
const shape = s => "[" + s.join(", ") + "]";
const tensor = t => t.name + " " + shape(t.shape) + " " + t.dtype;
function hover(target, text) {
  const show = event => {
    tip.textContent = text;
    tip.style.display = "block";
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - 310)) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - 90) + "px";
  };
  target.addEventListener("pointermove", show);
  target.addEventListener("pointerdown", show);
  target.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
function table(head, rows) {
  const line = (cells, tag) => element("tr", {}, ...cells.map(c => element(tag, {}, String(c))));
  return element("div", {class: "scroll"}, element("table", {},
    element("thead", {}, line(head, "th")),
    element("tbody", {}, ...rows.map(r => line(r, "td")))));
}
function section(title, ...children) {
  page.append(element("h2", {}, title), ...children);
}

function heading() {
  const s = data.setting, passed = data.checks.filter(c => c.ok).length;
  page.replaceChildren(
    element("h1", {}, "One training step of layers." + s.layer + " on " + s.ranks + " ranks"),
    element("p", {class: "soft"}, "Every number on this page was measured in that step: bytes by " +
      "the transport's own count, sizes from the buffers, shapes from the operators."),
    element("div", {class: "chips"}, ...[
      "hidden " + s.hidden_size, s.num_attention_heads + " query, " + s.num_key_value_heads +
      " kv heads of " + s.head_dim, "ffn " + s.intermediate_size, s.num_hidden_layers + " layers",
      grouped(s.parameters) + " parameters", s.batch + " × " + s.seq + " tokens a rank",
      s.accumulation + " micro-batch(es)", "parameters " + s.param_dtype,
      "gradients " + s.reduce_dtype,
      ...(replicas > 1 ? [replicas + " replicas of " + s.shards + " ranks"] : []),
      ...(s.reshard_ranks ? ["layers stay on " + s.reshard_ranks + " ranks"] : []), "transport " + s.transport, "backend " + s.backend
    ].map(text => element("span", {class: "chip"}, text))),
    element("p", {class: "verdict " + (data.ok ? "ok" : "bad")},
      (data.ok ? "✓ all " : "✗ only ") + passed + " of " + data.checks.length + " checks met"));
}

// --- the pipeline, step by step
const buttons = [];
let picked = 0;
const detail = element("div", {class: "card", "aria-live": "polite"});

function lines(step) {
  const out = [element("p", {}, element("code", {}, step.formula))];
  if (step.same_pass_as !== null)
    out.push(element("p", {class: "soft"}, "Runs in the same pass over memory as step " +
      step.same_pass_as + ", which holds what was measured."));
  else if (!step.calls) out.push(element("p", {class: "soft"}, "Not needed in this run."));
  for (const op of step.operators) {
    const side = out => op.tensors.filter(t => (t.role === "out") === out).map(tensor).join(", ");
    out.push(element("p", {}, element("code", {}, op.name + (op.calls > 1 ? " × " + op.calls : "") +
      ": " + side(false) + " → " + side(true))));
  }
  return out;
}
function pick(index) {
  picked = (index + data.steps.length) % data.steps.length;
  buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(i === picked)));
  const step = data.steps[picked];
  const rows = [["time", ofRanks(step.time_ns, time)], ["arithmetic of a rank", flops(step.flops)],
    ["sent in a ring, per rank", ofRanks(step.logical_bytes, bytes)],
    ["really copied, per rank", ofRanks(step.copied_bytes, bytes)],
    ["a rank holds before → after", ofRanks(step.held_before, bytes) + " → " +
      ofRanks(step.held_after, bytes)]];
  if (step.unit_before) rows.push(["this unit's parameters on a rank",
    ofRanks(step.unit_before, bytes) + " → " + ofRanks(step.unit_after, bytes)]);
  detail.replaceChildren(element("b", {}, step.phase + " " + step.number + " · " + step.title),
    ...lines(step), ...(step.same_pass_as === null && step.calls ? [table(["", ""], rows)] : []));
  for (const mark of document.querySelectorAll("rect[data-step]"))
    mark.setAttribute("opacity", mark.dataset.step === String(picked) ? "1" : "0.55");
}
function pipeline() {
  const parts = [];
  for (const phase of ["forward", "backward", "optimizer"]) {
    const row = element("div", {class: "pipe"});
    data.steps.forEach((step, i) => {
      if (step.phase !== phase) return;
      const moved = Math.max(...step.logical_bytes);
      const kind = step.among === "replicas" ? "replicas"
        : {compute: "", gather: "moves", reduce: "sums"}[step.lane];
      const note = step.same_pass_as !== null ? "with " + step.same_pass_as
        : moved ? bytes(moved) + " sent" : step.flops ? flops(step.flops) : "0 B sent";
      const button = element("button", {class: kind, type: "button", "aria-pressed": "false"},
        element("b", {}, step.number + " " + step.title), element("small", {}, note));
      button.addEventListener("click", () => pick(i));
      buttons[i] = button;
      row.append(button);
    });
    parts.push(element("div", {class: "phase"}, phase), row);
  }
  const move = (text, by) => {
    const button = element("button", {type: "button"}, text);
    button.addEventListener("click", () => pick(picked + by));
    return button;
  };
  section("The step, operator by operator",
    element("p", {class: "soft"}, "Blue computes and stays local, orange moves parameters, violet " +
      "moves gradients" + (replicas > 1 ? ", teal adds them up over the replicas" : "") + ". Click a box, or walk through with the arrow keys."),
    ...parts, element("div", {class: "controls"}, move("← back", -1), move("next →", 1)), detail);
  document.addEventListener("keydown", event => {
    if (event.key === "ArrowRight") pick(picked + 1);
    if (event.key === "ArrowLeft") pick(picked - 1);
  });
}

// --- time
function flights(spans) {
  const begun = {}, found = [];
  for (const s of spans) {
    const what = s.among + s.lane + s.unit;
    if (s.name.endsWith(" start")) begun[what] = s;
    if (s.name.endsWith(" wait") && begun[what])
      found.push({from: begun[what].begin_ns, to: s.end_ns, span: begun[what], waited: s});
  }
  return found;
}
// The clock of both drawings: it stands still while no rank does anything for longer than the time
// in which some rank does something, as while checks are made before the optimizer.
function clockOf(spans) {
  const sorted = [...spans].sort((a, b) => a.begin_ns - b.begin_ns);
  const gaps = [], begin = sorted[0].begin_ns;
  let end = begin;
  for (const s of sorted) {
    if (s.begin_ns > end) gaps.push({from: end, to: s.begin_ns});
    end = Math.max(end, s.end_ns);
  }
  const idle = gaps.reduce((sum, g) => sum + g.to - g.from, 0);
  const pauses = gaps.filter(g => g.to - g.from > end - begin - idle);
  const now = ns => ns - begin - pauses.reduce((sum, p) =>
    sum + Math.max(0, Math.min(ns, p.to) - p.from), 0);
  return {now, total: now(end), pauses};
}
function drawPauses(svg, clock, x, height) {
  for (const p of clock.pauses) {
    const line = drawn("line", {x1: x(p.from), x2: x(p.from), y1: 0, y2: height,
      stroke: "currentColor", "stroke-dasharray": "3 4", opacity: 0.5});
    hover(line, "pause of " + time(p.to - p.from) + ": no rank works on the step");
    svg.append(line);
  }
}
function timeline() {
  const all = data.timeline.flatMap(r => r.spans);
  if (!all.length) return;
  const clock = clockOf(all);
  const W = 1080, left = 62, lane = 15, gap = 16;
  const each = LANES.length * lane + gap, height = data.timeline.length * each + 22;
  const x = ns => left + clock.now(ns) / clock.total * (W - left - 6);
  const svg = drawn("svg", {viewBox: `0 0 ${W} ${height}`, role: "img",
    class: "wide", "aria-label": "What every rank did over time"});
  data.timeline.forEach((rank, r) => {
    const top = r * each;
    svg.append(drawn("text", {x: 0, y: top + 24}, "rank " + rank.rank));
    for (const f of flights(rank.spans))
      svg.append(drawn("rect", {x: x(f.from), y: top + LANES.indexOf(laneOf(f.span)) * lane + 5,
        width: Math.max(1, x(f.to) - x(f.from)), height: lane - 11,
        fill: `var(--${laneOf(f.span)})`, opacity: 0.35}));
    for (const s of rank.spans) {
      if (!LANES.includes(laneOf(s))) continue;
      const mark = drawn("rect", {x: x(s.begin_ns), y: top + LANES.indexOf(laneOf(s)) * lane,
        width: Math.max(0.8, x(s.end_ns) - x(s.begin_ns)), height: lane - 2, rx: 1.5,
        fill: `var(--${laneOf(s)})`, opacity: 0.55});
      const step = s.told;
      if (step !== null) {
        mark.dataset.step = step;
        mark.addEventListener("click", () => pick(step));
      }
      hover(mark, `rank ${rank.rank} · ${s.unit} · ${s.phase} · ${s.step || s.name} (${s.name}): ` +
        time(s.end_ns - s.begin_ns) + (s.flops ? ", " + flops(s.flops) : "") +
        (s.logical_bytes ? ", " + bytes(s.logical_bytes) + " in a ring, " +
          bytes(s.copied_bytes) + " copied" : ""));
      svg.append(mark);
    }
  });
  for (let i = 0; i <= 4; ++i)
    svg.append(drawn("text", {x: left + (W - left - 6) * i / 4, y: height - 5,
      "text-anchor": i === 4 ? "end" : i ? "middle" : "start"}, time(clock.total * i / 4)));
  drawPauses(svg, clock, x, height - 20);
  const legend = element("div", {class: "legend"}, ...LANES.map(name =>
    element("span", {}, element("i", {style: `background: var(--${name})`}),
      name === "replicas" ? "sum over replicas" : name)),
    element("span", {}, "pale: in flight, from the start to the end of the wait"),
    ...clock.pauses.map(p => element("span", {}, "dashed: a pause of " + time(p.to - p.from) +
      " is left out")));
  section("Timeline of every rank", legend, element("div", {class: "card scroll"}, svg));
}
function memory() {
  const all = data.timeline.flatMap(r => r.spans);
  if (!all.length) return;
  const clock = clockOf(all);
  const most = Math.max(...all.map(s => Math.max(s.held_before, s.held_after)));
  const W = 1080, H = 190, left = 62;
  const x = ns => left + clock.now(ns) / clock.total * (W - left - 6);
  const y = n => H - 22 - n / most * (H - 40);
  const svg = drawn("svg", {viewBox: `0 0 ${W} ${H}`, role: "img",
    class: "wide", "aria-label": "Memory held over time"});
  for (const share of [0, 0.5, 1]) {
    svg.append(drawn("line", {x1: left, x2: W, y1: y(most * share), y2: y(most * share),
      stroke: "var(--line)"}));
    svg.append(drawn("text", {x: 0, y: y(most * share) + 4}, bytes(most * share)));
  }
  for (const rank of data.timeline) {
    const points = [];
    for (const s of rank.spans)
      points.push([s.begin_ns, s.held_before], [s.end_ns, s.held_after]);
    points.sort((a, b) => a[0] - b[0]);
    let path = "", last = null;
    for (const [ns, held] of points) {
      if (last !== null) path += `H${x(ns).toFixed(1)}`;
      path += last === null ? `M${x(ns).toFixed(1)} ${y(held).toFixed(1)}` : `V${y(held).toFixed(1)}`;
      last = held;
    }
    const line = drawn("path", {d: path, fill: "none", stroke: "var(--gather)",
      "stroke-width": 1.6, opacity: 0.3 + 0.7 / data.timeline.length});
    hover(line, "rank " + rank.rank);
    svg.append(line);
  }
  drawPauses(svg, clock, x, H - 20);
  section("Memory: parameters that a rank can read, and full gradients",
    element("p", {class: "soft"}, "A gather raises it by the other ranks' rows, a reshard lowers it " +
      "again; the step ends where it began."), element("div", {class: "card scroll"}, svg));
}

// --- shards
function sharding() {
  const unit = data.units[data.setting.unit], places = data.setting.shards;
  const color = r => `hsl(${Math.round(210 + 360 * (r % places) / places) % 360} 45% 42%)`;
  const rows = unit.parameters.map(p => {
    const bars = Array.from({length: replicas}, () => element("div", {class: "bar"}));
    for (const s of p.shards) {
      if (!s.elements) continue;
      const part = element("span", {style: `flex: ${s.shape[0]}; background: ${color(s.rank)}`},
        String(s.rank));
      hover(part, `rank ${s.rank}: rows ${s.first_row} to ${s.first_row + s.shape[0] - 1}, ` +
        `${shape(s.shape)}, ${grouped(s.elements)} elements, ${bytes(s.bytes)}`);
      bars[s.replica].append(part);
    }
    const name = p.name.replace("model." + unit.name + ".", "").replace("model.layers.", "").replace(".weight", "");
    return element("div", {class: "param"}, element("div", {}, element("code", {}, name), " ",
      element("small", {class: "soft"}, shape(p.shape))), element("div", {}, ...bars));
  });
  section("Who holds which rows",
    element("p", {class: "soft"}, `${grouped(unit.elements)} elements (${bytes(unit.bytes)}) in all, ` +
      `${ofRanks(unit.elements_of_rank, grouped)} on a rank. Bars are the rows of dimension 0, ` +
      "numbers the ranks" + (replicas > 1 ? "; a bar for each replica, the same rows in the same " +
      "color." : ".")), element("div", {class: "card"}, ...rows));
}

function communication() {
  const sum = (row, keys) => row.gathers.map((_, r) => keys.reduce((n, k) => n + row[k][r], 0));
  const line = (name, row) => [name, ofRanks(row.gathers, grouped),
    ofRanks(row.gather_logical_bytes, bytes), ofRanks(row.reduces, grouped),
    ofRanks(row.reduce_logical_bytes, bytes),
    ...(replicas > 1 ? [ofRanks(row.all_reduces, grouped),
      ofRanks(row.all_reduce_logical_bytes, bytes)] : []),
    ...["logical", "copied"].map(kind => ofRanks(sum(row, ["gather", "reduce", "all_reduce"]
      .map(verb => `${verb}_${kind}_bytes`)), bytes))];
  const c = data.communication;
  section("Communication of the step, per rank", table(
    ["unit", "gathers", "bytes", "reductions", "bytes",
      ...(replicas > 1 ? ["over replicas", "bytes"] : []), "sent in a ring", "really copied"],
    [...c.units.map(u => line(u.unit, u)), line("all", c.total)]),
    element("p", {class: "soft"}, "Sent in a ring: what a ring all-gather or reduce-scatter sends " +
      "per rank, (N−1)/N of the whole. Really copied: what the transport copied, sent, or read " +
      "from other ranks' memory; rows that are read where they lie cost nothing."));
}

function checks() {
  section("Key points, measured in this run", element("ul", {class: "checks card"},
    ...data.checks.map(c => element("li", {},
      element("b", {class: c.ok ? "ok" : "bad"}, (c.ok ? "✓ " : "✗ ") + c.name),
      element("div", {class: "soft"}, c.found + "; expected: " + c.expected)))));
}

heading();
pipeline();
timeline();
memory();
sharding();
communication();
checks();
pick(0);
</script>
</body>
</html>
)PAGE";

}  // namespace

std::string walkthrough_html(const Document& document) {
  std::string json = document.dump(-1, ' ', true, Document::error_handler_t::replace);
  // The end of a script element is found before anyone reads JSON; "\u003c" is the same text.
  for (size_t at = 0; (at = json.find('<', at)) != std::string::npos; at += 6)
    json.replace(at, 1, "\\u003c");
  return kHead + json + kScript;
}

}  // namespace qshard
