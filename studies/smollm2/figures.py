"""The figure of docs/study.md. Panels without finished runs are empty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from sparse_opt.bench.plot import COLOURS

from ..training import SOURCES, TUNING_SEED
from .plan import Part, Study
from .report import has_seeds
from .verdicts import score_of

# In the panel of forgetting: what is trained -> its name.
_KINDS = {"dense": "dense", "again": "dense", "subnetwork": "subnetwork", "sgd": "SGD", "lora": "LoRA"}
_KINDS |= {"shira": "SHiRA, Super-Tuning", "supertuning": "SHiRA, Super-Tuning", "lean": "random masks, bf16 moments"}
_SHOWN = 60  # the largest perplexity in that panel


def plot(study: Study, path: Path) -> None:
    """Tuning, held-out scores by density and by what is trained, and what is forgotten."""
    figure = Figure(figsize=(20, 15), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.4))
    tuning, tiles, elements, forgotten = above.subplots(1, 4)
    scores = below.subplots(1, len(study.tasks), squeeze=False)[0]
    of_grpo = {
        task: [part for part in study.parts if part.subject[:2] == ("grpo", task) and part.claims]
        for task in study.tasks
    }
    for axes, task in zip(scores, study.tasks, strict=True):
        _scores(axes, study, of_grpo[task], task)
    words = [{part.subject.trained for part in parts if len(part.seeds) > 1} for parts in of_grpo.values()]
    first = study.tasks[0]
    _tuning(tuning, study, of_grpo[first], set.intersection(*words), first)
    _densities(tiles, study, of_grpo[first], first, {part.trained.pattern for part in study.parts} - {None, "element"})
    _densities(elements, study, of_grpo[first], first, {"element"})
    _forgotten(forgotten, study, of_grpo[first], first)
    for axes in (tuning, tiles, elements, forgotten, *scores):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _legend(axes: Any, place: str = "best") -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, loc=place)


def _tuning(axes: Any, study: Study, parts: Sequence[Part], coloured: set[str], task: str) -> None:
    lines = cycle(product(("o-", "s--", "^:"), COLOURS))
    others = "others"  # the label of the first grey line
    for part in parts:
        rows = study.of(part.subject, [TUNING_SEED]) if part.tuned_by == part.subject else []
        points = [[row[key] for row in rows] for key in ("learning_rate", "tune_accuracy")]
        if rows and part.subject.trained in coloured:
            style, colour = next(lines)
            axes.plot(*points, style, color=colour, label=part.subject.trained)
        elif rows:
            axes.plot(*points, color="0.8", linewidth=1, zorder=0, label=others)
            others = ""
    axes.set(xscale="log", xlabel="learning rate", ylabel="accuracy on the questions for tuning")
    axes.set(title=f"tuning on {task}")
    _legend(axes, "lower left")


def _densities(axes: Any, study: Study, parts: Sequence[Part], task: str, patterns: set[Any]) -> None:
    """A line for each source that has seeds at several densities."""
    scores = defaultdict(list)
    for part in parts:
        rows = study.rows_of(part)
        if has_seeds(rows) and part.trained.pattern in patterns:
            scores[part.trained.source].append((part.trained.amount, score_of(rows)))
        elif has_seeds(rows) and part.trained.source == "dense":
            axes.axhline(score_of(rows).mean, color="0.4", linewidth=1, linestyle="--", label="dense")
    sources = [source for source in SOURCES if len(scores[source]) > 1]
    for source, colour in zip(sources, cycle(COLOURS)):
        found = sorted(scores[source])
        axes.plot(*zip(*((x, score.mean) for x, score in found), strict=True), color=colour, linewidth=1, label=source)
        for x, score in found:
            if score.n > 1:
                axes.errorbar(x, score.mean, score.spread, fmt="o", color=colour, capsize=3)
            else:
                axes.plot(x, score.mean, "o", color=colour, markerfacecolor="white")
    if task in study.starts:
        before = study.starts[task]["accuracy"]
        axes.axhline(before, color="0.4", linewidth=1, linestyle=":", label="before training")
    axes.set(xscale="log", xlabel="trained weights, percent")
    axes.set(ylabel="accuracy; bars: spread of seeds; hollow: one seed")
    axes.set(title=f"held-out questions of {task}, {', '.join(patterns)}")
    if sources:
        _legend(axes, "lower right")


def _scores(axes: Any, study: Study, parts: Sequence[Part], task: str) -> None:
    names: list[str] = []
    for part in parts:
        rows = study.rows_of(part)
        if rows and (len(part.seeds) != 1 or not part.trained.is_mask):  # masks of one seed are in `_densities`
            values, colour = [row["accuracy"] for row in rows], COLOURS[0 if has_seeds(rows) else 8]
            axes.plot(values, [len(names)] * len(values), "o", color=colour, alpha=0.6)
            axes.plot(mean(values), len(names), "|", color=colour, markersize=16)
            names.append(part.subject.trained)
    if task in study.starts:
        axes.axvline(study.starts[task]["accuracy"], color=COLOURS[7], linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="accuracy; blue: a seed; grey: a tuning run; dotted: before", title=f"held-out questions of {task}")


def _forgotten(axes: Any, study: Study, parts: Sequence[Part], task: str) -> None:
    """A point for each choice of what is trained."""
    points = defaultdict(list)
    for part in parts:
        runs, trained = study.rows_of(part), part.trained
        perplexities = [run["perplexity"] for run in runs]
        if has_seeds(runs) and None not in perplexities:
            shape = "single elements" if trained.pattern == "element" else "tiles"
            kind = _KINDS.get(trained.source) or f"{'random' if trained.source == 'random' else 'other'} masks, {shape}"
            points[kind].append((mean(perplexities), score_of(runs).mean))
    for (kind, found), colour, marker in zip(sorted(points.items()), cycle(COLOURS), cycle("os^vDP*X")):
        axes.plot(*zip(*found, strict=True), marker, color=colour, alpha=0.8, linestyle="", label=kind)
    beyond = sum(perplexity > _SHOWN for found in points.values() for perplexity, _ in found)
    label = "perplexity of texts that the start wrote" + (f"; {beyond} above {_SHOWN} are left out" if beyond else "")
    axes.set(xscale="log", xlabel=label, ylabel="held-out accuracy", title=f"GRPO on {task}: learned and forgotten")
    if points:
        axes.set_xlim(right=_SHOWN)
    _legend(axes, "lower right")
