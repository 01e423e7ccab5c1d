"""Pictures of masks: how far they agree with each other, and where in a model they lie. Needs matplotlib.

Every cell carries its figure, and brightness alone tells high from low, so that a picture keeps its sense in print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic_files import one_line, written_aside
from .components import PART_LABELS, PARTS, Part, component_of
from .errors import ConfigError, MaskError
from .mask_compare import Comparison
from .masks import MaskSet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = "cividis"  # its brightness rises evenly
_NO_VALUE = "white"


def require_matplotlib(option: str) -> None:
    """Raises ConfigError, naming the option that wants it, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"option '{option}' wants the package matplotlib, which is not installed: pip install 'sparse-opt[plot]'"
        ) from error


def draw_comparison(comparisons: Sequence[Comparison], path: Path) -> None:
    """Heat maps of all pairs of masks: the Jaccard index, and the one-sided overlap, row's share in column.

    Each cell holds the figure over all tensors, with its expectation by chance in brackets.

    Args:
        comparisons: all pairs, as `mask_compare.compare` returns them.
        path: the PNG, written atomically; missing parent folders are made.

    Raises:
        MaskError: the file cannot be written.
    """
    labels = list(dict.fromkeys(label for pair in comparisons for label in (pair.first, pair.second)))
    size = len(labels)
    # A mask with itself says nothing, and its 1 would leave the others no room on the scale.
    jaccard, overlap = ([[(nan, nan)] * size for _ in range(size)] for _ in range(2))
    for pair in comparisons:
        i, j, total = labels.index(pair.first), labels.index(pair.second), pair.total
        jaccard[i][j] = jaccard[j][i] = (total.jaccard, total.jaccard_chance)
        overlap[i][j] = (total.of_first, total.of_first_chance)
        overlap[j][i] = (total.of_second, total.of_second_chance)
    top = max((value for row in overlap for value, _ in row if isfinite(value)), default=0.0) or 1.0

    longest = max(map(len, labels))
    figure = _figure(2 * max(2.9, 0.85 * size) + 0.085 * longest + 1.6, max(1.8, 0.65 * size) + 0.065 * longest + 1.2)
    titles = ("Jaccard index, |A and B| / |A or B|", "One-sided overlap, |A and B| / |A|")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, cells, title in zip(panels, (jaccard, overlap), titles, strict=True):
        image = _heat_map(axes, [[value for value, _ in row] for row in cells], top)
        for i, row in enumerate(cells):
            for j, (value, chance) in enumerate(row):
                text = "same" if i == j else f"{_share(value)}\n({_share(chance)})"
                _cell_text(axes, i, j, text, value, top)
        axes.set_xticks(range(size), labels, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(size), labels)
        axes.set_xlabel("mask B")
        axes.set_title(title, fontsize=11)
    panels[0].set_ylabel("mask A")
    figure.colorbar(image, ax=panels, label="share of elements (by chance)")
    _save(figure, path)


def draw_pair(comparison: Comparison, path: Path) -> None:
    """Heat map of two masks' Jaccard index by layer and part of the model, expectation by chance in brackets.

    Args and errors as in `draw_comparison`.
    """
    sums = comparison.grouped(_place)
    cells = {key: (o.jaccard, f"{_share(o.jaccard)}\n({_share(o.jaccard_chance)})") for key, o in sums.items()}
    title = f"|A and B| / |A or B|\nA = {comparison.first}, B = {comparison.second}"
    _draw_profile(cells, title, "Jaccard index (by chance)", path)


def draw_density(mask: MaskSet, path: Path, title: str) -> None:
    """Heat map of a mask's density, in percent, by layer and part of the model.

    Args and errors as in `draw_comparison`.
    """
    cells = {key: (100 * f.density, f"{100 * f.density:.3g}") for key, f in mask.grouped(_place).items()}
    _draw_profile(cells, title, "density, % of elements", path)


def _place(name: str) -> tuple[int | None, Part]:
    component = component_of(name)
    return component.layer, component.part


def _draw_profile(
    cells: Mapping[tuple[int | None, Part], tuple[float, str]], title: str, unit: str, path: Path
) -> None:
    """Layers from top to bottom, parts from left to right; the row `other` holds what is outside of layers."""
    layers = sorted({layer for layer, _ in cells}, key=lambda n: (n is None, n or 0))
    parts = [part for part in PARTS if any(part == key[1] for key in cells)]
    values = [[cells.get((layer, part), (nan, ""))[0] for part in parts] for layer in layers]
    lines = max((text.count("\n") + 1 for _, text in cells.values()), default=1)
    height = max(3.9, 2.1 + (0.12 + 0.17 * lines) * len(layers))  # less has no room for the labels
    figure = _figure(3.4 + 0.85 * len(parts), height)
    axes = figure.subplots()
    top = max((value for value, _ in cells.values() if isfinite(value)), default=0.0) or 1.0
    image = _heat_map(axes, values, top)
    for (layer, part), (value, text) in cells.items():
        _cell_text(axes, layers.index(layer), parts.index(part), text, value, top)
    labels = [PART_LABELS[part] for part in parts]
    axes.set_xticks(range(len(parts)), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(layers)), ["other" if layer is None else str(layer) for layer in layers])
    axes.set_xlabel("part of the model")
    axes.set_ylabel("layer (other: outside of layers)")
    figure.suptitle(title, fontsize=11, wrap=True)
    figure.colorbar(image, ax=axes, label=unit)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _heat_map(axes: Axes, values: Sequence[Sequence[float]], top: float) -> Any:
    from matplotlib import colormaps

    colours = colormaps[_COLOURS].with_extremes(bad=_NO_VALUE)
    image = axes.imshow(values, cmap=colours, vmin=0.0, vmax=top, aspect="auto")
    # White lines between the cells.
    axes.set_xticks([i - 0.5 for i in range(1, len(values[0]))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(values))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    return image


def _cell_text(axes: Axes, row: int, column: int, text: str, value: float, top: float) -> None:
    dark = isfinite(value) and value < 0.55 * top
    axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")


def _share(value: float) -> str:
    if not isfinite(value):
        return "none"
    return f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"


def _save(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            figure.savefig(aside, dpi=150, format="png")
    except OSError as error:
        raise MaskError(f"{path}: cannot write the picture: {one_line(error)}") from error
