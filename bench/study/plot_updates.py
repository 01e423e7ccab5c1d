"""The second figure of the study: which weights training changes, how far runs agree, and what is forgotten."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

from ..common.plots import COLOURS
from .plan import TUNING_SEED, Choice, Part, Trained
from .results import Results
from .tables import difference_of
from .verdicts import MORE_THAN_CHANCE, overlaps, ratio, rows_of, score_of

# In the panel of forgetting: what is trained -> its name.
_KINDS = {"dense": "dense", "again": "dense", "subnetwork": "subnetwork", "sgd": "SGD", "lora": "LoRA"}
_KINDS |= {"shira": "SHiRA, Super-Tuning", "supertuning": "SHiRA, Super-Tuning", "lean": "random masks, bf16 moments"}

_SHOWN = 60  # the largest perplexity in this panel


def plot_updates(results: Results, parts: Sequence[Part], choice: Choice, path: Path) -> None:
    """Write the PNG. What has no runs is left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(19, 11), layout="constrained")
    (rates, layers, components), (common, close, forgotten) = figure.subplots(2, 3)
    whole = [part for part in parts if part.subject.trained == "dense"]
    _by_rate(rates, results, whole)
    for axes, what in ((layers, "layer"), (components, "component")):
        _by_place(axes, results, whole, what)
    _common(common, results, whole)
    _close(close, results, parts)
    _forgotten(forgotten, results, parts, choice.tasks[0])
    for axes in (rates, layers, components, common, close, forgotten):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _name(part: Part) -> str:
    return f"{part.subject.algorithm}, {part.subject.task}"


def _by_rate(axes: Any, results: Results, parts: Sequence[Part]) -> None:
    """The share of bf16 weights that dense runs change; runs at one rate are averaged."""
    for part, colour in zip(parts, cycle(COLOURS)):
        shares = defaultdict(list)
        for row in results.of(part.subject, (TUNING_SEED, *part.seeds)):
            shares[row["learning_rate"]].append(100 * row["changed_bf16"])
        if shares:
            rates = sorted(shares)
            axes.plot(rates, [mean(shares[rate]) for rate in rates], "o-", color=colour, label=_name(part))
    axes.set(xscale="log", xlabel="learning rate", ylabel="changed bf16 weights, percent", title="dense runs, by rate")
    _legend(axes)


def _by_place(axes: Any, results: Results, parts: Sequence[Part], what: str) -> None:
    """The share of bf16 weights that the seeds' runs change, by layer or component."""
    from matplotlib.ticker import MultipleLocator

    for part, colour in zip(parts, cycle(COLOURS)):
        if runs := rows_of(results, part):
            names = [name for name in runs[0][f"changed_by_{what}"] if name != "none"]
            shares = [100 * mean(run[f"changed_by_{what}"].get(name, 0.0) for run in runs) for name in names]
            axes.plot(names, shares, "o-" if what == "layer" else "o", color=colour, markersize=4, label=_name(part))
    axes.set(xlabel=what, ylabel="changed bf16 weights, percent", title=f"dense runs at their best rate, by {what}")
    if what == "layer":
        axes.xaxis.set_major_locator(MultipleLocator(4))
    else:
        axes.tick_params(axis="x", rotation=45)
    axes.set_ylim(bottom=0)
    _legend(axes)


def _common(axes: Any, results: Results, parts: Sequence[Part]) -> None:
    """Weights that two runs have changed both, in relation to chance: a point for each pair."""
    ratios = defaultdict(list)
    for first, second, counts in overlaps(results, parts):
        ratios[difference_of(first, second)].append(ratio(counts))
    kinds = sorted(ratios, key=lambda kind: (kind.count(","), kind))
    for i, kind in enumerate(kinds):
        axes.plot(ratios[kind], [i] * len(ratios[kind]), "o", color=COLOURS[0], alpha=0.5)
    axes.axvline(1, color="0.4", linewidth=1, linestyle="--", label="chance")
    axes.axvline(MORE_THAN_CHANCE, color="0.4", linewidth=1, linestyle=":", label="rule of claim 2")
    axes.set_yticks(range(len(kinds)), [f"differ in {kind}" for kind in kinds], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="common changed weights / expected by chance", title="pairs of dense runs")
    _legend(axes)


def _close(axes: Any, results: Results, parts: Sequence[Part]) -> None:
    """How close runs that are compared with the dense run of their seed come to its weights."""
    rows = [row for part in parts for row in rows_of(results, part) if "closeness" in row]
    names = [f"{row['trained']}, {row['task']}, seed {row['seed']}" for row in rows]
    measures = {
        "within_1e-5": "changed weights within 1e-5",
        "within_1e-4": "within 1e-4",
        "cosine": "cosine of updates",
    }
    for (key, label), marker, colour in zip(measures.items(), "os^", COLOURS, strict=False):
        axes.plot(
            [row["closeness"][key] for row in rows], range(len(rows)), marker, color=colour, alpha=0.7, label=label
        )
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.05), xlabel="share, or cosine", title="against the dense run of the seed")
    _legend(axes, "lower left")


def _forgotten(axes: Any, results: Results, parts: Sequence[Part], task: str) -> None:
    """Held-out accuracy against the perplexity of the start's texts: a point for each choice of what is trained."""
    points = defaultdict(list)
    for part in parts:
        runs = rows_of(results, part)
        if not runs or (part.subject.task, part.subject.algorithm) != (task, "grpo") or runs[0]["seed"] == TUNING_SEED:
            continue
        trained, perplexities = Trained.parse(part.subject.trained), [run["perplexity"] for run in runs]
        if None in perplexities:
            continue
        shape = "single elements" if trained.pattern == "element" else "tiles"
        kind = _KINDS.get(trained.source) or f"{'random' if trained.source == 'random' else 'other'} masks, {shape}"
        points[kind].append((mean(perplexities), score_of(runs).mean))
    markers = cycle("os^vDP*X")
    for (kind, found), colour, marker in zip(sorted(points.items()), cycle(COLOURS), markers):
        axes.plot(*zip(*found, strict=True), marker, color=colour, alpha=0.8, linestyle="", label=kind)
    beyond = sum(perplexity > _SHOWN for found in points.values() for perplexity, _ in found)
    label = "perplexity of texts that the start wrote" + (f"; {beyond} above {_SHOWN} are left out" if beyond else "")
    axes.set(xscale="log", xlabel=label, ylabel="held-out accuracy", title=f"GRPO on {task}: learned and forgotten")
    if any(perplexity <= _SHOWN for found in points.values() for perplexity, _ in found):
        axes.set_xlim(right=_SHOWN)
    _legend(axes, "lower right")


def _legend(axes: Any, place: str = "best") -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, loc=place)
