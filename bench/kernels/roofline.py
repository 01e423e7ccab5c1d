"""A roofline of measured rows: the rate at which each moved the bytes it has to, under the copy rate as the roof.

AdamW does a handful of operations a byte at most, far below what would make any of this bound by arithmetic: memory is
the only roof, and bytes are the axis that tells the rows apart. Weight gradients, products of matrices, are left out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.report import kernel_report, why_unwritable
from . import targets

MARKERS = {"cuda": "o", "triton": "s", "cpu": "D", "torch": "x"}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the figure; return 0 if it was written."""
    parser = argparse.ArgumentParser(prog="python -m sparse_opt.bench.kernels.roofline", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON of gpu_check or kernels")
    parser.add_argument("--output", type=Path, help="PNG (default: roofline.png beside the results)")
    parser.add_argument("--density", type=float, default=0.025, help="of the rows to show (%(default)s)")
    args = parser.parse_args(argv)
    output = args.output or args.results.with_name("roofline.png")
    report = kernel_report(parser, args.results)
    points = points_of(report["kernels"]["rows"], args.density)
    if not points:
        parser.error(f"results {args.results}: no row with bytes at density {args.density:g}")
    if problem := why_unwritable(output):
        parser.error(problem)
    draw(report, points, args.density, output)
    print(f"{len(points)} rows: {output}")
    return 0


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


def draw(report: Mapping[str, Any], points: Sequence[Mapping[str, Any]], density: float, output: Path) -> None:
    """Draw numbered points, a legend with their names, and the roof."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    machine = report["environment"]["machine"]
    roof = report["kernels"]["copy_gb_per_s"]
    figure = Figure(figsize=(13, max(6.0, 0.24 * len(points))), layout="constrained")
    FigureCanvasAgg(figure)
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
    plot.set(xscale="log", yscale="log", xlabel="bytes that the work has to move", ylabel="those bytes over time, GB/s")
    plot.grid(which="both", alpha=0.2)
    plot.set_title(
        f"{machine.get('gpu', {}).get('name', machine['cpu'])}, masks of {density:.1%}; grey: other packages"
    )
    names.axis("off")
    listed = "\n".join(f"{i:2d}  {p['gb_per_s']:6.0f}  {p['label']}" for i, p in enumerate(points, start=1))
    names.text(0, 1, "    GB/s\n" + listed, family="monospace", fontsize=8, va="top")
    figure.savefig(output, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
