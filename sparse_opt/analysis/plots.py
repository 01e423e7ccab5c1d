"""Plots of the analyses and of masks, as figures: curves by step, heat maps by layer and part of a model.

Every curve has its own line style, marker and colour, so that curves are distinguishable in grayscale print; the legend
is next to the data. Every cell of a heat map shows its number, and brightness increases with the value. All functions
need matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import files
from ..errors import ConfigError
from ..masks.mask_set import MaskSet, MaskStats
from ..masks.parameters import PART_LABELS, PARTS, Part, group, group_by_part, in_layer_order, layer_label, place_of
from .changes import Coverage, StepChanges, sum_changes
from .mask_overlap import Comparison, Overlap
from .ranks import RankStats
from .records import precision_text, threshold_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can distinguish, from dark to light.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":")
# Layer and part of the model -> value and text of a cell.
_Cells = dict[tuple[int | None, Part], tuple[float, str]]

T = TypeVar("T")


def require_matplotlib(option: str) -> None:
    """Raise a ConfigError that names the option that needs matplotlib if it is not installed."""
    try:
        import matplotlib  # noqa: F401  # only whether it can be imported
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"option '{option}' needs the package matplotlib, which is not installed: pip install 'sparse-opt[plot]'"
        ) from error


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, with a layout that fits its labels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG with 150 dots per inch. Raises a SparseOptError that names the file on a failed write."""
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.written_aside(path) as aside:
            figure.savefig(aside, dpi=150, format="png")


def density_figure(found: Sequence[StepChanges], tolerances: Sequence[float]) -> Figure:
    """Density of the update by step: a curve for bits and one for each tolerance; a panel for each precision."""
    panels: dict[str, dict[str, Sequence[float]]] = {}
    for precision in found[0].by_precision:
        totals = [sum_changes(step.by_precision[precision].values()) for step in found]
        curves = panels[precision_text(precision)] = {"bits differ": [100 * total.share for total in totals]}
        for i, tolerance in enumerate(tolerances):
            curves[f"|ΔW| > {threshold_text(tolerance)}"] = [100 * total.shares_above[i] for total in totals]
    steps = [step.step for step in found]
    return _by_step(steps, panels, "density of the update (% of all elements)", "Density of the update by step")


def coverage_figure(coverage: Coverage) -> Figure:
    """Coverage of the final active set and global density by step: a curve for each tau."""

    def curves(of: Callable[[int], Sequence[float]]) -> dict[str, list[float]]:
        return {f"τ = {threshold_text(tau)}": [100 * share for share in of(i)] for i, tau in enumerate(coverage.taus)}

    panels = {
        f"coverage: % of the elements active at step {coverage.steps[-1]}": curves(coverage.coverage),
        "density: % of all elements": curves(coverage.density),
    }
    return _by_step(coverage.steps, panels, "active elements (%)", "Coverage and density by step", shared=False)


def layer_figure(step: StepChanges, precision: str) -> Figure:
    """Density (elements whose bits differ) and sign flips at one step by layer and part of the model.

    Args:
        precision: a key of `StepChanges.by_precision`.
    """
    counts = step.by_precision[precision]
    panels = {
        "density, % of elements whose bits differ": _cells(counts, lambda of: 100 * sum_changes(of).share),
        "sign flips, % of elements": _cells(counts, lambda of: 100 * sum_changes(of).share_flipped),
    }
    return _by_place(panels, f"Update by layer and part, step {step.step}, {precision_text(precision)}")


def rank_figure(stats: Mapping[str, RankStats], tau: float, step: int) -> Figure:
    """Ranks, norm and share of the updates by layer and part of the model, means over the matrices."""
    statistics: dict[str, Callable[[RankStats], float]] = {
        "effective rank, % of full rank": lambda s: 100 * s.effective_rank / s.full_rank,
        "stable rank": lambda s: s.stable_rank,
        "Frobenius norm of the update, units of the weights": lambda s: s.frobenius_norm,
        f"elements that moved by more than {threshold_text(tau)}, %": lambda s: 100 * s.share_above,
    }
    panels = {unit: _cells(stats, _mean_of(statistic)) for unit, statistic in statistics.items()}
    return _by_place(panels, f"Updates of weight matrices by layer and part, step {step}")


def rank_steps_figure(found: Mapping[int, Mapping[str, RankStats]]) -> Figure:
    """Classical, effective and stable rank of the updates by step.

    A curve for each matrix or, of more matrices than there are colours, for each component: the mean of its matrices.
    """
    names = list(next(iter(found.values())))
    groups = {name: [name] for name in names}
    if len(names) > len(_COLOURS):
        groups = {PART_LABELS[part]: of for part, of in group_by_part({name: name for name in names}).items()}
    statistics: dict[str, Callable[[RankStats], float]] = {
        "classical rank": lambda s: s.rank,
        "effective rank": lambda s: s.effective_rank,
        "stable rank": lambda s: s.stable_rank,
    }
    panels = {
        title: {
            label: [_mean_of(statistic)([stats[name] for name in of]) for stats in found.values()]
            for label, of in groups.items()
        }
        for title, statistic in statistics.items()
    }
    return _by_step(list(found), panels, "rank", "Ranks of the update by step", shared=False)


def comparison_figure(comparisons: Sequence[Comparison]) -> Figure:
    """Heat maps of all pairs of masks: the Jaccard index, and the one-sided overlap, row's share in column.

    Each cell shows the value over all tensors, with its expectation by chance in brackets.

    Args:
        comparisons: all pairs, as returned by `compare_masks`.
    """
    labels = list(dict.fromkeys(label for pair in comparisons for label in (pair.first, pair.second)))
    jaccard: dict[tuple[int, int], tuple[float, str]] = {}
    overlap: dict[tuple[int, int], tuple[float, str]] = {}
    for pair in comparisons:
        i, j, total = labels.index(pair.first), labels.index(pair.second), pair.total
        jaccard[i, j] = jaccard[j, i] = total.jaccard, _with_chance(total.jaccard, total.jaccard_chance)
        overlap[i, j] = total.of_first, _with_chance(total.of_first, total.of_first_chance)
        overlap[j, i] = total.of_second, _with_chance(total.of_second, total.of_second_chance)
    # The value of the diagonal, 1, has no information and would compress the colour scale.
    same = {(i, i): (nan, "same") for i in range(len(labels))}
    scale = _linear(value for value, _ in overlap.values())
    longest = max(map(len, labels))
    width = 2 * max(2.9, 0.85 * len(labels)) + 0.085 * longest + 1.6
    figure = new_figure(width, max(1.8, 0.65 * len(labels)) + 0.065 * longest + 1.2)
    panels = figure.subplots(1, 2, sharey=True)
    image = _heat_map(panels[0], jaccard | same, labels, labels, scale)
    _heat_map(panels[1], overlap | same, labels, labels, scale)
    panels[0].set_title("Jaccard index, |A and B| / |A or B|", fontsize=11)
    panels[1].set_title("One-sided overlap, |A and B| / |A|", fontsize=11)
    panels[0].set_ylabel("mask A")
    for axes in panels:
        axes.set_xlabel("mask B")
    figure.colorbar(image, ax=panels, label="share of elements (by chance)")
    return figure


def pair_figure(comparison: Comparison) -> Figure:
    """Heat map of two masks' Jaccard index by layer and part of the model, expectation by chance in brackets."""
    sums = {place: Overlap.sum(of) for place, of in group(comparison.tensors, place_of).items()}
    cells = {place: (o.jaccard, _with_chance(o.jaccard, o.jaccard_chance)) for place, o in sums.items()}
    title = f"|A and B| / |A or B|\nA = {comparison.first}, B = {comparison.second}"
    return _by_place({"Jaccard index (by chance)": cells}, title)


def mask_figure(mask: MaskSet, title: str) -> Figure:
    """Heat map of a mask's density, in percent, by layer and part of the model.

    Colours are on a logarithmic scale: norms and embeddings often are many times as dense as the matrices.
    """
    cells = _cells(mask.per_tensor(), lambda of: 100 * MaskStats.sum(of).density)
    return _by_place({"density, % of elements": cells}, title, logarithmic=True)


def expert_figure(shares: Mapping[tuple[int | None, int], float], title: str, label: str) -> Figure:
    """Heat map of a share of each expert's weights, in percent: layers from top to bottom, experts from left to right.

    Args:
        shares: (layer, number of the expert) -> share, such as a mask's density or a step's changed elements.
    """
    from matplotlib.ticker import MaxNLocator

    layers = in_layer_order(layer for layer, _ in shares)
    n_experts = 1 + max(number for _, number in shares)
    values = [[100 * shares.get((layer, number), nan) for number in range(n_experts)] for layer in layers]
    figure = new_figure(max(5.0, 2.6 + 0.1 * n_experts), max(3.0, 1.6 + 0.2 * len(layers)))
    axes = figure.subplots()
    image = axes.imshow(values, cmap="cividis", vmin=0, aspect="auto")
    axes.set_yticks(range(len(layers)), [layer_label(layer) for layer in layers])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label=label)
    figure.suptitle(title, fontsize=11, wrap=True)
    return figure


def as_svg(figure: Figure) -> bytes:
    """Return the figure as an SVG element without external references; equal figures give equal bytes."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "sparse-opt"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    document = buffer.getvalue()
    # The text before the element refers to a document type, which a strict XML parser would fetch.
    return document[document.index(b"<svg") :]


def _mean_of(statistic: Callable[[T], float]) -> Callable[[Sequence[T]], float]:
    return lambda values: sum(map(statistic, values)) / len(values)


def _cells(of: Mapping[str, T], statistic: Callable[[Sequence[T]], float]) -> _Cells:
    values = {place: statistic(values) for place, values in group(of, place_of).items()}
    return {place: (value, f"{value:.3g}") for place, value in values.items()}


def _by_step(
    steps: Sequence[int],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    label: str,
    title: str,
    *,
    shared: bool = True,
) -> Figure:
    """Panels side by side, with the same curves, over one scale if it is `shared`."""
    figure = new_figure(9.0 if len(panels) == 1 else 12.0, 4.8)
    row = figure.subplots(1, len(panels), sharey=shared, squeeze=False)[0]
    for axes, (name, curves) in zip(row, panels.items(), strict=True):
        for i, (curve, values) in enumerate(curves.items()):
            colour = _COLOURS[i % len(_COLOURS)]
            axes.plot(
                steps,
                [value if isfinite(value) else nan for value in values],
                color=colour,
                linestyle=_LINES[i % len(_LINES)],
                marker=_MARKERS[i % len(_MARKERS)],
                # Curves may overlap: later curves have smaller markers, drawn inside the earlier ones.
                markersize=9 - 5 * i / max(1, len(curves) - 1),
                markerfacecolor="white" if i % 2 else colour,
                linewidth=1.3,
                label=curve,
            )
        axes.set_xlabel("training step")
        axes.set_title(name, fontsize=10)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    row[0].set_ylabel(label)
    for scale in [list(row)] if shared else [[axes] for axes in row]:
        # From 0 to above the highest marker; without data, or where all of it is NaN, the highest is not finite.
        top = max((float(axes.dataLim.ymax) for axes in scale if isfinite(axes.dataLim.ymax)), default=0.0)
        for axes in scale:
            axes.set_ylim(0, 1.05 * top if top > 0 else 1.0)
    figure.suptitle(title, fontsize=11)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    return figure


def _by_place(panels: Mapping[str, _Cells], title: str, *, logarithmic: bool = False) -> Figure:
    """Unit -> heat map: layers from top to bottom, parts from left to right; row `none` is outside of layers."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    places = [place for cells in panels.values() for place in cells]
    layers = in_layer_order(layer for layer, _ in places)
    parts = [part for part in PARTS if any(part == of for _, of in places)]
    lines = max((text.count("\n") + 1 for cells in panels.values() for _, text in cells.values()), default=1)
    columns = min(2, len(panels))
    # The labels need this height.
    height = max(3.9, 2.1 + (0.12 + 0.17 * lines) * len(layers)) * -(-len(panels) // columns)
    figure = new_figure((2.6 + 0.62 * len(parts)) * columns, height)
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
    for axes, (unit, cells) in zip(grid.flat, panels.items(), strict=True):
        at = {(layers.index(layer), parts.index(part)): cell for (layer, part), cell in cells.items()}
        scale = (_logarithmic if logarithmic else _linear)(value for value, _ in cells.values())
        labels = [layer_label(layer) for layer in layers], [PART_LABELS[part] for part in parts]
        image = _heat_map(axes, at, *labels, scale)
        axes.set_title(unit if len(panels) > 1 else "", fontsize=10)
        axes.set_xlabel("part of the model")
        axes.set_ylabel("layer (none: outside of layers)")
        bar = figure.colorbar(image, ax=axes, label=unit if len(panels) == 1 else "", format="%g")
        bar.locator = LogLocator(subs=(1, 2, 5)) if logarithmic else MaxNLocator(9)
        bar.minorticks_off()
    figure.suptitle(title, fontsize=11, wrap=True)
    return figure


def _heat_map(
    axes: Axes,
    cells: Mapping[tuple[int, int], tuple[float, str]],
    rows: Sequence[str],
    columns: Sequence[str],
    scale: Normalize,
) -> Any:
    """Cells by (row, column): value and text. White cells have no value."""
    from matplotlib import colormaps

    values = [[cells.get((i, j), (nan, ""))[0] for j in range(len(columns))] for i in range(len(rows))]
    colours = colormaps["cividis"].with_extremes(bad="white")  # perceptually uniform
    image = axes.imshow(values, cmap=colours, norm=scale, aspect="auto")
    for (i, j), (value, text) in cells.items():
        is_dark = isfinite(value) and float(scale(value)) < 0.55
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if is_dark else "black")
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    # White lines between the cells.
    axes.set_xticks([i - 0.5 for i in range(1, len(columns))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(rows))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    return image


def _linear(values: Iterable[float]) -> Normalize:
    """A scale from 0 to the largest value."""
    from matplotlib.colors import Normalize

    return Normalize(0.0, max(filter(isfinite, values), default=0.0) or 1.0)


def _logarithmic(values: Iterable[float]) -> Normalize:
    """A logarithmic scale from the least value above zero to the largest, over at least a factor of ten."""
    from matplotlib.colors import LogNorm

    above = [value for value in values if isfinite(value) and value > 0] or [1.0]
    return LogNorm(min(min(above), max(above) / 10), max(above), clip=True)


def _with_chance(value: float, chance: float) -> str:
    return f"{_share(value)}\n({_share(chance)})"


def _share(value: float) -> str:
    if not isfinite(value):
        return "none"
    return f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"
