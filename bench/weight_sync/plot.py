"""Plot of a results file of `sparse-opt bench weight_sync`: the time of an update by network and method."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sparse_opt.analysis.figures import new_figure, require_matplotlib, save_png
from sparse_opt.cli.parser import CommandParser

from ..common.harness import Report, exit_code
from ..common.report import machine_line
from ..distributed.plot import COLOURS
from .report import VARIANTS, find, heading, timed


def plot(report: Report, path: Path) -> None:
    """Write a PNG: one bar per row and network."""
    rows = timed(report)
    networks = list(dict.fromkeys(row["network"] for row in rows))
    names = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    figure = new_figure(10, 2 + 0.35 * len(names) * len(networks))
    axes = figure.subplots()
    height = 0.8 / len(networks)
    for k, network in enumerate(networks):
        found = [(i + height * k, find(report, network, name)) for i, name in enumerate(names)]
        shown = [(y, row["ms"]) for y, row in found if row is not None]
        places, times = zip(*shown, strict=True)
        axes.barh(places, times, height=0.9 * height, color=COLOURS[k], label=network)
        for y, ms in shown:
            axes.text(1.05 * ms, y, f"{ms:.1f}" if ms < 100 else f"{ms:.0f}", va="center", fontsize=8)
    axes.set_yticks([i + height * (len(networks) - 1) / 2 for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="ms until the receiver has verified and written the new weights (logarithmic)")
    limits = [row["ms"] for row in rows]
    axes.set_xlim(0.5 * min(limits), 2 * max(limits))
    axes.legend(title="network", frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"{heading(report)}\n{machine_line(report)}", fontsize=8)
    save_png(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot of a results file; return 0 if it was written."""
    parser = CommandParser(prog="python -m sparse_opt.bench.weight_sync.plot", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON of `sparse-opt bench weight_sync`")
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


if __name__ == "__main__":
    sys.exit(main())
