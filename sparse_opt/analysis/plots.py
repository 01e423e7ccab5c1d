"""Plots of the analyses. Needs matplotlib.

Every curve has its own line style, marker and colour, so that curves are distinguishable in grayscale print; the legend
is next to the data. The functions return figures, which `figures.save_png` writes, or `as_svg` converts for a page.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import TYPE_CHECKING, Literal, TypeVar

from ..masks.parameters import PART_LABELS, PARTS, Part, group, group_by_part, place_of
from .coverage import Coverage
from .output_files import new_figure
from .ranks import RankStats
from .shapes import WeightShape
from .sparsity import ChangeCounts, StepChanges, sum_changes
from .states import threshold_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can distinguish, from dark to light.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "p", "d")
_LINES = ("-", "--", "-.", ":")
_WIDTH = 9.0

T = TypeVar("T")


def density_figure(found: Sequence[StepChanges], tolerances: Sequence[float]) -> Figure:
    """Density of the update by step: a curve for bits and one for each tolerance; a panel for each precision."""
    panels: dict[str, dict[str, list[float]]] = {}
    for precision in found[0].by_precision:
        totals = [sum_changes(step.by_precision[precision].values()) for step in found]
        curves = {"bits differ": [100 * total.share for total in totals]}
        for i, tolerance in enumerate(tolerances):
            curves[f"|ΔW| > {threshold_text(tolerance)}"] = [100 * total.shares_above[i] for total in totals]
        panels["in the stored dtype" if precision == "stored" else "rounded to bf16"] = curves
    steps = [step.step for step in found]
    return _steps(steps, panels, "density of the update (% of all elements)", "Density of the update by step")


def coverage_figure(coverage: Coverage) -> Figure:
    """Coverage of the final active set by step: a curve for each tau."""
    curves = {_tau(tau): [100 * share for share in coverage.coverage(i)] for i, tau in enumerate(coverage.taus)}
    final = coverage.steps[-1]
    label = f"coverage (% of the elements active at step {final})"
    return _steps(coverage.steps, {"": curves}, label, f"Coverage of the set active at step {final}")


def coverage_density_figure(coverage: Coverage) -> Figure:
    """Global density by step: a curve for each tau."""
    curves = {_tau(tau): [100 * share for share in coverage.density(i)] for i, tau in enumerate(coverage.taus)}
    return _steps(coverage.steps, {"": curves}, "density (% of all elements that are active)", "Global density by step")


def layer_figure(step: StepChanges, precision: str) -> Figure:
    """Density (elements whose bits differ) and sign flips at one step by layer, a curve for each component.

    Args:
        precision: `stored` or `bf16`.
    """

    def density(tensors: Sequence[ChangeCounts]) -> float:
        return 100 * sum_changes(tensors).share

    def flips(tensors: Sequence[ChangeCounts]) -> float:
        return 100 * sum_changes(tensors).share_flipped

    counts = step.by_precision[precision]
    panels = {
        "density (% of elements\nwhose bits differ)": _profile(counts, density),
        "sign flips\n(% of elements)": _profile(counts, flips),
    }
    end = "" if precision == "stored" else ", rounded to bf16"
    return _layers(panels, f"Update by layer and component, step {step.step}{end}", columns=1)


def rank_figure(stats: Mapping[str, RankStats], tau: float, step: int) -> Figure:
    """Ranks, norm and shares of the updates by layer; a curve for each component, the mean of its matrices."""
    statistics: dict[str, Callable[[RankStats], float]] = {
        "classical rank\n(% of full rank)": lambda s: 100 * s.rank.value / s.full_rank,
        "effective rank\n(% of full rank)": lambda s: 100 * s.effective_rank.value / s.full_rank,
        "stable rank": lambda s: s.stable_rank.value,
        "Frobenius norm of the update\n(units of the weights)": lambda s: s.frobenius_norm,
        f"elements that moved by\nmore than {threshold_text(tau)} (%)": lambda s: 100 * s.share_above,
        "elements that moved by more\nthan mean + 2 std (%)": lambda s: 100 * s.share_large,
    }

    def mean_of(statistic: Callable[[RankStats], float]) -> Callable[[Sequence[RankStats]], float]:
        return lambda matrices: sum(map(statistic, matrices)) / len(matrices)

    panels = {label: _profile(stats, mean_of(statistic)) for label, statistic in statistics.items()}
    return _layers(panels, f"Updates of weight matrices by layer and component, step {step}", columns=2)


def rank_steps_figure(found: Mapping[int, Mapping[str, RankStats]]) -> Figure:
    """Classical, effective and stable rank of the updates by step.

    A curve for each matrix or, of more matrices than there are colours, for each component: the mean of its matrices.
    """
    names = list(next(iter(found.values())))
    groups = {name: [name] for name in names}
    if len(names) > len(_COLOURS):
        groups = {PART_LABELS[part]: of for part, of in group_by_part({name: name for name in names}).items()}
    statistics: dict[str, Callable[[RankStats], float]] = {
        "classical rank": lambda s: s.rank.value,
        "effective rank": lambda s: s.effective_rank.value,
        "stable rank": lambda s: s.stable_rank.value,
    }
    panels = {
        title: {
            label: [sum(statistic(stats[name]) for name in of) / len(of) for stats in found.values()]
            for label, of in groups.items()
        }
        for title, statistic in statistics.items()
    }
    return _steps(list(found), panels, "rank", "Ranks of the update by step", shared=False)


def shape_figure(shapes: Sequence[WeightShape], title: str) -> Figure:
    """Elements of the model by component, as bars."""
    sums = {part: sum(n) for part, n in group_by_part({s.name: s.numel for s in shapes}).items() if sum(n)}
    parts = list(sums)
    figure = new_figure(_WIDTH, 1.4 + 0.36 * len(parts))
    axes = figure.subplots()
    unit, scale = _unit(max(sums.values()))
    values = [sums[part] / scale for part in parts]
    bars = axes.barh(range(len(parts)), values, color="#56B4E9", edgecolor="black", linewidth=0.6)
    axes.bar_label(bars, [f"{value:,.3g}" for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(parts)), [PART_LABELS[part] for part in parts])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"elements{unit}")
    axes.set_ylabel("component")
    axes.set_title(title, fontsize=11)
    _tidy(axes, grid="x")
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


def _unit(largest: int) -> tuple[str, float]:
    units = ((" (billions)", 1e9), (" (millions)", 1e6), (" (thousands)", 1e3))
    return next(((name, scale) for name, scale in units if largest >= scale), ("", 1.0))


def _tau(tau: float) -> str:
    return f"τ = {threshold_text(tau)}"


def _steps(
    steps: Sequence[int],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    label: str,
    title: str,
    *,
    shared: bool = True,
) -> Figure:
    """Panels side by side, with the same curves, over one scale if it is `shared`."""
    figure = new_figure(_WIDTH if len(panels) == 1 else 12.0, 4.8)
    row = figure.subplots(1, len(panels), sharey=shared, squeeze=False)[0]
    for axes, (name, curves) in zip(row, panels.items(), strict=True):
        for i, (curve, values) in enumerate(curves.items()):
            # Curves may overlap: later curves have smaller markers, drawn inside the earlier ones.
            _curve(axes, i, curve, list(steps), values, markersize=9 - 5 * i / max(1, len(curves) - 1))
        axes.set_xlabel("training step")
        axes.set_title(name, fontsize=10)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _tidy(axes)
    row[0].set_ylabel(label)
    for scale in [row] if shared else [[axes] for axes in row]:
        _from_zero(scale)
    figure.suptitle(title, fontsize=11)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    return figure


# Part -> layer -> value; layer None holds the parameters outside of all layers.
_Profile = dict[Part, dict[int | None, float]]


def _profile(of: Mapping[str, T], statistic: Callable[[Sequence[T]], float]) -> _Profile:
    profile: _Profile = {}
    for (layer, part), values in group(of, place_of).items():
        profile.setdefault(part, {})[layer] = statistic(values)
    return {part: profile[part] for part in PARTS if part in profile}


def _layers(panels: Mapping[str, _Profile], title: str, columns: int) -> Figure:
    parts = [part for part in PARTS if any(part in profile for profile in panels.values())]
    layers = sorted({n for p in panels.values() for values in p.values() for n in values if n is not None})
    outside = any(None in values for p in panels.values() for values in p.values())
    rows = -(-len(panels) // columns)
    figure = new_figure(_WIDTH if columns == 1 else 11.5, 1.0 + 2.9 * rows)
    # Values outside of all layers are drawn to the right of them, at one tick.
    beyond = (layers[-1] + 1 + max(1, len(layers) // 12)) if layers else 0
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    for axes, (label, profile) in zip(grid.flat, panels.items(), strict=True):
        for part, values in profile.items():
            inner = [(n, v) for n, v in sorted((n, v) for n, v in values.items() if n is not None)]
            _curve(axes, PARTS.index(part), PART_LABELS[part], [n for n, _ in inner], [v for _, v in inner])
            if None in values:
                _curve(axes, PARTS.index(part), PART_LABELS[part], [beyond], [values[None]])
        axes.set_ylabel(label, fontsize=9)
        _from_zero([axes])
        _tidy(axes)
        _layer_ticks(axes, layers, beyond if outside else None)
    for axes in grid[-1]:
        axes.set_xlabel("layer")
    handles = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    order = [PART_LABELS[part] for part in parts]
    figure.legend([handles[label] for label in order], order, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def _layer_ticks(axes: Axes, layers: Sequence[int], beyond: int | None) -> None:
    stride = max(1, -(-len(layers) // 12))
    ticks = list(layers[::stride])
    labels = [str(layer) for layer in ticks]
    if beyond is not None:
        ticks.append(beyond)
        labels.append("outside\nlayers")
        if layers:
            axes.axvline((layers[-1] + beyond) / 2, color="#999999", linewidth=0.8)
    axes.set_xticks(ticks, labels)


def _curve(axes: Axes, i: int, label: str, xs: Sequence[int], ys: Sequence[float], markersize: float = 5.0) -> None:
    axes.plot(
        xs,
        [y if isfinite(y) else nan for y in ys],
        color=_COLOURS[i % len(_COLOURS)],
        linestyle=_LINES[i % len(_LINES)],
        marker=_MARKERS[i % len(_MARKERS)],
        markersize=markersize,
        linewidth=1.3,
        markerfacecolor="white" if i % 2 else _COLOURS[i % len(_COLOURS)],
        label=label,
    )


def _from_zero(row: Iterable[Axes]) -> None:
    """Set the common scale of some axes: from 0 to above the highest marker."""
    row = list(row)
    # Without data, or where all of it is NaN, the highest is not finite.
    top = max((float(axes.dataLim.ymax) for axes in row if isfinite(axes.dataLim.ymax)), default=0.0)
    for axes in row:
        axes.set_ylim(0, 1.05 * top if top > 0 else 1.0)


def _tidy(axes: Axes, grid: Literal["x", "y"] = "y") -> None:
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
