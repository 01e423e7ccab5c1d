"""The figure of docs/study.md. Panels without finished runs are empty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from sparse_opt.bench.plot import COLOURS

from ..training import SOURCES
from .plan import Part, Study, Trained
from .report import has_seeds
from .verdicts import score_of

# What is trained, in words; the amount of a mask or the rank of an adapter follows.
WORDS = {
    "dense": "all weights, AdamW",
    "sgd": "all weights, SGD",
    "subnetwork": "what a dense run changed",
    "lora": "LoRA, rank",
    "shira": "SHiRA, rank",
    "supertuning": "Super-Tuning, rank",
    "random": "random",
    "lean": "random, bf16 moments,",
}
SHOWN = 40  # the largest perplexity in the panel of forgetting


def plot(study: Study, path: Path) -> None:
    """Held-out scores by what is trained and by the size of a mask, and what is forgotten."""
    figure = Figure(figsize=(14, 11), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    parts = {
        task: [part for part in study.parts if part.subject[:2] == ("grpo", task) and part.claims]
        for task in study.tasks
    }
    compared = {part.trained: in_words(part) for found in parts.values() for part in found if is_compared(study, part)}
    names = [compared[trained] for trained in sorted(compared, key=in_order)]
    panels = above.subplots(1, len(study.tasks), squeeze=False, sharey=True)[0]
    for axes, task in zip(panels, study.tasks, strict=True):
        plot_scores(axes, study, parts[task], task, names)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    first = study.tasks[0]
    sizes, forgotten = below.subplots(1, 2)
    plot_sizes(sizes, study, parts[first], first)
    plot_forgotten(forgotten, study, parts[first], first)
    for axes in (*panels, sizes, forgotten):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def in_order(trained: Trained) -> tuple[int, bool, float]:
    return list(WORDS).index(trained.source), trained.pattern == "element", trained.amount or 0


def in_words(part: Part) -> str:
    source, amount, pattern = part.trained
    if amount is None:
        return WORDS[source]
    if pattern is None:
        return f"{WORDS[source]} {amount:g}"
    return f"{WORDS[source]} {amount:g} %, {'single elements' if pattern == 'element' else 'tiles'}"


def is_compared(study: Study, part: Part) -> bool:
    """Whether it has several seeds, and is no mask of another source, which the panel of sizes has."""
    return part.trained.source in WORDS and len(study.rows_of(part)) > 1 and has_seeds(study.rows_of(part))


def plot_scores(axes: Any, study: Study, parts: Sequence[Part], task: str, names: Sequence[str]) -> None:
    for part in parts:
        if is_compared(study, part):
            values, y = [row["accuracy"] for row in study.rows_of(part)], names.index(in_words(part))
            colour = COLOURS[0 if part.trained.is_mask else 1]
            axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.5)
            axes.plot(mean(values), y, "|", color=colour, markersize=16, markeredgewidth=2)
    before = f" ({study.starts[task]['accuracy']:.3f} before training)" if task in study.starts else ""
    axes.grid(axis="y", color="0.92")
    axes.set(xlabel="accuracy on held-out questions: seeds and mean", title=f"{task}{before}")


def plot_sizes(axes: Any, study: Study, parts: Sequence[Part], task: str) -> None:
    """A line for each source of masks of tiles that has several sizes."""
    scores = defaultdict(list)
    for part in parts:
        if has_seeds(rows := study.rows_of(part)):
            if part.trained.pattern not in (None, "element"):
                scores[part.trained.source].append((part.trained.amount, score_of(rows)))
            elif part.trained.source == "dense":
                axes.axhline(score_of(rows).mean, color="0.4", linewidth=1, linestyle="--", label="all weights")
    sources = [source for source in SOURCES if len(scores[source]) > 1]
    for source, colour in zip(sources, cycle(COLOURS)):
        xs, means = zip(*((x, score.mean) for x, score in sorted(scores[source])), strict=True)
        is_random = source == "random"
        axes.plot(xs, means, "o-", color=colour, linewidth=3 if is_random else 1, label=source, zorder=3 - is_random)
    axes.set(xscale="log", xlabel="trained weights, percent", ylabel="accuracy on held-out questions")
    axes.set(title=f"{task}, masks of tiles by source and size")
    axes.set_xticks([0.1, 1, 2.5, 10], ["0.1", "1", "2.5", "10"])
    if sources:
        axes.legend(frameon=False, loc="lower right")


def plot_forgotten(axes: Any, study: Study, parts: Sequence[Part], task: str) -> None:
    """A point for each choice of what is trained."""
    kinds = {"random": "random masks", "lean": "random masks", "lora": "LoRA", "sgd": "SGD", "dense": "all weights"}
    kinds |= {"again": "all weights", "subnetwork": "what a dense run changed", "shira": "SHiRA, Super-Tuning"}
    kinds["supertuning"] = kinds["shira"]
    points = defaultdict(list)
    for part in parts:
        runs = study.rows_of(part)
        perplexities = [run["perplexity"] for run in runs]
        if has_seeds(runs) and None not in perplexities:
            points[kinds.get(part.trained.source, "other masks")].append((mean(perplexities), score_of(runs).mean))
    for (kind, found), colour, marker in zip(sorted(points.items()), cycle(COLOURS), cycle("os^vDP*X")):
        axes.plot(*zip(*found, strict=True), marker, color=colour, alpha=0.8, markersize=8, linestyle="", label=kind)
    beyond = sum(perplexity > SHOWN for found in points.values() for perplexity, _ in found)
    note = f"; {beyond} above {SHOWN} are left out" if beyond else ""
    axes.set(xlabel=f"perplexity of texts that the model wrote before training{note}")
    axes.set(ylabel="accuracy on held-out questions", title=f"{task}, learned and forgotten")
    if points:
        axes.set_xlim(min(perplexity for found in points.values() for perplexity, _ in found) - 1, SHOWN)
        axes.legend(frameon=False, loc="lower right")
