#!/usr/bin/env python3
"""Report of a study of scripts/scaling.py: scripts/plot_scaling.py STUDY [--out FILE]

One page, STUDY/report.html, with figures, table and origin of the figures; it needs no network. An
--out that ends with .png, .pdf or .svg gets the figures alone. Throughput, efficiency and MFU over
ranks, a column for each mode: bars are the spread of the repeats, dots the ideal line, crosses what
`qshard plan` predicts. Below, of traced points, what a step consists of. Needs matplotlib.
"""
import argparse
import html
import io
import json
import sys
from pathlib import Path

SETTINGS = ["transport", "mesh", "dtype", "prefetch", "checkpointing", "batch_sequences"]
PARTS = {"compute_percent": ("operators", "#3b6fb6"),
         "exposed_communication_percent": ("exposed communication", "#d1603d"),
         "other_percent": ("other", "#b8b8b8")}
CSS = """
:root { color-scheme: light dark; --text: #1c1f23; --soft: #667; --paper: #fff; --line: #d9dce1; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e8; --soft: #a5a9b3; --paper: #17191c; --line: #363a41; }
  .figure { background: #fff; border-radius: 6px; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--paper);
       max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; } p { color: var(--soft); margin-top: 0; }
.figure svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { padding: 0.2rem 0.6rem; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child, .origin td { text-align: left; }
.origin td { overflow-wrap: anywhere; }
.origin td:first-child { white-space: nowrap; }
"""


def varied(points):
    """The settings that tell the curves of a study apart."""
    return [s for s in SETTINGS if len({p[s] for p in points}) > 1] or ["dtype"]


def label(point, names):
    plain = {"transport": "{}", "dtype": "{}", "mesh": "mesh {}", "prefetch": "prefetch {}",
             "checkpointing": "checkpointing {}", "batch_sequences": "batch {}"}
    return ", ".join(plain[name].format(point[name]) for name in names)


def curves(points):
    """Label → its points by ranks."""
    found, names = {}, varied(points)
    for point in sorted(points, key=lambda p: p["ranks"]):
        found.setdefault(label(point, names), []).append(point)
    return dict(sorted(found.items()))


def draw_throughput(axes, points, name, style):
    ranks = [p["ranks"] for p in points]
    rate = [p["total_tokens_per_s"] for p in points]
    spread = [[r - p["tokens_per_step"] / p["step_ms_highest"] * 1e3 for r, p in zip(rate, points)],
              [p["tokens_per_step"] / p["step_ms_lowest"] * 1e3 - r for r, p in zip(rate, points)]]
    line = axes.errorbar(ranks, rate, yerr=spread, label=name, marker=style, markersize=5, capsize=3)
    color = line[0].get_color()
    axes.plot(ranks, [rate[0] * n / ranks[0] for n in ranks], linestyle=":", color=color)
    predicted = [p for p in points if "predicted_step_ms" in p]
    axes.plot([p["ranks"] for p in predicted],
              [p["tokens_per_step"] / p["predicted_step_ms"] * 1e3 for p in predicted],
              linestyle="", marker="x", markersize=9, color=color)


def draw_curves(axes, points, column, style):
    shown = [p for p in points if column in p]
    axes.plot([p["ranks"] for p in shown], [p[column] for p in shown], marker=style, markersize=5)


def draw_parts(axes, points):
    """A bar for each traced point."""
    names = varied(points)
    shown = sorted((p for p in points if "compute_percent" in p),
                   key=lambda p: (label(p, names), p["ranks"]))
    bottom = [0.0] * len(shown)
    for column, (name, color) in PARTS.items():
        values = [p[column] for p in shown]
        axes.bar(range(len(shown)), values, bottom=bottom, label=name, color=color, width=0.7)
        bottom = [b + v for b, v in zip(bottom, values)]
    axes.set_xticks(range(len(shown)), [f"{label(p, names)}\n{p['ranks']} rank{'s' * (p['ranks'] > 1)}"
                                        for p in shown], fontsize=8)
    axes.set_ylabel("share of a step, %")
    axes.set_ylim(0, 100)
    axes.legend(loc="lower right", fontsize=8)


def rank_axis(axes, points):
    ticks = sorted({p["ranks"] for p in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.3)


def draw(plt, points):
    modes = sorted({p["mode"] for p in points})
    kinds = ["rate", "efficiency"]
    kinds += ["mfu"] * any("mfu_percent" in p for p in points)
    kinds += ["parts"] * any("compute_percent" in p for p in points)
    figure, grid = plt.subplots(len(kinds), len(modes), figsize=(6 * len(modes), 3.6 * len(kinds)),
                                squeeze=False)
    for column, mode in enumerate(modes):
        of_mode = [p for p in points if p["mode"] == mode]
        axes = dict(zip(kinds, (row[column] for row in grid)))
        for (name, curve), style in zip(curves(of_mode).items(), "os^Dv<>P" * 9):
            draw_throughput(axes["rate"], curve, name, style)
            draw_curves(axes["efficiency"], curve, "efficiency_percent", style)
            if "mfu" in axes:
                draw_curves(axes["mfu"], curve, "mfu_percent", style)
        axes["rate"].set_yscale("log", base=2)
        axes["rate"].yaxis.set_major_formatter("{x:g}")
        axes["rate"].set_title(f"{mode} scaling (dotted: ideal; crosses: predicted)")
        axes["rate"].set_ylabel("tokens/s, all ranks")
        axes["rate"].legend(fontsize=8)
        axes["efficiency"].set_ylim(bottom=0)
        axes["efficiency"].set_ylabel("efficiency, %")
        if "mfu" in axes:
            axes["mfu"].set_ylim(bottom=0)
            axes["mfu"].set_ylabel("MFU, % of the profile's peak")
        for kind in axes:
            if kind != "parts":
                rank_axis(axes[kind], of_mode)
        if "parts" in axes:
            draw_parts(axes["parts"], of_mode)
    figure.tight_layout()
    return figure


def cell(value):
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def page(study, figure):
    image = io.StringIO()
    figure.savefig(image, format="svg")
    svg = image.getvalue()
    points, origin = study["points"], study["provenance"]
    columns = list(dict.fromkeys(name for p in points for name in p))
    table = "".join("<tr>" + "".join(f"<td>{cell(p.get(c, ''))}</td>" for c in columns) + "</tr>\n"
                    for p in points)
    where = "".join(f"<tr><td>{html.escape(k.replace('_', ' '))}</td><td>"
                    f"{html.escape(v if isinstance(v, str) else json.dumps(v))}</td></tr>\n"
                    for k, v in origin.items())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>qshard scaling study</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head><body>
<h1>Scaling study</h1>
<p>qshard {html.escape(origin['commit'])} on {html.escape(origin['host'])}, {origin['begun'][:10]}: medians
of {origin['timed_steps']} steps after {origin['warmup_steps']} of warm-up; bars: lowest and highest repeat</p>
<div class="figure">{svg[svg.index('<svg'):]}</div>
<h2>All points</h2>
<div class="wide"><table><tr>{"".join(f"<th>{html.escape(c.replace('_', ' '))}</th>" for c in columns)}</tr>
{table}</table></div>
<h2>Measured with</h2>
<table class="origin">{where}</table>
</body></html>
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, help="default STUDY/report.html")
    args = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_scaling.py: needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = args.study / "scaling.json"
    if not table.exists():
        sys.exit(f"plot_scaling.py: no {table}: scripts/scaling.py collect {args.study}")
    study = json.loads(table.read_text())
    figure = draw(plt, study["points"])
    out = args.out or args.study / "report.html"
    if out.suffix == ".html":
        out.write_text(page(study, figure))
    else:
        figure.savefig(out, dpi=120)
    print(out)


if __name__ == "__main__":
    main()
