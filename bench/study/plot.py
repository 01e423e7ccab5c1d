"""The figure of the study: tuning, scores, scores of all sources of masks by density, and the best learning rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any

from ..common.plots import COLOURS
from .plan import SOURCES, TUNING_SEED, Choice, Part, Trained
from .results import Results
from .verdicts import Score, rows_of, score_of


def plot(
    results: Results, parts: Sequence[Part], choice: Choice, before: Mapping[str, Mapping[str, Any]], path: Path
) -> None:
    """Write the PNG. What has no runs is left out.

    Args:
        before: task -> the scores of the start.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 15), layout="constrained")
    rows: Any = figure.subfigures(2, 1, height_ratios=(1, 1.4))
    above, below = rows
    tuning, *densities, rates = above.subplots(1, 4)
    scores = below.subplots(1, len(choice.tasks), squeeze=False)[0]
    first = choice.tasks[0]
    for axes, task in zip(scores, choice.tasks, strict=True):
        _scores(axes, results, _of_grpo(parts, task), before.get(task), task)
    _tuning(tuning, results, _of_grpo(parts, first), _on_every_task(parts, choice.tasks), first)
    patterns = sorted({Trained.parse(part.subject.trained).pattern or "" for part in parts} - {"", "element"})
    for axes, pattern in zip(densities, (patterns[0] if patterns else "tiles", "element"), strict=True):
        _densities(axes, results, _of_grpo(parts, first), before.get(first), first, pattern)
    _rates(rates, results, parts, choice.tasks)
    for axes in (tuning, *densities, rates, *scores):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _of_grpo(parts: Sequence[Part], task: str) -> list[Part]:
    return [part for part in parts if part.subject.task == task and part.subject.algorithm == "grpo"]


def _on_every_task(parts: Sequence[Part], tasks: Sequence[str]) -> set[str]:
    """What is trained on every task with several seeds."""
    words = [{part.subject.trained for part in _of_grpo(parts, task) if len(part.seeds) > 1} for task in tasks]
    return set.intersection(*words)


def _tuning(axes: Any, results: Results, parts: Sequence[Part], coloured: Collection[str], task: str) -> None:
    """The tuning runs: some in colour, the others in grey."""
    lines = cycle(product(("o-", "s--", "^:"), COLOURS))
    others = "others"  # of the first grey line alone, for the legend
    for part in (part for part in parts if part.tuned_by == part.subject):
        rows = results.of(part.subject, [TUNING_SEED])
        if not rows:
            continue
        points = list(zip(*((row["learning_rate"], row["tune_accuracy"]) for row in rows), strict=True))
        if part.subject.trained in coloured:
            style, colour = next(lines)
            axes.plot(*points, style, color=colour, label=part.subject.trained)
        else:
            axes.plot(*points, color="0.8", linewidth=1, zorder=0, label=others)
            others = ""
    axes.set(xscale="log", xlabel="learning rate", ylabel="accuracy on the questions for tuning")
    axes.set(title=f"tuning on {task}")
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, loc="lower left")


def _densities(
    axes: Any,
    results: Results,
    parts: Sequence[Part],
    before: Mapping[str, Any] | None,
    task: str,
    pattern: str,
) -> None:
    """Held-out accuracy of masks by density: a line for each source that has seeds at several."""
    scores: dict[str, list[tuple[float, Score]]] = defaultdict(list)
    for part in parts:
        trained, rows = Trained.parse(part.subject.trained), rows_of(results, part)
        if not rows or rows[0]["seed"] == TUNING_SEED:
            continue
        if trained.is_mask and trained.pattern == pattern:
            assert trained.amount is not None
            scores[trained.source].append((trained.amount, score_of(rows)))
        elif trained.source == "dense":
            axes.axhline(score_of(rows).mean, color="0.4", linewidth=1, linestyle="--", label="dense")
    sources = [source for source in SOURCES if len(scores[source]) > 1]
    for source, colour in zip(sources, cycle(COLOURS)):
        percent, of_density = zip(*sorted(scores[source]), strict=True)
        means = [score.mean for score in of_density]
        axes.plot(percent, means, "-", color=colour, linewidth=1, label=source)
        for x, score in zip(percent, of_density, strict=True):
            if score.n > 1:
                axes.errorbar(x, score.mean, score.spread, fmt="o", color=colour, capsize=3)
            else:
                axes.plot(x, score.mean, "o", color=colour, markerfacecolor="white")
    if before is not None:
        axes.axhline(before["accuracy"], color="0.4", linewidth=1, linestyle=":", label="before training")
    axes.set(
        xscale="log", xlabel="trained weights, percent", ylabel="accuracy; bars: spread of seeds; hollow: one seed"
    )
    axes.set(title=f"held-out questions of {task}, {pattern}")
    if sources:
        axes.legend(frameon=False, fontsize=8, loc="lower right")


def _scores(axes: Any, results: Results, parts: Sequence[Part], before: Mapping[str, Any] | None, task: str) -> None:
    """Held-out accuracy: each seed in colour, or in grey the tuning run with the best rate; dotted: before training."""
    names: list[str] = []
    for part in parts:
        rows = rows_of(results, part)
        # Further sources of masks, which have one seed, are in `_densities`.
        if not rows or (len(part.seeds) == 1 and Trained.parse(part.subject.trained).is_mask):
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
