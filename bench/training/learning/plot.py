"""Plot of rewards during training: a panel for each algorithm or kind of mask, a line for each set of weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from sparse_opt.analysis.output_files import new_figure, save_png
from sparse_opt.masks.patterns import PATTERNS

from .runs import ALGORITHMS, TRAINED

_COLOURS = ("#000000", "#CC79A7", "#E69F00", "#D55E00", "#56B4E9", "#0072B2", "#009E73", "#F0E442")
_STYLES = ("-", "--", ":", "-.")


def plot(data: dict[str, Any], seeds: Sequence[int], path: Path) -> None:
    """Write a PNG of the runs of these seeds: means over them, and the range from the lowest to the highest.

    Rewards are averaged over a twentieth of the run, as a step's few completions make them jump.
    """
    runs = [run for run in data["runs"].values() if run["seed"] in seeds]
    panels = _panels(runs)
    figure = new_figure(4.6 * len(panels), 4.4)
    labelled: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for i, (label, what) in enumerate(panel.lines.items()):
            colour, style = _COLOURS[i % len(_COLOURS)], _STYLES[i // len(_COLOURS) % len(_STYLES)]
            curves = [smooth(r["curve"]) for r in runs if (r["algorithm"], r["trained"]) == (panel.algorithm, what)]
            if not curves:
                continue
            steps = range(1, len(curves[0]) + 1)
            columns = list(zip(*curves, strict=True))
            means = [mean(column) for column in columns]
            (labelled[label],) = axes.plot(steps, means, color=colour, linestyle=style, linewidth=1.6)
            axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.12)
        axes.set_title(panel.title)
        axes.set_xlabel("step")
        axes.set_ylabel("-loss of SFT on the kept" if panel.algorithm == "rft" else "reward")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        labelled.values(), labelled.keys(), loc="outside lower center", ncols=min(len(labelled), 6), frameon=False
    )
    save_png(figure, path)


class _Panel(NamedTuple):
    title: str
    algorithm: str
    lines: dict[str, str]  # label -> what is trained


def _panels(runs: Sequence[dict[str, Any]]) -> list[_Panel]:
    """A panel for each algorithm, or with patterns for each kind of mask and density, each including dense."""
    panels = []
    for algorithm in ALGORITHMS:
        found = {run["trained"] for run in runs if run["algorithm"] == algorithm}
        trained = sorted(found, key=lambda what: (what not in TRAINED, [*TRAINED, what].index(what), what))
        masks = {what: what.split(":") for what in trained if ":" in what}
        if not any(len(parts) > 2 for parts in masks.values()):
            panels += [_Panel(algorithm.upper(), algorithm, {what: what for what in trained})] if trained else []
            continue
        for source, density in dict.fromkeys((parts[0], parts[1]) for parts in masks.values()):
            lines = {"dense": "dense"} | {
                pattern: what
                for pattern in PATTERNS
                for what, parts in masks.items()
                if parts[:2] == [source, density] and (*parts, "element")[2] == pattern
            }
            panels.append(_Panel(f"{algorithm.upper()}, {source} masks, {density} %", algorithm, lines))
    return panels


def smooth(curve: Sequence[float]) -> list[float]:
    """The mean of each point and those before it, up to a twentieth of the curve."""
    width = max(1, len(curve) // 20)
    return [mean(curve[max(0, i + 1 - width) : i + 1]) for i in range(len(curve))]
