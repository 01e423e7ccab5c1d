"""Verdicts on the claims, by stated rules.

A subject's score is the mean of its seeds' accuracy on the held-out questions, at the learning rate that tuning chose
on other questions; its spread is the sample standard deviation over the seeds. The difference d of two subjects with
spreads s and t over n and m seeds is known up to e = 2 sqrt(s^2 / n + t^2 / m + q^2), for claim 4 more, where q is the
standard error of the mean difference over the questions. The first is "not below" the second if d - e >= -0.05, it is
below if d + e < -0.05, and otherwise nothing is shown; nor is it with one seed.

A claim with a planned run or pair of runs that is missing is not shown. Where dense training improves on the start by
less than 0.1, runs cannot differ: then claims 3 to 6 and 8 are not shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, mean, stdev
from typing import Any, Literal, NamedTuple

from .law import GAIN, law
from .plan import OF_DENSE, TUNING_SEED, Part, Run, Trained
from .results import Results
from .schedule import is_finished

Verdict = Literal["holds", "does not hold", "not shown"]
MARGIN = 0.05  # of accuracy
# The claims whose verdict is from differences of scores.
OF_SCORES = (3, 4, 5, 6, 8)
# Claim 1, after the published shares: 5-30 % in reinforcement learning, 85-94 % in supervised fine-tuning.
FEW, MANY = 0.35, 0.6
FULL_RANK = 0.95  # of min(m, n), the numerical rank
# Claim 2: how many times as many common weights as by chance.
MORE_THAN_CHANCE = 1.1
# Claim 3: the share of the changed weights that must be within 1e-4.
SAME = 0.99
# Claim 5: the largest difference of the numbers of trained values that are compared.
SAME_SIZE = 0.05
# Claim 7: the largest ratio between the exponents of the law on two tasks.
LAW_RATIO = 2.0


class Score(NamedTuple):
    """The score of a subject over its seeds."""

    mean: float
    spread: float
    n: int
    # Of each held-out question, the mean over the seeds; without them the standard error of the accuracy.
    questions: tuple[float, ...] = ()
    stderr: float = 0.0


def score_of(rows: Sequence[Mapping[str, Any]]) -> Score:
    """The score of finished runs; NaN is the spread of one."""
    values = [row["accuracy"] for row in rows]
    questions: tuple[float, ...] = ()
    if all("right" in row for row in rows):
        questions = tuple(mean(map(int, right)) / row["n_generations"] for *right, row in _by_question(rows))
    spread = stdev(values) if len(values) > 1 else math.nan
    return Score(mean(values), spread, len(values), questions, max(row.get("accuracy_stderr", 0.0) for row in rows))


def _by_question(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Of each question, the digits of all runs, and the first run."""
    return ((*digits, rows[0]) for digits in zip(*(row["right"] for row in rows), strict=True))


class Difference(NamedTuple):
    """How far a score is above another, known up to an error."""

    value: float
    error: float

    @property
    def not_below(self) -> bool | None:
        """Whether the first score is not below the second, by the rule of the module; None if that is not shown."""
        if self.value - self.error >= -MARGIN:
            return True
        return False if self.value + self.error < -MARGIN else None


def difference(first: Score, second: Score, n_comparisons: int = 1) -> Difference:
    """The difference of two scores, with the error of one of several comparisons."""
    if first.questions and second.questions:
        of_each = [a - b for a, b in zip(first.questions, second.questions, strict=True)]
        of_questions = stdev(of_each) ** 2 / len(of_each)
    else:
        of_questions = first.stderr**2 + second.stderr**2
    # 2 standard errors for one comparison.
    width = NormalDist().inv_cdf(1 - (1 - NormalDist().cdf(2)) / n_comparisons)
    error = width * math.sqrt(first.spread**2 / first.n + second.spread**2 / second.n + of_questions)
    return Difference(first.mean - second.mean, error)


def rows_of(results: Results, part: Part) -> list[dict[str, Any]]:
    """The runs of a part's seeds at its rate; without seeds, or before they are finished, its tuning run there."""
    rate = results.best_rate(part.tuned_by)
    found = [row for row in results.of(part.subject, part.seeds, part.n_steps) if row["learning_rate"] == rate]
    return found or [row for row in results.of(part.subject, [TUNING_SEED]) if row["learning_rate"] == rate]


def verdict(
    claim: int,
    results: Results,
    parts: Sequence[Part],
    tasks: Sequence[str],
    before: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
) -> Verdict:
    """The verdict on a claim from the finished runs of its parts and the scores of the start, by task.

    None holds before all runs of its parts are finished.

    1: holds if on every task GRPO's dense runs change at most 35 % of the bf16 weights, by updates whose matrices have
       at least 95 % of the full rank on average, and on the first SFT's change at least 60 %. The shares of fp32 copies
       are in its table, and not in the rule.
    2: holds if any two dense runs have at least 1.1 times as many changed weights in common as two random sets with the
       same number in each tensor and for each exponent of the weights (because small weights change more easily in
       bf16), and does not hold if no two have, two standard errors of the sample taken into account.
    3: holds if on every task the subnetwork's score is not below dense, and 99 % of its weights are within 1e-4 of the
       dense run's; not shown if those of the same dense run done again are not, unless the score is below.
    4: holds if on every task some mask of at most 2.5 % of the weights that has several seeds is not below dense. Masks
       from a whole dense run are left out. The errors of the comparisons are widened for their number (Bonferroni).
    5: holds if on every task for every rank of LoRA the random mask of tiles with as many trained values, to 5 %, is
       not below it.
    6: holds if on every task SGD's score is not below AdamW's.
    7: holds if on every task the exponent p of rate ~ density^-p, fitted to the best rates of random masks of tiles, is
       above 0 over its whole interval (see `law`), and the largest is at most twice the smallest; does not hold if one
       is at most 0 over its whole interval, or two tasks' intervals have nothing in common. It needs two tasks.
    8: holds if on every task the score of lean runs is not below that of the random mask with fp32 moments.
    """
    if not all(is_finished(settings, part, results) for part in parts):
        return "not shown"
    if claim == 7:
        return _same_law(settings, results, parts, tasks, before)
    if claim in OF_SCORES and not all(
        _learned(results, [part for part in parts if part.subject.task == task], before.get(task))
        for task in {part.subject.task for part in parts}
    ):
        return "not shown"
    if claim == 2:
        outcomes = [_common_weights(results, parts)]
    else:
        outcomes = [_OF_CLAIM[claim](results, [part for part in parts if part.subject.task == task]) for task in tasks]
    if False in outcomes:
        return "does not hold"
    return "not shown" if None in outcomes else "holds"


def _seeds_of(results: Results, part: Part) -> list[dict[str, Any]]:
    """The runs of a part's seeds; none unless there are several and all are finished."""
    found = [row for row in rows_of(results, part) if row["seed"] in part.seeds]
    return found if len(found) == len(part.seeds) > 1 else []


def _learned(results: Results, parts: Sequence[Part], before: Mapping[str, Any] | None) -> bool:
    dense = _scores(results, parts).get(Trained("dense"))
    return dense is not None and before is not None and dense.mean - before["accuracy"] >= GAIN


def _few_weights(results: Results, parts: Sequence[Part]) -> bool | None:
    runs = {part.subject.algorithm: _seeds_of(results, part) for part in parts}
    few, many = runs.get("grpo"), runs.get("sft")
    if not few or many == []:
        return None
    return (
        max(run["changed_bf16"] for run in few) <= FEW
        and mean(run["ranks"]["numerical"] for run in few) >= FULL_RANK
        and (many is None or min(run["changed_bf16"] for run in many) >= MANY)
    )


def overlaps(results: Results, parts: Sequence[Part]) -> Iterator[tuple[Run, Run, dict[str, float]]]:
    """The pairs of dense runs of seeds, at the parts' rates, whose changed weights were compared."""
    names = {}
    for part in parts:
        for row in rows_of(results, part):
            if row["seed"] != TUNING_SEED:
                run = Run(row["algorithm"], row["task"], row["trained"], row["learning_rate"], row["seed"])
                names[run.name] = run, row.get("overlaps", {})
    seen = set()
    for name, (run, found) in names.items():
        for other, counts in found.items():
            if other in names and (pair := frozenset((name, other))) not in seen:
                seen.add(pair)
                yield run, names[other][0], counts


def _common_weights(results: Results, parts: Sequence[Part]) -> bool | None:
    n_runs = sum(len(_seeds_of(results, part)) for part in parts)
    found = [counts for _, _, counts in overlaps(results, parts)]
    if not found or len(found) < n_runs * (n_runs - 1) // 2 or any(not _seeds_of(results, part) for part in parts):
        return None
    if all(ratio(counts, -2) >= MORE_THAN_CHANCE for counts in found):
        return True
    return False if all(ratio(counts, 2) < MORE_THAN_CHANCE for counts in found) else None


def ratio(counts: Mapping[str, float], n_stderrs: float = 0) -> float:
    """Common weights of two runs, plus some standard errors of their estimate, in relation to those by chance."""
    return (counts["n_both"] + n_stderrs * counts["n_both_stderr"]) / max(1.0, counts["expected"])


def _same_law(
    settings: dict[str, Any],
    results: Results,
    parts: Sequence[Part],
    tasks: Sequence[str],
    before: Mapping[str, Mapping[str, Any]],
) -> Verdict:
    laws = [law(settings, results, parts, task, before.get(task)) for task in tasks]
    known = [found for found in laws if found is not None]
    if len(known) < max(2, len(tasks)):
        return "not shown"
    if min(found.high for found in known) <= max(0.0, max(found.low for found in known)):
        return "does not hold"
    rises = min(found.low for found in known) > 0
    alike = max(found.p for found in known) <= LAW_RATIO * min(found.p for found in known)
    return "holds" if rises and alike else "not shown"


def compared(claim: int, results: Results, parts: Sequence[Part]) -> dict[tuple[Trained, Trained], Difference]:
    """Of the claims in `OF_SCORES`, the differences that the verdict is from: of a mask, SGD, the subnetwork or lean
    runs from what they are compared with. The parts are those of one task."""
    scores = _scores(results, parts)
    dense = Trained("dense")
    if claim == 5:
        pairs = _masks_like_lora(results, parts, scores)
    elif claim == 8:
        of_random = {trained: replace(trained, source="random") for trained in scores if trained.source == "lean"}
        pairs = [pair for pair in of_random.items() if pair[1] in scores]
    elif dense not in scores:
        return {}
    elif claim == 4:
        pairs = [
            (trained, dense)
            for trained in scores
            if trained.is_mask and trained.source != "found" and (trained.amount or 100) <= 2.5
        ]
    else:
        pairs = [(trained, dense) for trained in scores if trained.source == {3: "subnetwork", 6: "sgd"}.get(claim)]
    n = len(pairs) if claim == 4 else 1  # one of several masks is enough
    return {(first, second): difference(scores[first], scores[second], n) for first, second in pairs}


def _masks_like_lora(
    results: Results, parts: Sequence[Part], scores: Mapping[Trained, Score]
) -> list[tuple[Trained, Trained]]:
    """Of each rank of LoRA, the mask with as many values; without one the rank is left out."""
    sizes = {Trained.parse(part.subject.trained): run["n_trained"] for part in parts for run in _seeds_of(results, part)
             if "n_trained" in run}  # fmt: skip
    pairs = []
    for lora in scores:
        if lora.source == "lora":
            n = sizes[lora]
            masks = [mask for mask in sizes if mask.is_mask and abs(sizes[mask] - n) <= SAME_SIZE * n]
            if masks:
                pairs.append((min(masks, key=lambda mask: abs(sizes[mask] - n)), lora))
    return pairs


def _all_of(outcomes: Sequence[bool | None]) -> bool | None:
    return False if False in outcomes else None if None in outcomes or not outcomes else True


def _subnetwork(results: Results, parts: Sequence[Part]) -> bool | None:
    equal = _all_of([found.not_below for found in compared(3, results, parts).values()])
    if equal is not True:
        return equal
    within = {
        word: min((row["closeness"]["within_1e-4"] for part in parts if part.subject.trained == word
                   for row in rows_of(results, part)), default=0.0)
        for word in OF_DENSE
    }  # fmt: skip
    return None if within["again"] < SAME else within["subnetwork"] >= SAME


def _sgd(results: Results, parts: Sequence[Part]) -> bool | None:
    return _all_of([found.not_below for found in compared(6, results, parts).values()])


def _cheap_mask(results: Results, parts: Sequence[Part]) -> bool | None:
    outcomes = [found.not_below for found in compared(4, results, parts).values()]
    return True if any(outcomes) else None if None in outcomes or not outcomes else False


def _beats_lora(results: Results, parts: Sequence[Part]) -> bool | None:
    found = compared(5, results, parts)
    ranks = [trained for trained in _scores(results, parts) if trained.source == "lora"]
    return _all_of([of_pair.not_below for of_pair in found.values()] + [None] * (len(ranks) - len(found)))


def _lean(results: Results, parts: Sequence[Part]) -> bool | None:
    return _all_of([found.not_below for found in compared(8, results, parts).values()])


_OF_CLAIM = {1: _few_weights, 3: _subnetwork, 4: _cheap_mask, 5: _beats_lora, 6: _sgd, 8: _lean}


def _scores(results: Results, parts: Sequence[Part]) -> dict[Trained, Score]:
    found = {}
    for part in parts:
        if runs := _seeds_of(results, part):
            found[Trained.parse(part.subject.trained)] = score_of(runs)
    return found
