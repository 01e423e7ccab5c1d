"""Draw rows: bars, with numbers among their peers as marks, or several metrics of a case as parts of one bar; or lines
against a number of the cases, such as a model's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparse_opt.analysis.plots import new_figure, save_png

from .rows import Row, in_common, label, number, scale_of

# The Okabe-Ito palette, which is safe for colour-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000", "#999999", "#44AA99")
# A logarithmic axis if the largest value is so many times the smallest.
LOGARITHMIC = 50
# Values of cases as a figure names them, if they do not say what they are; and keys.
WORDS = {
    "dense": "all weights, fused AdamW",
    "sparse": "sparse-opt",
    "tiles": "sparse-opt",
    "attention": "sparse-opt, attention alone",
    "experts": "sparse-opt, attention and whole experts",
    "element": "single elements",
    "tile64": "tiles of 64 x 64",
    "tile128": "tiles of 128 x 128",
    "lora": "LoRA",
    "local": "no communication",
    "ddp": "DistributedDataParallel",
    "ddp_whole_layers": "DistributedDataParallel, whole layers",
    "fsdp2": "FSDP2",
    "default": "NCCL's choice",
    "sockets": "TCP sockets",
}
KEYS = {"lora_rank": "rank", "shira_rank": "rank", "gradient_checkpointing": "checkpointing"}


def draw(found: Sequence[Row], path: Path, *, title: str = "", x: str | None = None) -> None:
    """Write a PNG of the rows, of those of several units that have the first row's.

    Args:
        x: number of the cases to draw lines against; without it, several metrics are parts of a bar.
    """
    found = [
        replace(row, case={KEYS.get(key, key): WORDS.get(str(value), value) for key, value in row.case.items()})
        for row in found
        if row.unit == found[0].unit
    ]
    divisor, unit = scale_of(found[0].unit, max(row.value for row in found))
    metrics = list(dict.fromkeys(row.metric for row in found))
    name = f"{metrics[0] if len(metrics) == 1 else ''} {unit}".strip()
    hidden = set(in_common([row.case for row in found]))
    if x is not None:
        figure = new_figure(9, 6)
        _lines(figure.subplots(), [row for row in found if x in row.case], x, divisor, name, hidden)
    else:
        figure = new_figure(10, 1.5 + 0.3 * len({label(row.case, hidden) for row in found}))
        _bars(figure.subplots(), found, metrics, divisor, name, hidden)
    figure.supxlabel(title, fontsize=7, wrap=True)
    save_png(figure, path)


def _bars(axes: Any, found: Sequence[Row], metrics: list[str], divisor: float, name: str, hidden: set[str]) -> None:
    """Horizontal bars; on a logarithmic axis, where the length of a bar says nothing, points."""
    places = list(dict.fromkeys(label(row.case, hidden) for row in found))
    sizes = [row.value / divisor for row in found if row.value > 0]
    logarithmic = bool(sizes) and len(metrics) == 1 and max(sizes) > LOGARITHMIC * min(sizes)
    ends = [0.0] * len(places)
    beyond = list(ends)  # of bar and marks
    marked: set[str] = set()
    for row in found:
        y, value, k = places.index(label(row.case, hidden)), row.value / divisor, metrics.index(row.metric)
        colour = COLOURS[k % len(COLOURS)]
        if logarithmic:
            axes.plot(value, y, "o", color=colour)
        else:
            axes.barh(y, value, 0.8, left=ends[y], color=colour, label=metrics[k])
        ends[y] += value
        marks = {peer: other / divisor for peer, other in row.peers.items() if not isinstance(other, dict)}
        for mark in marks.values():
            axes.plot([mark] * 2, [y - 0.4, y + 0.4], color="black", linewidth=2)
        marked |= set(marks)
        beyond[y] = max(beyond[y], ends[y], *marks.values())
    for y, end in enumerate(ends):
        axes.text(beyond[y], y, f"   {number(end)}", va="center", fontsize=8)
    axes.set_yticks(range(len(places)), places, fontsize=8)
    axes.invert_yaxis()
    if logarithmic:
        axes.set_xscale("log")
        axes.grid(axis="x", which="both", linewidth=0.4, alpha=0.5)
        axes.set_xlim(min(sizes) / 1.5, max(sizes) * 2)
    axes.set_xlabel(name + (f" (line: {', '.join(sorted(marked))})" if marked else ""))
    axes.spines[["top", "right"]].set_visible(False)
    if len(metrics) > 1:
        kinds = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # each metric once
        above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": len(kinds)}
        axes.legend(kinds.values(), kinds, frameon=False, fontsize=8, **above)


def _lines(axes: Any, found: Sequence[Row], x: str, divisor: float, name: str, hidden: set[str]) -> None:
    """A line for each case but its `x` and what follows from that, such as the name of a model of this size."""
    for key in {key for row in found for key in row.case}:
        if len({(row.case[x], row.case.get(key)) for row in found}) == len({row.case[x] for row in found}):
            hidden = {*hidden, key}
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in found:
        lines.setdefault(label(row.case, hidden) or row.metric, []).append((row.case[x], row.value / divisor))
    for i, (text, points) in enumerate(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", color=COLOURS[i % len(COLOURS)], label=text)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=x.replace("_", " "), ylabel=name)
    if max(row.case[x] for row in found) >= 1e6:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e9:g} B")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
