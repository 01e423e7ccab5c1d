"""Plot of a results file of `sparse-opt bench scale`: peak memory against model size, by method."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sparse_opt.analysis.output_files import new_figure, save_png

from ..common.harness import Report
from ..common.plots import COLOURS, plot_main
from ..common.report import machine_line
from .cases import SPARSE_OPTIONS, n_parameters
from .report import GPUS, heading, sorted_rows


def plot(report: Report, path: Path) -> None:
    """Write a PNG: a line per method and treatment of activations; crosses mark cases that do not fit, at the
    lower bound of their memory, or at the top with its number."""
    figure = new_figure(9, 6)
    axes = figure.subplots()
    lines: dict[tuple[str, bool, int, float], list[tuple[float, float]]] = {}
    crosses: list[tuple[str, float, float]] = []
    for row in sorted_rows(report):
        case, size = row["case"], n_parameters(row["case"]["shape"]) / 1e9
        if row["fits"] and row["peak_memory_bytes"] is not None:
            density = case["density"] if case["method"] in SPARSE_OPTIONS else 1.0
            key = case["method"], case["checkpointing"], case["sequence_length"], density
            lines.setdefault(key, []).append((size, row["peak_memory_bytes"] / 2**30))
        elif not row["fits"]:
            crosses.append((case["method"], size, row["needs_more_than_bytes"] / 2**30))
    methods = list(dict.fromkeys(row["case"]["method"] for row in report["rows"]))
    colours = dict(zip(methods, COLOURS, strict=False))
    for (method, checkpointing, tokens, density), points in lines.items():
        active = f", {density:.1%} active" if density < 1.0 else ""
        label = f"{method}{active}, {tokens} tokens" + (", activations checkpointed" if checkpointing else "")
        style = "-" if checkpointing else "--"
        axes.plot(*zip(*points, strict=True), style, marker="o", color=colours[method], label=label)
    top = 1.15 * max([*GPUS.values(), *(gib for points in lines.values() for _, gib in points)])
    for method, size, gib in dict.fromkeys(crosses):
        axes.plot([size], [min(gib, 0.96 * top)], "x", color=colours[method])
        if gib > 0.96 * top:
            axes.annotate(f"  more than {gib:.0f}", (size, 0.96 * top), va="center", fontsize=8, color=colours[method])
    for name, gib in GPUS.items():
        axes.axhline(gib, color="#999999", linewidth=0.8)
        axes.text(axes.get_xlim()[0], gib, f" GPU of {name}", va="bottom", fontsize=8)
    axes.set(xlabel="parameters, billions", ylabel="peak GiB of a DPO step", ylim=(0, top))
    axes.spines[["top", "right"]].set_visible(False)
    if lines:
        axes.legend(frameon=False, fontsize=8, handlelength=4, loc="lower right")
    figure.supxlabel(f"{heading(report)}\n{machine_line(report)}", fontsize=7, wrap=True)
    save_png(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot of a results file; return 0 if it was written."""
    return plot_main("scale", __doc__, plot, argv)


if __name__ == "__main__":
    sys.exit(main())
