"""A figure of the rows of weight gradients that `kernels` or `gpu_check` wrote: their time by density and tile size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.report import kernel_report, why_unwritable
from . import targets
from .tile_gradients import TILE_PATTERNS

# The Okabe-Ito palette, which is safe for colour-blind readers.
COLOURS = dict(zip(TILE_PATTERNS, ("#0072B2", "#D55E00"), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot; return 0 if it was written."""
    parser = argparse.ArgumentParser(prog="python -m sparse_opt.bench.kernels.tile_plot", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON of gpu_check or kernels")
    parser.add_argument("--output", type=Path, help="PNG (default: tile_gradients.png beside the results)")
    args = parser.parse_args(argv)
    output = args.output or args.results.with_name("tile_gradients.png")
    report = kernel_report(parser, args.results)
    curves = curves_of(report["kernels"]["rows"])
    if not any(curves.values()):
        parser.error(f"results {args.results}: no row of weight gradients by tiles")
    if problem := why_unwritable(output):
        parser.error(problem)
    draw(report, curves, output)
    print(f"{len(curves)} token counts: {output}")
    return 0


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


def draw(report: Mapping[str, Any], curves: Mapping[int, Mapping[str, Curve]], output: Path) -> None:
    """Draw a panel for each token count, with horizontal lines for torch's dense products without and with a gather."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    rows, machine = report["kernels"]["rows"], report["environment"]["machine"]
    figure = Figure(figsize=(1.5 + 4.5 * len(curves), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
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
    figure.suptitle(
        f"Weight gradients of all layers, {machine.get('gpu', {}).get('name', machine['cpu'])}", fontsize=11
    )
    figure.savefig(output, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
