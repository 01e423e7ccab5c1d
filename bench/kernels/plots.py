"""Plots of the rows that `sparse-opt bench kernels` or `gpu_check` wrote.

- `roofline`: the rate at which each work moved its minimum bytes, next to the copy rate. The ops do a few arithmetic
  operations per byte, so that memory bandwidth is their only bound. Weight gradients, which are products of matrices,
  are left out.
- `tile_gradients`: the time of the weight gradients by density and tile size.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_opt.analysis.output_files import new_figure, require_matplotlib, save_png
from sparse_opt.cli.parser import CommandParser

from ..common.harness import exit_code
from ..common.report import machine_name, why_unwritable
from .table import targets
from .table.tile_gradients import TILE_PATTERNS

MARKERS = {"cuda": "o", "triton": "s", "cpu": "D", "torch": "x"}
# The Okabe-Ito palette, which is safe for colour-blind readers.
COLOURS = dict(zip(TILE_PATTERNS, ("#0072B2", "#D55E00"), strict=True))
PLOTS = ("roofline", "tile_gradients")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a plot; return 0 if it was written."""
    parser = CommandParser(prog="python -m sparse_opt.bench.kernels.plots", description=__doc__)
    parser.add_argument("plot", choices=PLOTS)
    parser.add_argument("results", type=Path, help="JSON of gpu_check or kernels")
    parser.add_argument("--output", type=Path, help="PNG (default: PLOT.png in the folder of the results)")
    parser.add_argument("--density", type=float, default=0.025, help="density of the rows of roofline (%(default)s)")
    return exit_code(lambda: _draw(parser, parser.parse_words(sys.argv[1:] if argv is None else argv)))


def _draw(parser: CommandParser, args: Namespace) -> int:
    output = args.output or args.results.with_name(f"{args.plot}.png")
    require_matplotlib("plot")
    report = kernel_report(parser, args.results)
    rows = report["kernels"]["rows"]
    if problem := why_unwritable(output):
        parser.error(problem)
    if args.plot == "roofline":
        points = points_of(rows, args.density)
        if not points:
            parser.error(f"results {args.results}: no row with bytes at density {args.density:g}")
        draw_roofline(report, points, args.density, output)
        print(f"{len(points)} rows: {output}")
    else:
        curves = curves_of(rows)
        if not any(curves.values()):
            parser.error(f"results {args.results}: no row of weight gradients by tiles")
        draw_tile_gradients(report, curves, output)
        print(f"{len(curves)} token counts: {output}")
    return 0


def kernel_report(parser: CommandParser, path: Path) -> dict[str, Any]:
    """Read the report of `kernels` or `gpu_check`; it is an error if it is missing."""
    if not path.is_file():
        parser.error(f"results {path}: no such file")
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        parser.error(f"results {path}: not JSON: {error}")
    if "kernels" not in report:
        parser.error(f"results {path}: found keys {', '.join(report)}, expected 'kernels'")
    return report


def points_of(rows: Sequence[Mapping[str, Any]], density: float) -> list[dict[str, Any]]:
    """The rows with bytes, at the density or independent of it, fastest first: label, backend, bytes, GB/s."""
    points = [
        {
            "label": f"{row['work']} ({row['backend']})",
            "backend": row["backend"],
            "bytes": row["bytes"],
            "gb_per_s": row["bytes"] / (1e6 * row["ms"]),
        }
        for row in rows
        if row["bytes"] and row["density"] in (None, density) and not targets.is_weight_gradient(row)
    ]
    return sorted(points, key=lambda point: -point["gb_per_s"])


def clusters(points: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The numbers of the points, from 1, grouped where labels would overlap: at most 4 % apart."""
    found: list[list[int]] = []
    for i, point in enumerate(points, start=1):
        for numbers in found:
            first = points[numbers[0] - 1]
            if all(abs(math.log(point[axis] / first[axis])) < 0.04 for axis in ("bytes", "gb_per_s")):
                numbers.append(i)
                break
        else:
            found.append([i])
    return found


def draw_roofline(report: Mapping[str, Any], points: Sequence[Mapping[str, Any]], density: float, output: Path) -> None:
    """Draw numbered points, a legend with their names, and the roof."""
    roof = report["kernels"]["copy_gb_per_s"]
    figure = new_figure(13, max(6.0, 0.24 * len(points)))
    plot, names = figure.subplots(1, 2, width_ratios=(3, 2))
    plot.axhline(roof, color="black", linewidth=1)
    plot.annotate(f"copy, {roof:.0f} GB/s", (0.01, roof), xycoords=("axes fraction", "data"), va="bottom")
    for point in points:
        colour = "tab:gray" if point["backend"] == "torch" else "tab:blue"
        plot.plot(point["bytes"], point["gb_per_s"], MARKERS.get(point["backend"], "^"), color=colour)
    for numbers in clusters(points):
        first = points[numbers[0] - 1]
        label = ", ".join(map(str, numbers))
        plot.annotate(label, (first["bytes"], first["gb_per_s"]), xytext=(6, -3), textcoords="offset points")
    plot.set(xscale="log", yscale="log", xlabel="minimum bytes of the work", ylabel="minimum bytes over time, GB/s")
    plot.grid(which="both", alpha=0.2)
    plot.set_title(f"{machine_name(report)}, masks of {density:.1%}; grey: other packages")
    names.axis("off")
    listed = "\n".join(f"{i:2d}  {p['gb_per_s']:6.0f}  {p['label']}" for i, p in enumerate(points, start=1))
    names.text(0, 1, "    GB/s\n" + listed, family="monospace", fontsize=8, va="top")
    save_png(figure, output)


Curve = dict[float, float]  # density -> ms


def curves_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Curve]]:
    """tokens -> pattern -> its times with a call for each layer, on the backend that `auto` selects."""
    curves: dict[int, dict[str, Curve]] = {}
    for row in rows:
        for pattern in TILE_PATTERNS if targets.is_weight_gradient(row) else ():
            tokens = targets.tokens_of(row)
            if row["is_auto"] and row["work"] == targets.tile_gradient(pattern, tokens):
                curves.setdefault(tokens, {}).setdefault(pattern, {})[row["density"]] = row["ms"]
    return curves


def draw_tile_gradients(report: Mapping[str, Any], curves: Mapping[int, Mapping[str, Curve]], output: Path) -> None:
    """Draw a panel for each token count, with horizontal lines for torch's dense products without and with a gather."""
    from matplotlib.ticker import LogLocator

    rows = report["kernels"]["rows"]
    figure = new_figure(1.5 + 4.5 * len(curves), 4.5)
    for plot, (tokens, patterns) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for pattern, curve in patterns.items():
            densities = sorted(curve)
            times = [curve[density] for density in densities]
            plot.plot([100 * d for d in densities], times, "o-", color=COLOURS[pattern], label=pattern)
        lines = {targets.dense_gradient(tokens): "-", targets.gathered_gradient(tokens): "--"}
        for row in rows:
            if row["work"] in lines:
                name = row["work"].removesuffix(f", {tokens} tokens")
                plot.axhline(row["ms"], color="black", linewidth=1, linestyle=lines[row["work"]], label=name)
        plot.set(xscale="log", yscale="log", xlabel="active tiles, %", ylabel="ms", title=f"{tokens} tokens")
        shown = sorted({100 * density for curve in patterns.values() for density in curve})
        plot.set_xticks(shown, [f"{percent:g}" for percent in shown])
        plot.minorticks_off()
        plot.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        plot.yaxis.set_major_formatter("{x:g}")
        plot.grid(alpha=0.2)
        plot.legend(fontsize=8)
    figure.suptitle(f"Weight gradients of all layers, {machine_name(report)}", fontsize=11)
    save_png(figure, output)


if __name__ == "__main__":
    sys.exit(main())
