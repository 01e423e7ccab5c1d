"""Plot of a results file of `sparse-opt bench distributed`: times by network, and efficiency by number of GPUs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from sparse_opt.analysis.output_files import new_figure, save_png

from ..common.harness import Report
from ..common.plots import COLOURS, network_bars, plot_main
from ..common.report import machine_line
from .report import heading
from .results import Row, find, timed
from .targets import efficiencies

NETWORKS = {"default": "NCCL's choice", "sockets": "TCP sockets on loopback"}
METHODS = {
    "local": "no communication",
    "replicate": "replicated",
    "ddp": "DistributedDataParallel",
    "ddp_whole_layers": "DistributedDataParallel,\na graph per layer",
    "fsdp2": "FSDP2",
}
TRAINED = {None: "all weights", "element": "single elements", "tile64": "tiles of 64 x 64"}


def _words(row: Row) -> str:
    """The name of a row's variant in the plot."""
    dtype = ", fp32 gradients" if row["grad_dtype"] == "fp32" else ""
    return f"{METHODS[row['layout']]}, {TRAINED[row['pattern']]}{dtype}"


def plot(report: Report, path: Path) -> None:
    """Write a PNG: the time of a step on the most GPUs for each network, and the efficiency by number of GPUs."""
    n = max(row["world_size"] for row in timed(report))
    rows = [row for row in timed(report) if row["world_size"] == n]
    places = {_words(row): row["variant"] for row in rows}
    networks = {NETWORKS[row["network"]]: row["network"] for row in rows}
    scaled = sorted(efficiencies(report), key=itemgetter("variant"))
    figure = new_figure(13 if scaled else 10, 2 + 0.3 * len(places) * len(networks))
    bars, *others = figure.subplots(1, 2 if scaled else 1, width_ratios=(3, 2)[: 2 if scaled else 1], squeeze=False)[0]
    network_bars(bars, list(places), list(networks), lambda network, at: find(report, n, networks[network], places[at]))
    bars.set(xlabel=f"ms per step on {n} GPUs (logarithmic)")
    times = [row["ms"] for row in rows]
    bars.set_xlim(10 ** math.floor(math.log10(min(times))), 1.3 * max(times))
    for lines in others:
        by_variant = [list(found_rows) for _, found_rows in groupby(scaled, itemgetter("variant"))]
        for colour, found_rows in zip(COLOURS, by_variant, strict=False):
            points = [(1, 1.0), *((row["world_size"], row["efficiency"]) for row in found_rows)]
            lines.plot(*zip(*points, strict=True), "o-", color=colour, label=_words(found_rows[0]))
        lines.set(xlabel="GPUs, one pair each", ylabel="time on one GPU / time")
        lines.set_ylim(bottom=0)
        lines.set_xticks(sorted({row["world_size"] for row in report["rows"]}))
        lines.legend(fontsize=8, frameon=False, loc="lower left")
    for axes in others:
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"{heading(report)}\n{machine_line(report)}", fontsize=8, wrap=True)
    save_png(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot of a results file; return 0 if it was written."""
    return plot_main("distributed", __doc__, plot, argv)


if __name__ == "__main__":
    sys.exit(main())
