"""What is left to do: the runs of the plan that are not in the results, and their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..common.training import beyond
from .plan import OF_DENSE, TUNING_SEED, Choice, Part, Run, Subject, first_rates, plan
from .results import Results

# Rates beyond the lowest or highest that tuning tries at most.
WIDEN = 2
# Until a run of its algorithm is finished, a run is taken to last this long in an estimate.
SECONDS_A_RUN = 150


def tuning_runs(settings: dict[str, Any], subject: Subject, results: Results) -> list[Run]:
    """The tuning runs of a subject that are not finished: of the first rates, then of those beyond an end."""

    def missing(rates: Sequence[float]) -> list[Run]:
        runs = [Run(subject.algorithm, subject.task, subject.trained, rate, TUNING_SEED) for rate in rates]
        return [run for run in runs if run not in results]

    first = first_rates(settings, subject)
    if runs := missing(first):
        return runs
    tried = [row["learning_rate"] for row in results.of(subject, [TUNING_SEED])]
    best = results.best_rate(subject)
    assert best is not None
    return missing(beyond(tried, best)) if len(tried) < len(first) + WIDEN else []


def runs_left(settings: dict[str, Any], part: Part, results: Results) -> list[Run]:
    """The runs of a part that are not finished, and can begin: those of its tuning, then those at the best rate."""
    subject, tuned_by = part.subject, part.tuned_by
    if runs := tuning_runs(settings, tuned_by, results):
        return runs if tuned_by == subject else []
    rate = results.best_rate(tuned_by)
    assert rate is not None
    alone = tuned_by == subject or subject.trained in OF_DENSE
    seeds = part.seeds if alone else (TUNING_SEED, *part.seeds)
    runs = [Run(subject.algorithm, subject.task, subject.trained, rate, seed) for seed in seeds]
    return [run for run in runs if run not in results]


def is_finished(settings: dict[str, Any], part: Part, results: Results) -> bool:
    """Whether all runs of a part are finished, and the tuning that chooses its rate."""
    return not tuning_runs(settings, part.tuned_by, results) and not runs_left(settings, part, results)


def parts_of(choice: Choice, results: Results, settings: dict[str, Any]) -> list[Part]:
    """The plan, as far as the results decide it."""

    def chosen(subjects: list[Subject]) -> Subject | None:
        scores = {}
        for subject in subjects:
            if (rate := results.best_rate(subject)) is None or (
                subject.trained.startswith("random") and tuning_runs(settings, subject, results)
            ):
                return None
            runs = results.of(subject, [TUNING_SEED])
            scores[subject] = next(row["tune_accuracy"] for row in runs if row["learning_rate"] == rate)
        return max(scores, key=lambda subject: scores[subject])

    return plan(choice.claims, choice.tasks, choice.seeds, chosen, settings["lora"], settings["tile"])


def estimate(settings: dict[str, Any], parts: Sequence[Part], results: Results, jobs: int) -> str:
    """The runs that are left of each part, and their time by the median of the algorithm's finished runs."""
    lines, total, n_total, guessed = [], 0.0, 0, False
    for part in parts:
        subject = part.subject
        own = part.tuned_by == subject
        n = len(tuning_runs(settings, subject, results)) if own else 0
        # The best rate is not known before tuning ends; the runs at it are counted all the same.
        if n:
            n += len(part.seeds)
        elif tuning_runs(settings, part.tuned_by, results):
            n = len(part.seeds) + (subject.trained not in OF_DENSE)
        else:
            n = len(runs_left(settings, part, results))
        seconds = results.seconds_per_run(subject.algorithm, jobs)
        guessed = guessed or (n > 0 and seconds is None)
        total += n * (SECONDS_A_RUN if seconds is None else seconds)
        n_total += n
        claims = " ".join(map(str, part.claims))
        lines.append(f"{subject.algorithm:<5} {subject.task:<10} {subject.trained:<22} claims {claims:<8} {n} runs")
    how = f"{SECONDS_A_RUN} s a run is a guess" if guessed else "by the times of finished runs"
    lines.append(
        f"{n_total} runs, about {total / jobs / 60:.0f} minutes with --jobs {jobs} ({how}), without rates beyond the "
        "first and without further runs of masks that are chosen on the way"
    )
    return "\n".join(lines)
