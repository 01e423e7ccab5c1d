"""Verdicts on the claims, by the rules in README.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist, mean, stdev
from typing import Any, NamedTuple

from ..training import TUNING_SEED, Trained
from .plan import OF_DENSE, Part, Run, Study, Subject

OF_SCORES = (3, 4, 5, 6, 8, 9, 10)  # claims whose verdict is from differences of scores
MARGIN, GAIN = 0.05, 0.1  # of accuracy
FEW, MANY, FULL_RANK = 0.35, 0.6, 0.95  # claim 1; 5-30 % and 85-94 % are the published shares
MORE_THAN_CHANCE = 1.1  # claim 2: common weights of two runs, in multiples of chance
SAME = 0.99  # claim 3: the share of the changed weights that must be within 1e-4
LAW_RATIO = 2.0  # claim 7: between the exponents of two tasks

Parts = Sequence[Part]


class Score(NamedTuple):
    """Mean accuracy and sample standard deviation over n seeds, and of each held-out question the mean over them."""

    mean: float
    spread: float  # NaN for one seed
    n: int
    questions: tuple[float, ...]


def score_of(rows: Sequence[Mapping[str, Any]]) -> Score:
    values, n = [row["accuracy"] for row in rows], rows[0]["n_generations"]
    by_question = zip(*(row["right"] for row in rows), strict=True)
    spread = stdev(values) if len(values) > 1 else math.nan
    return Score(mean(values), spread, len(values), tuple(mean(map(int, digits)) / n for digits in by_question))


class Difference(NamedTuple):
    """How far a score is above another, known up to an error."""

    value: float
    error: float

    @property
    def not_below(self) -> bool | None:
        """By the rule of the module; None if nothing is shown."""
        if self.value - self.error >= -MARGIN:
            return True
        return False if self.value + self.error < -MARGIN else None


def difference(first: Score, second: Score, n_comparisons: int = 1) -> Difference:
    """The difference of two scores, with the error of one of several comparisons (Bonferroni)."""
    of_each = [a - b for a, b in zip(first.questions, second.questions, strict=True)]
    of_questions = stdev(of_each) ** 2 / len(of_each)
    width = NormalDist().inv_cdf(1 - (1 - NormalDist().cdf(2)) / n_comparisons)  # 2 standard errors for one
    error = width * math.sqrt(first.spread**2 / first.n + second.spread**2 / second.n + of_questions)
    return Difference(first.mean - second.mean, error)


def verdict(study: Study, claim: int, tasks: Sequence[str]) -> str:
    """holds, does not hold, or not shown, of some tasks together."""
    parts, by_task = study.of_claim(claim, tasks), {task: study.of_claim(claim, [task]) for task in tasks}
    if not all(map(study.is_finished, parts)):
        return "not shown"
    if claim in OF_SCORES and not all(_learned(study, claim, task, found) for task, found in by_task.items()):
        return "not shown"
    if claim == 7:
        outcomes = [_same_law(study, by_task)]
    elif claim == 2:
        outcomes = [_common_weights(study, parts)]
    else:
        outcomes = [{1: _few_weights, 3: _subnetwork, 4: _some_mask}.get(claim, _all)(study, claim, found)
                    for found in by_task.values()]  # fmt: skip
    return "does not hold" if False in outcomes else "not shown" if None in outcomes else "holds"


def scores(study: Study, parts: Parts) -> dict[Trained, Score]:
    """The scores of the parts with several seeds, all finished."""
    return {part.trained: score_of(runs) for part in parts if (runs := study.seeds_of(part))}


def _learned(study: Study, claim: int, task: str, parts: Parts) -> bool:
    source = "lean" if claim == 9 else "dense"
    first = next((score for trained, score in scores(study, parts).items() if trained.source == source), None)
    return first is not None and task in study.starts and first.mean - study.starts[task]["accuracy"] >= GAIN


def _few_weights(study: Study, claim: int, parts: Parts) -> bool | None:
    runs = {part.subject.algorithm: study.seeds_of(part) for part in parts}
    few, many = runs.get("grpo"), runs.get("sft")
    if not few or many == []:
        return None
    return (
        max(run["changed_bf16"] for run in few) <= FEW
        and mean(run["ranks"]["numerical"] for run in few) >= FULL_RANK
        and (many is None or min(run["changed_bf16"] for run in many) >= MANY)
    )


def overlaps(study: Study, parts: Parts) -> Iterator[tuple[Run, Run, dict[str, float]]]:
    """The pairs of dense runs of seeds, at the parts' rates, whose changed weights were compared."""
    rows = [row for part in parts for row in study.rows_of(part) if row["seed"] != TUNING_SEED]
    runs = [Run(row["algorithm"], row["task"], row["trained"], row["learning_rate"], row["seed"]) for row in rows]
    by_name, seen = {run.name: run for run in runs}, set()
    for run, row in zip(runs, rows, strict=True):
        for other, counts in row.get("overlaps", {}).items():
            if other in by_name and (pair := frozenset((run.name, other))) not in seen:
                seen.add(pair)
                yield run, by_name[other], counts


def ratio(counts: Mapping[str, float], n_stderrs: float = 0) -> float:
    """Common weights of two runs, plus some standard errors of their estimate, in multiples of those by chance."""
    return (counts["n_both"] + n_stderrs * counts["n_both_stderr"]) / max(1.0, counts["expected"])


def _common_weights(study: Study, parts: Parts) -> bool | None:
    n_runs = sum(len(study.seeds_of(part)) for part in parts)
    found = [counts for _, _, counts in overlaps(study, parts)]
    if not found or len(found) < n_runs * (n_runs - 1) // 2 or not all(map(study.seeds_of, parts)):
        return None
    if all(ratio(counts, -2) >= MORE_THAN_CHANCE for counts in found):
        return True
    return False if all(ratio(counts, 2) < MORE_THAN_CHANCE for counts in found) else None


def compared(study: Study, claim: int, parts: Parts) -> dict[tuple[Trained, Trained], Difference]:
    """The differences that the verdict on a claim of `OF_SCORES` is from; the parts are those of one task."""
    found, dense = scores(study, parts), Trained("dense")
    if claim == 5:
        pairs = [(mask, lora) for lora in found if lora.source == "lora" and (mask := _mask_like(study, parts, lora))]
    elif claim == 8:
        pairs = [(lean, lean._replace(source="random")) for lean in found if lean.source == "lean"]
        pairs = [pair for pair in pairs if pair[1] in found]
    elif claim in (9, 10):
        source = "nf4" if claim == 9 else "lean"
        pairs = [(mask, other) for mask in found if mask.source == source for other in found if other != mask]
    else:
        of_claim: dict[int, Callable[[Trained], bool]] = {
            3: lambda trained: trained.source == "subnetwork",
            4: lambda trained: trained.is_mask and trained.source != "found" and (trained.amount or 100) <= 2.5,
            6: lambda trained: trained.source == "sgd",
        }
        pairs = [(trained, dense) for trained in found if dense in found and of_claim[claim](trained)]
    n = len(pairs) if claim == 4 else 1  # one of several masks is enough
    return {(first, second): difference(found[first], found[second], n) for first, second in pairs}


def _mask_like(study: Study, parts: Parts, lora: Trained) -> Trained | None:
    """The mask with as many values as an adapter, to 5 %."""
    sizes = {part.trained: row["n_trained"] for part in parts for row in study.seeds_of(part) if "n_trained" in row}
    n = sizes[lora]
    masks = [mask for mask in sizes if mask.is_mask and abs(sizes[mask] - n) <= 0.05 * n]
    return min(masks, key=lambda mask: abs(sizes[mask] - n), default=None)


def _all(study: Study, claim: int, parts: Parts) -> bool | None:
    outcomes = [found.not_below for found in compared(study, claim, parts).values()]
    if claim == 5:  # of a rank without a mask nothing is shown
        n_ranks = sum(trained.source == "lora" for trained in scores(study, parts))
        outcomes += [None] * (n_ranks - len(outcomes))
    return False if False in outcomes else None if None in outcomes or not outcomes else True


def _some_mask(study: Study, claim: int, parts: Parts) -> bool | None:
    outcomes = [found.not_below for found in compared(study, claim, parts).values()]
    return True if any(outcomes) else None if None in outcomes or not outcomes else False


def _subnetwork(study: Study, claim: int, parts: Parts) -> bool | None:
    if (equal := _all(study, claim, parts)) is not True:
        return equal
    within = {
        word: min(
            (row["closeness"]["within_1e-4"] for part in parts if part.subject.trained == word
             for row in study.rows_of(part)), default=0.0,
        )
        for word in OF_DENSE
    }  # fmt: skip
    return None if within["again"] < SAME else within["subnetwork"] >= SAME


class Best(NamedTuple):
    """The best learning rate of a subject; the optimum is between low and high, which may be 0 and infinite."""

    rate: float
    low: float
    high: float


def best_of(study: Study, subject: Subject) -> Best | None:
    """The best learning rate by tuning, and what tuning does not tell from it.

    The optimum is taken to be within half a step around the rates whose accuracy is at most two standard errors of the
    difference below the best one; if these reach the lowest or highest rate tried, there is no bound on that side. None
    if tuning is unfinished, improves on the start by less than 0.1, or has its best rate at an end.
    """
    before, runs = study.starts.get(subject.task), study.of(subject, [TUNING_SEED])
    if before is None or study.tuning_left(subject):
        return None
    rates = [row["learning_rate"] for row in runs]
    best = runs[i := rates.index(study.best_rate(subject))]
    if best["tune_accuracy"] - before["tune_accuracy"] < GAIN or i in (0, len(rates) - 1):
        return None
    errors = [math.hypot(row["tune_stderr"], best["tune_stderr"]) for row in runs]
    alike = [k for k, row in enumerate(runs) if best["tune_accuracy"] - row["tune_accuracy"] <= 2 * errors[k]]
    low = math.sqrt(rates[alike[0] - 1] * rates[alike[0]]) if alike[0] > 0 else 0.0
    high = math.sqrt(rates[alike[-1]] * rates[alike[-1] + 1]) if alike[-1] < len(rates) - 1 else math.inf
    return Best(rates[i], low, high)


class Law(NamedTuple):
    """The exponent p of rate ~ density^-p over n densities; low and high are those of the rates' intervals."""

    p: float
    low: float
    high: float
    n: int


def law(study: Study, parts: Parts, task: str) -> Law | None:
    """Fit the best rates of random masks in tiles, by least squares of the logarithms; None with fewer than three."""
    points = []
    for part in parts:
        is_tiles = part.trained.source == "random" and part.trained.pattern != "element"
        if part.subject.task == task and is_tiles and (best := best_of(study, part.subject)) is not None:
            values = mean(row["n_trained"] for row in study.of(part.subject, [TUNING_SEED]))
            points.append((math.log(values), best))
    if len(points) < 3:
        return None
    x0 = mean(x for x, _ in points)
    spread = sum((x - x0) ** 2 for x, _ in points)
    p, low, high = 0.0, 0.0, 0.0
    for x, best in points:
        if weight := (x0 - x) / spread:
            ends = sorted(weight * (math.log(rate) if rate > 0 else -math.inf) for rate in best[1:])
            p, low, high = p + weight * math.log(best.rate), low + ends[0], high + ends[1]
    return Law(p, low, high, len(points))


def _same_law(study: Study, by_task: Mapping[str, Parts]) -> bool | None:
    laws = [found for task, parts in by_task.items() if (found := law(study, parts, task)) is not None]
    if len(laws) < max(2, len(by_task)):
        return None
    if min(found.high for found in laws) <= max(0.0, max(found.low for found in laws)):
        return False
    alike = max(found.p for found in laws) <= LAW_RATIO * min(found.p for found in laws)
    return True if alike and min(found.low for found in laws) > 0 else None
