"""The law of claim 7: the best learning rate of a random mask against its density, with what tuning leaves open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from .plan import TUNING_SEED, Part, Subject, Trained
from .results import Results
from .schedule import tuning_runs

GAIN = 0.1  # of accuracy, by which training must improve on the start


class Best(NamedTuple):
    """The best learning rate of a subject; the optimum is between low and high, which may be 0 and infinite."""

    rate: float
    low: float
    high: float


class Law(NamedTuple):
    """The exponent p of rate ~ density^-p over n densities, between low and high."""

    p: float
    low: float
    high: float
    n: int


def best_of(
    settings: dict[str, Any], results: Results, subject: Subject, before: Mapping[str, Any] | None
) -> Best | None:
    """The best learning rate by tuning, and what tuning does not tell from it.

    The optimum is taken to be within half a step (of the logarithm) around the rates whose accuracy is at most two
    standard errors of the difference below the best one. If these reach the lowest or highest rate tried, there is no
    bound on that side.

    Returns:
        None if tuning is unfinished, its best run improves on the start by less than 0.1, or the best rate is the
        lowest or highest tried, so that the best may be beyond it.
    """
    if before is None or tuning_runs(settings, subject, results):
        return None
    runs = results.of(subject, [TUNING_SEED])
    rates = [row["learning_rate"] for row in runs]
    best = rates.index(results.best_rate(subject))
    if runs[best]["tune_accuracy"] - before["tune_accuracy"] < GAIN or best in (0, len(rates) - 1):
        return None
    alike = [i for i, row in enumerate(runs) if _is_alike(row, runs[best])]
    first, last = min(alike), max(alike)
    return Best(
        rates[best],
        math.sqrt(rates[first - 1] * rates[first]) if first > 0 else 0.0,
        math.sqrt(rates[last] * rates[last + 1]) if last < len(rates) - 1 else math.inf,
    )


def _is_alike(row: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    error = math.hypot(row["tune_stderr"], best["tune_stderr"])
    return bool(best["tune_accuracy"] - row["tune_accuracy"] <= 2 * error)


def law(
    settings: dict[str, Any],
    results: Results,
    parts: Sequence[Part],
    task: str,
    before: Mapping[str, Any] | None,
) -> Law | None:
    """Fit rate ~ density^-p by least squares to the best rates of the parts' random masks, in tiles, on a task.

    The density is that of the values which were trained. The interval has the exponents of all rates within the
    intervals of the densities.

    Args:
        before: the scores of the start on the task.

    Returns:
        None with fewer than three densities whose best rate is known; see `best_of`.
    """
    points = []
    for part in parts:
        trained = Trained.parse(part.subject.trained)
        if part.subject.task == task and trained.source == "random" and trained.pattern != "element":
            if (best := best_of(settings, results, part.subject, before)) is not None:
                values = mean(row["n_trained"] for row in results.of(part.subject, [TUNING_SEED]))
                points.append((math.log(values), best))
    if len(points) < 3:
        return None
    x0 = mean(x for x, _ in points)
    spread = sum((x - x0) ** 2 for x, _ in points)
    p, low, high = 0.0, 0.0, 0.0
    for x, best in points:
        if weight := (x0 - x) / spread:
            ends = sorted(weight * _log(rate) for rate in (best.low, best.high))
            p, low, high = p + weight * math.log(best.rate), low + ends[0], high + ends[1]
    return Law(p, low, high, len(points))


def _log(rate: float) -> float:
    return math.log(rate) if rate > 0 else -math.inf
