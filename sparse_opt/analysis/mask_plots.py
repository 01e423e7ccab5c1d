"""Plots of masks: their overlap, and their density by layer and part of a model. Needs matplotlib.

Every cell shows its number, and brightness increases with the value, so that plots are readable in grayscale print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..masks.mask_set import MaskSet, MaskStats
from ..masks.parameters import PART_LABELS, PARTS, Part, group, in_layer_order, layer_label, place_of
from .mask_overlap import Comparison, Overlap
from .output_files import new_figure, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.ticker import Locator

_COLOURS = "cividis"  # perceptually uniform
_NO_VALUE = "white"


def draw_comparison(comparisons: Sequence[Comparison], path: Path) -> None:
    """Heat maps of all pairs of masks: the Jaccard index, and the one-sided overlap, row's share in column.

    Each cell shows the value over all tensors, with its expectation by chance in brackets.

    Args:
        comparisons: all pairs, as returned by `mask_overlap.compare`.
        path: the PNG, written atomically; missing parent folders are made.

    Raises:
        DataError: the file cannot be written.
    """
    labels = list(dict.fromkeys(label for pair in comparisons for label in (pair.first, pair.second)))
    size = len(labels)
    # The diagonal is left blank: its value of 1 has no information, and would compress the colour scale.
    jaccard, overlap = ([[(nan, nan)] * size for _ in range(size)] for _ in range(2))
    for pair in comparisons:
        i, j, total = labels.index(pair.first), labels.index(pair.second), pair.total
        jaccard[i][j] = jaccard[j][i] = (total.jaccard, total.jaccard_chance)
        overlap[i][j] = (total.of_first, total.of_first_chance)
        overlap[j][i] = (total.of_second, total.of_second_chance)
    scale = _linear(value for row in overlap for value, _ in row)

    longest = max(map(len, labels))
    width = 2 * max(2.9, 0.85 * size) + 0.085 * longest + 1.6
    figure = new_figure(width, max(1.8, 0.65 * size) + 0.065 * longest + 1.2)
    titles = ("Jaccard index, |A and B| / |A or B|", "One-sided overlap, |A and B| / |A|")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, cells, title in zip(panels, (jaccard, overlap), titles, strict=True):
        image = _heat_map(axes, [[value for value, _ in row] for row in cells], scale)
        for i, row in enumerate(cells):
            for j, (value, chance) in enumerate(row):
                text = "same" if i == j else f"{_share(value)}\n({_share(chance)})"
                _cell_text(axes, i, j, text, value, scale)
        axes.set_xticks(range(size), labels, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(size), labels)
        axes.set_xlabel("mask B")
        axes.set_title(title, fontsize=11)
    panels[0].set_ylabel("mask A")
    figure.colorbar(image, ax=panels, label="share of elements (by chance)")
    save_png(figure, path)


def draw_pair(comparison: Comparison, path: Path) -> None:
    """Heat map of two masks' Jaccard index by layer and part of the model, expectation by chance in brackets.

    Args and errors as in `draw_comparison`.
    """
    sums = {place: Overlap.sum(of) for place, of in group(comparison.tensors, place_of).items()}
    cells = {key: (o.jaccard, f"{_share(o.jaccard)}\n({_share(o.jaccard_chance)})") for key, o in sums.items()}
    title = f"|A and B| / |A or B|\nA = {comparison.first}, B = {comparison.second}"
    scale = _linear(o.jaccard for o in sums.values())
    _draw_profile(cells, title, "Jaccard index (by chance)", scale, path)


def draw_density(mask: MaskSet, path: Path, title: str) -> None:
    """Heat map of a mask's density, in percent, by layer and part of the model.

    Colours are on a logarithmic scale: norms and embeddings often are many times as dense as the matrices.

    Args and errors as in `draw_comparison`.
    """
    shares = {place: 100 * MaskStats.sum(of).density for place, of in group(mask.per_tensor(), place_of).items()}
    cells = {place: (share, f"{share:.3g}") for place, share in shares.items()}
    _draw_profile(cells, title, "density, % of elements", _logarithmic(value for value, _ in cells.values()), path)


def _draw_profile(
    cells: Mapping[tuple[int | None, Part], tuple[float, str]], title: str, unit: str, scale: Normalize, path: Path
) -> None:
    """Layers from top to bottom, parts from left to right; the row `none` is for parameters outside of layers."""
    layers = in_layer_order(layer for layer, _ in cells)
    parts = [part for part in PARTS if any(part == key[1] for key in cells)]
    values = [[cells.get((layer, part), (nan, ""))[0] for part in parts] for layer in layers]
    lines = max((text.count("\n") + 1 for _, text in cells.values()), default=1)
    height = max(3.9, 2.1 + (0.12 + 0.17 * lines) * len(layers))  # the labels need this height
    figure = new_figure(3.4 + 0.85 * len(parts), height)
    axes = figure.subplots()
    image = _heat_map(axes, values, scale)
    for (layer, part), (value, text) in cells.items():
        _cell_text(axes, layers.index(layer), parts.index(part), text, value, scale)
    labels = [PART_LABELS[part] for part in parts]
    axes.set_xticks(range(len(parts)), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(layers)), [layer_label(layer) for layer in layers])
    axes.set_xlabel("part of the model")
    axes.set_ylabel("layer (none: outside of layers)")
    figure.suptitle(title, fontsize=11, wrap=True)
    bar = figure.colorbar(image, ax=axes, label=unit, format="%g")
    bar.locator = _ticks(scale)
    bar.minorticks_off()
    save_png(figure, path)


def _linear(values: Iterable[float]) -> Normalize:
    """A scale from 0 to the largest value."""
    from matplotlib.colors import Normalize

    return Normalize(0.0, max(filter(isfinite, values), default=0.0) or 1.0)


def _logarithmic(values: Iterable[float]) -> Normalize:
    """A logarithmic scale from the least value above zero to the largest, over at least a factor of ten."""
    from matplotlib.colors import LogNorm

    above = [value for value in values if isfinite(value) and value > 0] or [1.0]
    return LogNorm(min(min(above), max(above) / 10), max(above), clip=True)


def _ticks(scale: Normalize) -> Locator:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator, MaxNLocator

    return LogLocator(subs=(1, 2, 5)) if isinstance(scale, LogNorm) else MaxNLocator(9)


def _heat_map(axes: Axes, values: Sequence[Sequence[float]], scale: Normalize) -> Any:
    from matplotlib import colormaps

    colours = colormaps[_COLOURS].with_extremes(bad=_NO_VALUE)
    image = axes.imshow(values, cmap=colours, norm=scale, aspect="auto")
    # White lines between the cells.
    axes.set_xticks([i - 0.5 for i in range(1, len(values[0]))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(values))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    return image


def _cell_text(axes: Axes, row: int, column: int, text: str, value: float, scale: Normalize) -> None:
    dark = isfinite(value) and float(scale(value)) < 0.55
    axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")


def _share(value: float) -> str:
    if not isfinite(value):
        return "none"
    return f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"
