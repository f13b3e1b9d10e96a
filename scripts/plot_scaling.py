#!/usr/bin/env python3
"""Draws a study of scripts/scaling.py: scripts/plot_scaling.py STUDY [--out FILE]

Throughput and efficiency over ranks, a column for each mode; bars are the spread of the repeats.
Needs matplotlib."""
import argparse
import json
import sys
from pathlib import Path


def curves(points):
    """(transport, dtype) → its points by ranks."""
    found = {}
    for point in sorted(points, key=lambda p: p["ranks"]):
        found.setdefault((point["transport"], point["dtype"]), []).append(point)
    return found


def throughput(axes, points, label, style):
    ranks = [p["ranks"] for p in points]
    rate = [p["total_tokens_per_s"] for p in points]
    spread = [[r - p["tokens_per_step"] / p["step_ms_highest"] * 1e3 for r, p in zip(rate, points)],
              [p["tokens_per_step"] / p["step_ms_lowest"] * 1e3 - r for r, p in zip(rate, points)]]
    line = axes.errorbar(ranks, rate, yerr=spread, label=label, marker=style, capsize=3)
    ideal = [rate[0] * n / ranks[0] for n in ranks]
    axes.plot(ranks, ideal, linestyle=":", color=line[0].get_color())


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, help="default STUDY/scaling.png; the ending chooses the format")
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
    modes = sorted({p["mode"] for p in study["points"]})
    figure, grid = plt.subplots(2, len(modes), figsize=(6 * len(modes), 8), squeeze=False)
    for column, mode in enumerate(modes):
        rate, efficiency = grid[0][column], grid[1][column]
        of_mode = [p for p in study["points"] if p["mode"] == mode]
        for ((transport, dtype), points), style in zip(curves(of_mode).items(), "os^Dv<>P" * 9):
            throughput(rate, points, f"{transport}, {dtype}", style)
            efficiency.plot([p["ranks"] for p in points],
                            [p["efficiency_percent"] for p in points], marker=style)
        ticks = sorted({p["ranks"] for p in of_mode})
        for axes in (rate, efficiency):
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(n) for n in ticks])
            axes.set_xlabel("ranks")
            axes.grid(alpha=0.3)
        rate.set_yscale("log", base=2)
        rate.set_title(f"{mode} scaling (dotted: ideal)")
        rate.set_ylabel("tokens/s, all ranks")
        rate.legend()
        efficiency.set_ylim(bottom=0)
        efficiency.set_ylabel("efficiency, %")
    origin = study["provenance"]
    figure.suptitle(f"qshard {origin['commit']} on {origin['host']}, {origin['begun'][:10]}: medians of "
                    f"{origin['timed_steps']} steps after {origin['warmup_steps']}")
    figure.tight_layout()
    out = args.out or args.study / "scaling.png"
    figure.savefig(out, dpi=120)
    print(out)


if __name__ == "__main__":
    main()
