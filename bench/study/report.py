"""The report of the study: a table for each claim, and a verdict by a stated rule.

A subject's score is the mean of its seeds' accuracy on the held-out questions, at the learning rate that tuning chose
on other questions; its spread is the sample standard deviation over the seeds. The difference d of two subjects with
spreads s and t over n and m seeds is known up to e = 2 sqrt(s^2 / n + t^2 / m). The first is "not below" the second if
d - e >= -0.03, it is below if d + e < -0.03, and otherwise nothing is shown; nor is it with one seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

from sparse_opt.tables import markdown_table

from .plan import CLAIMS, Subject, Trained, subjects
from .results import Results

Verdict = Literal["holds", "does not hold", "not shown"]
MARGIN = 0.03  # of accuracy
# Claim 1, after the published shares: 5-30 % in reinforcement learning, 85-94 % in supervised fine-tuning.
FEW, MANY = 0.35, 0.6
# Claim 7: the largest ratio between two tasks' exponents of the law.
LAW_RATIO = 2.0


class Score(NamedTuple):
    """The score of a subject over its seeds."""

    mean: float
    spread: float
    n: int


def score_of(values: Sequence[float]) -> Score:
    """Mean and sample standard deviation; NaN as the spread of one value."""
    return Score(mean(values), stdev(values) if len(values) > 1 else math.nan, len(values))


def not_below(first: Score, second: Score) -> bool | None:
    """Whether the first is not below the second, by the rule of the module; None if that is not shown."""
    difference = first.mean - second.mean
    error = 2 * math.sqrt(first.spread**2 / first.n + second.spread**2 / second.n)
    if difference - error >= -MARGIN:
        return True
    return False if difference + error < -MARGIN else None


def report(
    results: Results,
    claims: Sequence[int],
    tasks: Sequence[str],
    algorithms: Sequence[str],
    seeds: Sequence[int],
    before: dict[str, float],
) -> str:
    """The page, as Markdown. Claims without results say so.

    Args:
        before: task -> accuracy of the start on the held-out questions.
    """
    parts = []
    for claim in claims:
        needed = subjects(claim, tasks, algorithms)
        rows, n_missing = [], 0
        for subject in needed:
            runs = results.chosen(subject, seeds)
            n_missing += len(runs) < len(seeds)
            if runs:
                rows.append(_row(subject, runs, before.get(subject.task)))
        found = verdict(claim, results, tasks, algorithms, seeds) if not n_missing else "not shown"
        parts.append(f"## Claim {claim}: {CLAIMS[claim]}\n\n**{found}**")
        if n_missing:
            parts.append(f"{n_missing} of {len(needed)} rows are not finished.")
        if rows:
            parts.append(markdown_table(_HEADERS, rows, n_words=3))
    return "\n\n".join(parts) + "\n"


_HEADERS = (
    "task", "algorithm", "trained", "learning rate", "before", "after", "spread", "seeds", "bf16 changed", "s a run",
)  # fmt: skip


def _row(subject: Subject, runs: list[dict[str, Any]], before: float | None) -> tuple[str, ...]:
    score = score_of([run["accuracy"] for run in runs])
    return (
        subject.task,
        subject.algorithm,
        subject.trained,
        f"{runs[0]['learning_rate']:g}",
        "" if before is None else f"{before:.3f}",
        f"{score.mean:.3f}",
        "" if math.isnan(score.spread) else f"{score.spread:.3f}",
        str(score.n),
        f"{mean(run['changed_bf16'] for run in runs):.1%}",
        f"{mean(run['seconds'] for run in runs):.0f}",
    )


def verdict(
    claim: int, results: Results, tasks: Sequence[str], algorithms: Sequence[str], seeds: Sequence[int]
) -> Verdict:
    """The verdict on a claim whose runs are finished.

    1: holds if on every task GRPO's dense runs change at most 35 % of the bf16 weights and SFT's at least 60 %.
    4: holds if on every task some mask that needs no dense run, of at most 2.5 % of the weights, is not below dense.
    5: holds if on every task, for every rank of LoRA, the smallest mask with at least as many trained values is not
       below it; ranks that no mask matches are left out.
    7: holds if on every task the exponent p of rate ~ density^-p, fitted to the best rates of random masks of tiles, is
       above 0, and the largest is at most twice the smallest. It needs two tasks.
    """
    if claim == 7:
        exponents = [_exponent(results, task, algorithms) for task in tasks]
        known = [p for p in exponents if p is not None]
        if len(known) < max(2, len(tasks)):
            return "not shown"
        return "holds" if min(known) > 0 and max(known) <= LAW_RATIO * min(known) else "does not hold"
    outcomes = [_OF_CLAIM[claim](results, task, algorithms, seeds) for task in tasks]
    if False in outcomes:
        return "does not hold"
    return "not shown" if None in outcomes else "holds"


def _few_weights(results: Results, task: str, algorithms: Sequence[str], seeds: Sequence[int]) -> bool | None:
    shares = {
        algorithm: [run["changed_bf16"] for run in results.chosen(Subject(algorithm, task, "dense"), seeds)]
        for algorithm in ("grpo", "sft")
    }
    if not all(shares.values()):
        return None
    return max(shares["grpo"]) <= FEW and min(shares["sft"]) >= MANY


def _cheap_mask(results: Results, task: str, algorithms: Sequence[str], seeds: Sequence[int]) -> bool | None:
    scores = _scores(results, 4, task, algorithms, seeds)
    cheap = [
        score
        for trained, score in scores.items()
        if trained.is_mask and not trained.needs_finding_run and (trained.amount or 100) <= 2.5
    ]
    dense = scores.get(Trained("dense"))
    if dense is None or not cheap:
        return None
    outcomes = [not_below(score, dense) for score in cheap]
    return True if any(outcomes) else None if None in outcomes else False


def _beats_lora(results: Results, task: str, algorithms: Sequence[str], seeds: Sequence[int]) -> bool | None:
    scores = _scores(results, 5, task, algorithms, seeds)
    sizes = {
        Trained.parse(subject.trained): max(run["n_trained"] for run in runs)
        for subject in subjects(5, [task], algorithms)
        if (runs := results.chosen(subject, seeds)) and "n_trained" in runs[0]
    }
    outcomes = []
    for trained, score in scores.items():
        if trained.source == "lora":
            larger = [mask for mask, size in sizes.items() if mask.is_mask and size >= sizes[trained]]
            if larger:
                nearest = min(larger, key=lambda mask: sizes[mask])
                outcomes.append(not_below(scores[nearest], score))
    return False if False in outcomes else None if None in outcomes or not outcomes else True


_OF_CLAIM = {1: _few_weights, 4: _cheap_mask, 5: _beats_lora}


def _scores(
    results: Results, claim: int, task: str, algorithms: Sequence[str], seeds: Sequence[int]
) -> dict[Trained, Score]:
    found = {}
    for subject in subjects(claim, [task], algorithms):
        if runs := results.chosen(subject, seeds):
            found[Trained.parse(subject.trained)] = score_of([run["accuracy"] for run in runs])
    return found


def _exponent(results: Results, task: str, algorithms: Sequence[str]) -> float | None:
    """The exponent p of rate ~ density^-p by least squares; None with fewer than three densities."""
    points = []
    for subject in subjects(7, [task], algorithms):
        trained, rate = Trained.parse(subject.trained), results.best_rate(subject)
        if rate is not None and trained.pattern == "tile64" and trained.amount is not None:
            points.append((math.log(trained.amount), math.log(rate)))
    if len(points) < 3:
        return None
    x0, y0 = (mean(axis) for axis in zip(*points, strict=True))
    return -sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)
