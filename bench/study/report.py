"""The report of the study: a table for each claim, and a verdict by a stated rule.

A subject's score is the mean of its seeds' accuracy on the held-out questions, at the learning rate that tuning chose
on other questions; its spread is the sample standard deviation over the seeds. The difference d of two subjects with
spreads s and t over n and m seeds is known up to e = 2 sqrt(s^2 / n + t^2 / m). The first is "not below" the second if
d - e >= -0.03, it is below if d + e < -0.03, and otherwise nothing is shown; nor is it with one seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, mean, stdev
from typing import Any, Literal, NamedTuple

from sparse_opt.tables import markdown_table

from .plan import CLAIMS, TUNING_SEED, Choice, Part, Subject, Trained
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


def not_below(first: Score, second: Score, n_comparisons: int = 1) -> bool | None:
    """Whether the first is not below the second, by the rule of the module; None if that is not shown."""
    difference = first.mean - second.mean
    # 2 standard errors for one comparison.
    width = NormalDist().inv_cdf(1 - (1 - NormalDist().cdf(2)) / n_comparisons)
    error = width * math.sqrt(first.spread**2 / first.n + second.spread**2 / second.n)
    if difference - error >= -MARGIN:
        return True
    return False if difference + error < -MARGIN else None


def report(results: Results, parts: Sequence[Part], choice: Choice, before: Mapping[str, Mapping[str, float]]) -> str:
    """The page, as Markdown. Claims without results say so.

    Args:
        before: task -> the scores of the start.
    """
    lines = []
    for claim in choice.claims:
        of_claim = [part for part in parts if claim in part.claims]
        rows = []
        for part in of_claim:
            if found := rows_of(results, part):
                rows.append(_row(part.subject, found, before.get(part.subject.task)))
        n_missing = sum(len(rows_of(results, part)) < len(part.seeds) for part in of_claim)
        lines.append(f"## Claim {claim}: {CLAIMS[claim]}\n\n**{verdict(claim, results, of_claim, choice.tasks)}**")
        if n_missing:
            lines.append(f"{n_missing} of {len(of_claim)} rows are not finished.")
        if rows:
            lines.append(markdown_table(_HEADERS, rows, n_words=3))
    return "\n\n".join(lines) + "\n"


_HEADERS = (
    "task", "algorithm", "trained", "learning rate", "before", "tuning", "after", "spread", "seeds", "bf16 changed",
    "s a run",
)  # fmt: skip


def rows_of(results: Results, part: Part) -> list[dict[str, Any]]:
    """The runs of a part's seeds at its rate; without seeds, or before they are finished, its tuning run there."""
    rate = results.best_rate(part.tuned_by)
    found = [row for row in results.of(part.subject, part.seeds) if row["learning_rate"] == rate]
    return found or [row for row in results.of(part.subject, [TUNING_SEED]) if row["learning_rate"] == rate]


def _row(subject: Subject, runs: list[dict[str, Any]], before: Mapping[str, float] | None) -> tuple[str, ...]:
    score = score_of([run["accuracy"] for run in runs])
    # Runs that shared the device with others took longer than alone.
    alone = [run["seconds"] for run in runs if run["jobs"] == 1]
    return (
        subject.task,
        subject.algorithm,
        subject.trained,
        f"{runs[0]['learning_rate']:g}",
        "" if before is None else f"{before['accuracy']:.3f}",
        f"{mean(run['tune_accuracy'] for run in runs):.3f}",
        f"{score.mean:.3f}",
        "" if math.isnan(score.spread) else f"{score.spread:.3f}",
        str(score.n) if runs[0]["seed"] != TUNING_SEED else "tuning",
        f"{mean(run['changed_bf16'] for run in runs):.1%}",
        f"{mean(alone):.0f}" if alone else "",
    )


def verdict(claim: int, results: Results, parts: Sequence[Part], tasks: Sequence[str]) -> Verdict:
    """The verdict on a claim from the finished runs of its parts.

    1: holds if on every task GRPO's dense runs change at most 35 % of the bf16 weights, and on the first SFT's at least
       60 %.
    4: holds if on every task some chosen mask of at most 2.5 % of the weights is not below dense. A mask is chosen on
       the questions for tuning, among sources that need at most a tenth of a dense run, so that the comparison on the
       held-out questions is one for each density and pattern; its errors are widened for their number (Bonferroni).
    5: holds if for every rank of LoRA the smallest random mask of tiles with at least as many trained values is not
       below it; ranks that no mask matches are left out.
    7: holds if on every task the exponent p of rate ~ density^-p, fitted to the best rates of random masks of tiles, is
       above 0, and the largest is at most twice the smallest. It needs two tasks.
    """
    if claim == 7:
        exponents = [exponent(results, parts, task) for task in tasks]
        known = [p for p in exponents if p is not None]
        if len(known) < max(2, len(tasks)):
            return "not shown"
        return "holds" if min(known) > 0 and max(known) <= LAW_RATIO * min(known) else "does not hold"
    if claim == 5:
        outcomes = [_beats_lora(results, parts)]
    else:
        outcomes = [_OF_CLAIM[claim](results, [part for part in parts if part.subject.task == task]) for task in tasks]
    if False in outcomes:
        return "does not hold"
    return "not shown" if None in outcomes else "holds"


def _seeds_of(results: Results, part: Part) -> list[dict[str, Any]]:
    """The runs of a part's seeds; none unless there are several and all are finished."""
    found = [row for row in rows_of(results, part) if row["seed"] in part.seeds]
    return found if len(found) == len(part.seeds) > 1 else []


def _few_weights(results: Results, parts: Sequence[Part]) -> bool | None:
    shares = {part.subject.algorithm: [run["changed_bf16"] for run in _seeds_of(results, part)] for part in parts}
    few, many = shares.get("grpo"), shares.get("sft")
    if not few or many == []:
        return None
    return max(few) <= FEW and (many is None or min(many) >= MANY)


def _cheap_mask(results: Results, parts: Sequence[Part]) -> bool | None:
    scores = _scores(results, parts)
    dense = scores.get(Trained("dense"))
    cheap = [
        score
        for trained, score in scores.items()
        if trained.is_mask and trained.source != "found" and (trained.amount or 100) <= 2.5
    ]
    if dense is None or not cheap:
        return None
    outcomes = [not_below(score, dense, n_comparisons=len(cheap)) for score in cheap]
    return True if any(outcomes) else None if None in outcomes else False


def _beats_lora(results: Results, parts: Sequence[Part]) -> bool | None:
    scores = _scores(results, parts)
    sizes = {Trained.parse(part.subject.trained): run["n_trained"] for part in parts for run in _seeds_of(results, part)
             if "n_trained" in run}  # fmt: skip
    outcomes = []
    for trained, score in scores.items():
        if trained.source == "lora":
            larger = [mask for mask, size in sizes.items() if mask.is_mask and size >= sizes[trained]]
            if larger:
                nearest = min(larger, key=lambda mask: sizes[mask])
                outcomes.append(not_below(scores[nearest], score))
    return False if False in outcomes else None if None in outcomes or not outcomes else True


_OF_CLAIM = {1: _few_weights, 4: _cheap_mask}


def _scores(results: Results, parts: Sequence[Part]) -> dict[Trained, Score]:
    found = {}
    for part in parts:
        if runs := _seeds_of(results, part):
            found[Trained.parse(part.subject.trained)] = score_of([run["accuracy"] for run in runs])
    return found


def exponent(results: Results, parts: Sequence[Part], task: str) -> float | None:
    """The exponent p of rate ~ density^-p by least squares; None with fewer than three densities."""
    points = []
    for part in parts:
        trained, rate = Trained.parse(part.subject.trained), results.best_rate(part.subject)
        if (
            part.subject.task == task
            and rate is not None
            and trained.pattern == "tile64"
            and trained.amount is not None
        ):
            points.append((math.log(trained.amount), math.log(rate)))
    if len(points) < 3:
        return None
    x0, y0 = (mean(axis) for axis in zip(*points, strict=True))
    return -sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)
