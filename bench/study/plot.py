"""The figure of the study: tuning, scores, and the best learning rate against density."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    figure = Figure(figsize=(15, 7), layout="constrained")
    tuning, scores, rates = figure.subplots(1, 3)
    of_first = [part for part in parts if part.subject.task == choice.tasks[0] and part.subject.algorithm == "grpo"]
    _tuning(tuning, results, of_first)
    _scores(scores, results, of_first, before.get(choice.tasks[0]))
    _rates(rates, results, parts, choice.tasks)
    for axes in (tuning, scores, rates):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _tuning(axes: Any, results: Results, parts: Sequence[Part]) -> None:
    for i, part in enumerate(part for part in parts if part.tuned_by == part.subject):
        rows = results.of(part.subject, [TUNING_SEED])
        if rows:
            points = [(row["learning_rate"], row["tune_accuracy"]) for row in rows]
            style = ("o-", "s--", "^:")[i // len(COLOURS) % 3]
            axes.plot(*zip(*points, strict=True), style, color=COLOURS[i % len(COLOURS)], label=part.subject.trained)
    axes.set(xscale="log", xlabel="learning rate", ylabel="accuracy on the questions for tuning", title="tuning")
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


def _scores(axes: Any, results: Results, parts: Sequence[Part], before: Mapping[str, Any] | None) -> None:
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
    axes.set(xlabel="accuracy on held-out questions", title="seeds (blue), or one run (grey); dotted: before")


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
