"""Plot of a results file of `sparse-opt bench distributed`: times by network, and efficiency by number of GPUs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from sparse_opt.analysis.figures import new_figure, require_matplotlib, save_png
from sparse_opt.cli.parser import CommandParser

from ..common.harness import Report, exit_code
from ..common.report import machine_line
from .report import efficiencies, find, heading, timed

# The Okabe-Ito palette, which is safe for colour-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000", "#999999", "#44AA99")


def plot(report: Report, path: Path) -> None:
    """Write a PNG: the time of a step on the most GPUs for each network, and the efficiency by number of GPUs."""
    n = max(row["world_size"] for row in report["rows"])
    rows = [row for row in timed(report) if row["world_size"] == n]
    names, networks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("variant", "network"))
    scaled = sorted(efficiencies(report), key=itemgetter("variant"))
    figure = new_figure(13 if scaled else 10, 2 + 0.3 * len(names) * len(networks))
    bars, *others = figure.subplots(1, 2 if scaled else 1, width_ratios=(3, 2)[: 2 if scaled else 1], squeeze=False)[0]
    height = 0.8 / len(networks)
    for k, network in enumerate(networks):
        found = [(i + height * k, find(report, n, network, name)) for i, name in enumerate(names)]
        shown = [(y, row["ms"]) for y, row in found if row is not None]
        bars.barh(*zip(*shown, strict=True), height=0.9 * height, color=COLOURS[k], label=network)
        for y, ms in shown:
            bars.text(1.03 * ms, y, f"{ms:.0f}", va="center", fontsize=8)
    bars.set_yticks([i + height * (len(networks) - 1) / 2 for i in range(len(names))], names)
    bars.invert_yaxis()
    bars.set(xscale="log", xlabel=f"ms per step on {n} GPUs (logarithmic)")
    times = [row["ms"] for row in rows]
    bars.set_xlim(10 ** math.floor(math.log10(min(times))), 1.3 * max(times))
    bars.legend(title="network", frameon=False)
    for lines in others:
        for colour, (name, found_rows) in zip(COLOURS, groupby(scaled, itemgetter("variant")), strict=False):
            points = [(1, 1.0), *((row["world_size"], row["efficiency"]) for row in found_rows)]
            lines.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
        lines.set(xlabel="GPUs, one pair each", ylabel="time on one GPU / time")
        lines.set_ylim(bottom=0)
        lines.set_xticks(sorted({row["world_size"] for row in report["rows"]}))
        lines.legend(fontsize=8, frameon=False, loc="lower left")
    for axes in (bars, *others):
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"{heading(report)}\n{machine_line(report)}", fontsize=8)
    save_png(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot of a results file; return 0 if it was written."""
    parser = CommandParser(prog="python -m sparse_opt.bench.distributed.plot", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON of `sparse-opt bench distributed`")
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
