"""What plots of several benchmarks have in common: bars of times by network, and the command that draws a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_opt.analysis.output_files import require_matplotlib
from sparse_opt.cli.parser import CommandParser

from .harness import Report, exit_code

# The Okabe-Ito palette, which is safe for colour-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000", "#999999", "#44AA99")


def network_bars(
    axes: Any, names: Sequence[str], networks: Sequence[str], find: Callable[[str, str], Mapping[str, Any] | None]
) -> None:
    """Draw a group of bars for each name, one bar for each network, on a logarithmic axis of milliseconds.

    Args:
        axes: of matplotlib.
        find: (network, name) -> a row with `ms`, or None.
    """
    height = 0.8 / len(networks)
    for k, network in enumerate(networks):
        found = [(i + height * k, find(network, name)) for i, name in enumerate(names)]
        shown = [(y, row["ms"]) for y, row in found if row is not None]
        places, times = zip(*shown, strict=True)
        axes.barh(places, times, height=0.9 * height, color=COLOURS[k], label=network)
        for y, ms in shown:
            axes.text(1.03 * ms, y, f"{ms:.1f}" if ms < 10 else f"{ms:.0f}", va="center", fontsize=8)
    axes.set_yticks([i + height * (len(networks) - 1) / 2 for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.set(xscale="log")
    axes.legend(title="network", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def plot_main(name: str, doc: str | None, plot: Callable[[Report, Path], None], argv: Sequence[str] | None) -> int:
    """Draw the plot of a results file of `sparse-opt bench NAME`; return 0 if it was written.

    Args:
        name: the package of the benchmark.
        doc: description in the help.
        plot: writes the PNG of a report.
        argv: the command line; None for that of the process.
    """
    parser = CommandParser(prog=f"python -m sparse_opt.bench.{name}.plot", description=doc)
    parser.add_argument("results", type=Path, help=f"JSON of `sparse-opt bench {name}`")
    parser.add_argument("--output", type=Path, help="PNG (default: next to the results)")

    def draw() -> int:
        args = parser.parse_words(sys.argv[1:] if argv is None else argv)
        require_matplotlib("plot")
        if not args.results.is_file():
            parser.error(f"{args.results}: no such file")
        output = args.output or args.results.with_suffix(".png")
        plot(json.loads(args.results.read_text(encoding="utf-8")), output)
        print(f"plot: {output}")
        return 0

    return exit_code(draw)
