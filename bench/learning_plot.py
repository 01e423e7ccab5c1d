"""Rewards as the loops train: a panel for each algorithm, a line for each set of trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from sparse_opt.atomic_files import written_aside

from .learning import ALGORITHMS, TRAINED

_COLOURS = ("#000000", "#CC79A7", "#E69F00", "#D55E00", "#56B4E9", "#0072B2", "#009E73", "#F0E442")
_STYLES = ("-", "--", ":", "-.")


def plot(data: dict[str, Any], seeds: Sequence[int], path: Path) -> None:
    """Write a PNG of the runs of these seeds: means over them, and the range from the lowest to the highest.

    Rewards are averaged over a twentieth of the run, as a step's few completions make them jump.
    """
    from matplotlib.figure import Figure

    runs = [run for run in data["runs"].values() if run["seed"] in seeds]
    algorithms = [name for name in ALGORITHMS if any(run["algorithm"] == name for run in runs)]
    trained = sorted(
        {run["trained"] for run in runs}, key=lambda what: (what not in TRAINED, [*TRAINED, what].index(what), what)
    )
    figure = Figure(figsize=(4.6 * len(algorithms), 4.4), layout="constrained")
    panels = figure.subplots(1, len(algorithms), squeeze=False)[0]
    for axes, algorithm in zip(panels, algorithms, strict=True):
        for i, what in enumerate(trained):
            colour, style = _COLOURS[i % len(_COLOURS)], _STYLES[i // len(_COLOURS) % len(_STYLES)]
            curves = [smooth(run["curve"]) for run in runs if (run["algorithm"], run["trained"]) == (algorithm, what)]
            if not curves:
                continue
            steps = range(1, len(curves[0]) + 1)
            columns = list(zip(*curves, strict=True))
            axes.plot(
                steps, [mean(column) for column in columns], color=colour, linestyle=style, label=what, linewidth=1.6
            )
            axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.12)
        axes.set_title(algorithm.upper())
        axes.set_xlabel("step")
        axes.set_ylabel("-loss of SFT on the kept" if algorithm == "rft" else "reward")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    with written_aside(path) as aside:
        figure.savefig(aside, dpi=150, format="png")


def smooth(curve: Sequence[float]) -> list[float]:
    """The mean of each point and those before it, up to a twentieth of the curve."""
    width = max(1, len(curve) // 20)
    return [mean(curve[max(0, i + 1 - width) : i + 1]) for i in range(len(curve))]
