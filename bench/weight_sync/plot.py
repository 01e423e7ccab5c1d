"""Plot of a results file of `sparse-opt bench weight_sync`: the time of an update by network and method."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sparse_opt.analysis.output_files import new_figure, save_png

from ..common.harness import Report
from ..common.plots import network_bars, plot_main
from ..common.report import machine_line
from .report import VARIANTS, find, heading, timed


def plot(report: Report, path: Path) -> None:
    """Write a PNG: one bar per row and network."""
    rows = timed(report)
    networks = list(dict.fromkeys(row["network"] for row in rows))
    names = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    figure = new_figure(10, 2 + 0.35 * len(names) * len(networks))
    axes = figure.subplots()
    network_bars(axes, names, networks, lambda network, name: find(report, network, name))
    axes.set(xlabel="ms until the receiver has verified and written the new weights (logarithmic)")
    limits = [row["ms"] for row in rows]
    axes.set_xlim(0.5 * min(limits), 2 * max(limits))
    figure.supxlabel(f"{heading(report)}\n{machine_line(report)}", fontsize=8, wrap=True)
    save_png(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot of a results file; return 0 if it was written."""
    return plot_main("weight_sync", __doc__, plot, argv)


if __name__ == "__main__":
    sys.exit(main())
