"""The figure of the study: tuning, scores, and the best learning rate against density."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any

from ..common.plots import COLOURS
from .plan import TUNING_SEED, Choice, Part, Trained
from .results import Results
from .verdicts import rows_of


def plot(
    results: Results, parts: Sequence[Part], choice: Choice, before: Mapping[str, Mapping[str, Any]], path: Path
) -> None:
    """Write the PNG. What has no runs is left out.

    Args:
        before: task -> the scores of the start.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11 + 4 * len(choice.tasks), 7), layout="constrained")
    tuning, *scores, rates = figure.subplots(1, 2 + len(choice.tasks))
    for axes, task in zip(scores, choice.tasks, strict=True):
        _scores(axes, results, _of_grpo(parts, task), before.get(task), task)
    _tuning(tuning, results, _of_grpo(parts, choice.tasks[0]), choice.tasks[0])
    _rates(rates, results, parts, choice.tasks)
    for axes in (tuning, *scores, rates):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _of_grpo(parts: Sequence[Part], task: str) -> list[Part]:
    return [part for part in parts if part.subject.task == task and part.subject.algorithm == "grpo"]


def _tuning(axes: Any, results: Results, parts: Sequence[Part], task: str) -> None:
    """The tuning runs: in colour those of what has runs with seeds, in grey the others."""
    lines = cycle(product(("o-", "s--", "^:"), COLOURS))
    others = "others"  # of the first grey line alone, for the legend
    for part in (part for part in parts if part.tuned_by == part.subject):
        rows = results.of(part.subject, [TUNING_SEED])
        if not rows:
            continue
        points = list(zip(*((row["learning_rate"], row["tune_accuracy"]) for row in rows), strict=True))
        if rows_of(results, part)[0]["seed"] == TUNING_SEED:
            axes.plot(*points, color="0.8", linewidth=1, zorder=0, label=others)
            others = ""
        else:
            style, colour = next(lines)
            axes.plot(*points, style, color=colour, label=part.subject.trained)
    axes.set(xscale="log", xlabel="learning rate", ylabel="accuracy on the questions for tuning")
    axes.set(title=f"tuning on {task}")
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


def _scores(axes: Any, results: Results, parts: Sequence[Part], before: Mapping[str, Any] | None, task: str) -> None:
    """Held-out accuracy: each seed in colour, or in grey the tuning run with the best rate; dotted: before training."""
    names: list[str] = []
    for part in parts:
        rows = rows_of(results, part)
        if not rows:
            continue
        values, place = [row["accuracy"] for row in rows], len(names)
        names.append(part.subject.trained)
        tuned = rows[0]["seed"] == TUNING_SEED  # one run, with the tuning seed
        colour = COLOURS[8] if tuned else COLOURS[0]
        axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.6)
        axes.plot(mean(values), place, "|", color=colour, markersize=16)
    if before is not None:
        axes.axvline(before["accuracy"], color=COLOURS[7], linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="accuracy; blue: a seed; grey: a tuning run; dotted: before", title=f"held-out questions of {task}")


def _rates(axes: Any, results: Results, parts: Sequence[Part], tasks: Sequence[str]) -> None:
    for i, task in enumerate(tasks):
        points = []
        for part in parts:
            trained, rate = Trained.parse(part.subject.trained), results.best_rate(part.subject)
            own = part.subject.task == task and part.subject.algorithm == "grpo" and part.tuned_by == part.subject
            if own and rate is not None and (trained.source == "dense" or trained.source == "random"):
                if trained.pattern != "element":
                    points.append((trained.amount or 100.0, rate))
        if points:
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=COLOURS[i], label=task)
    axes.set(xscale="log", yscale="log", xlabel="trained weights, percent", ylabel="best learning rate")
    axes.set(title="the best rate by density")
    if axes.lines:
        axes.legend(frameon=False)
