"""Plots of the analyses and of masks, as figures. Needs matplotlib.

Every curve has its own line style, marker and colour, so that curves are distinguishable in grayscale print; the legend
is next to the data. Every cell of a heat map shows its number, and brightness increases with the value.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, TypeVar

from ..masks.mask_set import MaskSet, MaskStats
from ..masks.parameters import PART_LABELS, PARTS, Part, group, group_by_part, in_layer_order, layer_label, place_of
from .changes import Coverage, StepChanges, sum_changes
from .mask_overlap import Comparison, Overlap
from .output_files import new_figure
from .ranks import RankStats
from .records import precision_text, threshold_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can distinguish, from dark to light.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "p", "d")
_LINES = ("-", "--", "-.", ":")
# Part -> layer -> value; layer None holds the parameters outside of all layers.
_Profile = dict[Part, dict[int | None, float]]

T = TypeVar("T")


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
    """Density (elements whose bits differ) and sign flips at one step by layer, a curve for each component.

    Args:
        precision: a key of `StepChanges.by_precision`.
    """
    counts = step.by_precision[precision]
    panels = {
        "density (% of elements\nwhose bits differ)": _profile(counts, lambda of: 100 * sum_changes(of).share),
        "sign flips\n(% of elements)": _profile(counts, lambda of: 100 * sum_changes(of).share_flipped),
    }
    return _by_layer(panels, f"Update by layer and component, step {step.step}, {precision_text(precision)}", columns=1)


def rank_figure(stats: Mapping[str, RankStats], tau: float, step: int) -> Figure:
    """Ranks, norm and shares of the updates by layer; a curve for each component, the mean of its matrices."""
    statistics: dict[str, Callable[[RankStats], float]] = {
        "classical rank\n(% of full rank)": lambda s: 100 * s.rank / s.full_rank,
        "effective rank\n(% of full rank)": lambda s: 100 * s.effective_rank / s.full_rank,
        "stable rank": lambda s: s.stable_rank,
        "Frobenius norm of the update\n(units of the weights)": lambda s: s.frobenius_norm,
        f"elements that moved by\nmore than {threshold_text(tau)} (%)": lambda s: 100 * s.share_above,
        "elements that moved by more\nthan mean + 2 std (%)": lambda s: 100 * s.share_large,
    }
    panels = {label: _profile(stats, _mean_of(statistic)) for label, statistic in statistics.items()}
    return _by_layer(panels, f"Updates of weight matrices by layer and component, step {step}", columns=2)


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
    return _place_map(cells, title, "Jaccard index (by chance)", _linear(value for value, _ in cells.values()))


def mask_figure(mask: MaskSet, title: str) -> Figure:
    """Heat map of a mask's density, in percent, by layer and part of the model.

    Colours are on a logarithmic scale: norms and embeddings often are many times as dense as the matrices.
    """
    from matplotlib.colors import LogNorm

    shares = {place: 100 * MaskStats.sum(of).density for place, of in group(mask.per_tensor(), place_of).items()}
    above = [share for share in shares.values() if share > 0] or [1.0]
    scale = LogNorm(min(min(above), max(above) / 10), max(above), clip=True)  # over at least a factor of ten
    cells = {place: (share, f"{share:.3g}") for place, share in shares.items()}
    return _place_map(cells, title, "density, % of elements", scale)


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


def _profile(of: Mapping[str, T], statistic: Callable[[Sequence[T]], float]) -> _Profile:
    profile: _Profile = {}
    for (layer, part), values in group(of, place_of).items():
        profile.setdefault(part, {})[layer] = statistic(values)
    return profile


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
            # Curves may overlap: later curves have smaller markers, drawn inside the earlier ones.
            _curve(axes, i, curve, list(steps), values, markersize=9 - 5 * i / max(1, len(curves) - 1))
        axes.set_xlabel("training step")
        axes.set_title(name, fontsize=10)
        axes.xaxis.get_major_locator().set_params(integer=True)
    row[0].set_ylabel(label)
    for scale in [list(row)] if shared else [[axes] for axes in row]:
        _from_zero(scale)
    _finish(figure, title, dict(zip(*reversed(row[0].get_legend_handles_labels()), strict=True)))
    return figure


def _by_layer(panels: Mapping[str, _Profile], title: str, columns: int) -> Figure:
    """A panel for each statistic, with a curve for each component."""
    layers = sorted({n for profile in panels.values() for of in profile.values() for n in of if n is not None})
    # Values outside of all layers are drawn to the right of them, at one tick.
    beyond = (layers[-1] + 1 + max(1, len(layers) // 12)) if layers else 0
    stride = max(1, -(-len(layers) // 12))
    ticks = {n: str(n) for n in layers[::stride]}
    if any(None in of for profile in panels.values() for of in profile.values()):
        ticks[beyond] = "outside\nlayers"
    rows = -(-len(panels) // columns)
    figure = new_figure(9.0 if columns == 1 else 11.5, 1.0 + 2.9 * rows)
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, (label, profile) in zip(grid.flat, panels.items(), strict=True):
        for part in (part for part in PARTS if part in profile):
            values, i = dict(profile[part]), PARTS.index(part)
            outside = [values.pop(None)] if None in values else []
            name = PART_LABELS[part]
            handles[name] = _curve(axes, i, name, sorted(values), [values[n] for n in sorted(values)])
            _curve(axes, i, name, [beyond] * len(outside), outside)
        if layers and beyond in ticks:
            axes.axvline((layers[-1] + beyond) / 2, color="#999999", linewidth=0.8)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_ylabel(label, fontsize=9)
        _from_zero([axes])
    for axes in grid[-1]:
        axes.set_xlabel("layer")
    _finish(
        figure, title, {PART_LABELS[part]: handles[PART_LABELS[part]] for part in PARTS if PART_LABELS[part] in handles}
    )
    return figure


def _curve(axes: Axes, i: int, label: str, xs: Sequence[int], ys: Sequence[float], markersize: float = 5.0) -> Any:
    colour = _COLOURS[i % len(_COLOURS)]
    (line,) = axes.plot(
        xs,
        [y if isfinite(y) else nan for y in ys],
        color=colour,
        linestyle=_LINES[i % len(_LINES)],
        marker=_MARKERS[i % len(_MARKERS)],
        markersize=markersize,
        linewidth=1.3,
        markerfacecolor="white" if i % 2 else colour,
        label=label,
    )
    return line


def _from_zero(row: Sequence[Axes]) -> None:
    """Set the common scale of some axes: from 0 to above the highest marker."""
    # Without data, or where all of it is NaN, the highest is not finite.
    top = max((float(axes.dataLim.ymax) for axes in row if isfinite(axes.dataLim.ymax)), default=0.0)
    for axes in row:
        axes.set_ylim(0, 1.05 * top if top > 0 else 1.0)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def _finish(figure: Figure, title: str, handles: Mapping[str, Any]) -> None:
    figure.suptitle(title, fontsize=11)
    figure.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False, fontsize=9)


def _place_map(
    cells: Mapping[tuple[int | None, Part], tuple[float, str]], title: str, unit: str, scale: Normalize
) -> Figure:
    """Layers from top to bottom, parts from left to right; the row `none` is for parameters outside of layers."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator, MaxNLocator

    layers = in_layer_order(layer for layer, _ in cells)
    parts = [part for part in PARTS if any(part == key[1] for key in cells)]
    lines = max((text.count("\n") + 1 for _, text in cells.values()), default=1)
    # The labels need this height.
    figure = new_figure(3.4 + 0.85 * len(parts), max(3.9, 2.1 + (0.12 + 0.17 * lines) * len(layers)))
    axes = figure.subplots()
    at = {(layers.index(layer), parts.index(part)): cell for (layer, part), cell in cells.items()}
    image = _heat_map(axes, at, [layer_label(layer) for layer in layers], [PART_LABELS[part] for part in parts], scale)
    axes.set_xlabel("part of the model")
    axes.set_ylabel("layer (none: outside of layers)")
    figure.suptitle(title, fontsize=11, wrap=True)
    bar = figure.colorbar(image, ax=axes, label=unit, format="%g")
    bar.locator = LogLocator(subs=(1, 2, 5)) if isinstance(scale, LogNorm) else MaxNLocator(9)
    bar.minorticks_off()
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


def _with_chance(value: float, chance: float) -> str:
    return f"{_share(value)}\n({_share(chance)})"


def _share(value: float) -> str:
    if not isfinite(value):
        return "none"
    return f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"
