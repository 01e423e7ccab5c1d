"""Draw rows: bars, with numbers among their peers as marks; several metrics of a case as parts of one bar; or lines
against a number of the cases, such as a model's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparse_opt.analysis.output_files import new_figure, save_png

from .rows import Case, Row, in_common, label, number, scale_of

# The Okabe-Ito palette, which is safe for colour-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000", "#999999", "#44AA99")
# A logarithmic axis if the largest value is so many times the smallest.
LOGARITHMIC = 50
# Values of cases as a figure names them, if they do not say what they are.
WORDS = {
    "dense": "all weights, fused AdamW",
    "adamw8bit": "all weights, 8-bit AdamW",
    "sparse": "sparse-opt",
    "tiles": "sparse-opt",
    "lean": "sparse-opt",
    "attention": "sparse-opt, attention alone",
    "experts": "sparse-opt, attention and whole experts",
    "element": "single elements",
    "tile64": "tiles of 64 x 64",
    "tile128": "tiles of 128 x 128",
    "lora": "LoRA",
    "local": "no communication",
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDP2",
    "default": "NCCL's choice",
    "sockets": "TCP sockets",
}
KEYS = {"lora_rank": "rank", "shira_rank": "rank", "galore_rank": "rank", "gradient_checkpointing": "checkpointing"}


def draw(found: Sequence[Row], path: Path, *, title: str = "", x: str | None = None, series: str | None = None) -> None:
    """Write a PNG of the rows.

    Args:
        found: of one unit; without `x`, several metrics are parts of a bar. Of several units, those of the first row's.
        x: number of the cases to draw lines against.
        series: key of the cases whose values have a colour each; by default metrics have.
    """
    found = [row for row in found if row.unit == found[0].unit]
    found = [
        replace(row, case={KEYS.get(key, key): WORDS.get(str(value), value) for key, value in row.case.items()})
        for row in found
    ]
    divisor, unit = scale_of(found[0].unit, max(row.value for row in found))
    common = in_common([row.case for row in found])
    metrics = list(dict.fromkeys(row.metric for row in found))
    name = f"{metrics[0] if len(metrics) == 1 else ''} {unit}".strip()
    if x is not None:
        figure = new_figure(9, 6)
        found = [row for row in found if x in row.case]
        follows = {key for row in found for key in row.case if _follows(found, key, x)}
        _lines(figure.subplots(), found, x, series, divisor, name, {*common, *follows})
    else:
        hidden = {*common} | ({series} if series else set())
        n_bars = len({label(row.case, hidden) for row in found})
        height = 1.5 + 0.3 * n_bars * (len({row.case.get(series) for row in found}) if series else 1)
        figure = new_figure(10, height)
        _bars(figure.subplots(), found, series, divisor, name, hidden)
    figure.supxlabel(title, fontsize=7, wrap=True)
    save_png(figure, path)


def _follows(found: Sequence[Row], key: str, x: str) -> bool:
    """Whether all rows of the same `x` have the same value of a key, such as the name of a model of this size."""
    values: dict[Any, set[Any]] = {}
    for row in found:
        values.setdefault(row.case[x], set()).add(row.case.get(key))
    return all(len(of_x) == 1 for of_x in values.values())


def _bars(axes: Any, found: Sequence[Row], series: str | None, divisor: float, name: str, hidden: set[str]) -> None:
    """Horizontal bars: a group for each case, a colour for each value of `series`, or else stacked metrics.

    On a logarithmic axis, where the length of a bar says nothing, points.
    """
    places = list(dict.fromkeys(label(row.case, hidden) for row in found))
    kinds = list(dict.fromkeys(str(row.case.get(series, "")) if series else row.metric for row in found))
    height = 0.8 / len(kinds) if series else 0.8
    sizes = [row.value for row in found if row.value > 0]
    stacked = not series and len(kinds) > 1
    logarithmic = bool(sizes) and not stacked and max(sizes) > LOGARITHMIC * min(sizes)
    ends = dict.fromkeys(places, 0.0)
    marked: set[str] = set()
    drawn: set[str] = set()
    for row in found:
        place, kind = label(row.case, hidden), str(row.case.get(series, "")) if series else row.metric
        k = kinds.index(kind)
        y = places.index(place) + (height * (k - (len(kinds) - 1) / 2) if series else 0)
        start = 0.0 if series else ends[place]
        value = row.value / divisor
        text = None if kind in drawn else kind
        if logarithmic:
            axes.plot(value, y, "o", color=COLOURS[k], label=text)
        else:
            axes.barh(y, value, 0.9 * height, left=start, color=COLOURS[k], label=text)
        drawn.add(kind)
        ends[place] = max(ends[place], start + value)
        if series or len(kinds) == 1:
            marks = [other / divisor for other in row.peers.values() if not isinstance(other, dict)]
            axes.text(max(start + value, *marks, 0), y, f"   {number(value)}", va="center", fontsize=8)
        for peer, other in row.peers.items():
            if not isinstance(other, dict):
                axes.plot([other / divisor] * 2, [y - height / 2, y + height / 2], color="black", linewidth=2)
                marked.add(peer)
    if not series and len(kinds) > 1:
        for i, end in enumerate(ends.values()):
            axes.text(end, i, f" {number(end)}", va="center", fontsize=8)
    axes.set_yticks(range(len(places)), places, fontsize=8)
    axes.invert_yaxis()
    if logarithmic:
        axes.set_xscale("log")
        axes.grid(axis="x", which="both", linewidth=0.4, alpha=0.5)
        axes.set_xlim(min(sizes) / divisor / 1.5, max(sizes) / divisor * 2)
    axes.set_xlabel(name + (f" (line: {', '.join(sorted(marked))})" if marked else ""))
    axes.spines[["top", "right"]].set_visible(False)
    if len(kinds) > 1:
        axes.legend(title=series, frameon=False, fontsize=8)


def _lines(
    axes: Any, found: Sequence[Row], x: str, series: str | None, divisor: float, name: str, hidden: set[str]
) -> None:
    """A line for each case but its `x`; a colour for each value of `series`, or of each line."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    colours: dict[tuple[str, str], str] = {}
    for row in found:
        case: Case = {k: v for k, v in row.case.items() if k != x}
        key = label(case, hidden), row.metric
        lines.setdefault(key, []).append((row.case[x], row.value / divisor))
        colours.setdefault(key, str(row.case.get(series)) if series else " ".join(key))
    palette = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(dict.fromkeys(colours.values()))}
    styles: dict[str, int] = {}
    for key, points in lines.items():
        colour = palette[colours[key]]
        style = ("-", "--", ":", "-.")[styles.setdefault(colour, 0) % 4]
        styles[colour] += 1
        axes.plot(*zip(*sorted(points), strict=True), style, marker="o", color=colour, label=key[0] or key[1])
    values = [value for points in lines.values() for _, value in points]
    if max(values) > LOGARITHMIC * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=x.replace("_", " "), ylabel=name)
    if max(row.case[x] for row in found) >= 1e6:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e9:g} B")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
