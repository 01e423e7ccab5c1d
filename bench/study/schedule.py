"""What is left to do: the runs of the plan that are not in the results, their order, and their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparse_opt.tables import markdown_table

from ..common.training import beyond
from .plan import CLAIMS, TUNING_SEED, Choice, Part, Run, Subject, Trained, first_rates, plan
from .results import Results
from .timing import Times, steps_in_dense_time

# Rates beyond the lowest or highest that tuning tries at most.
WIDEN = 2


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
    runs = [Run(subject.algorithm, subject.task, subject.trained, rate, seed, part.n_steps) for seed in part.seeds]
    return [run for run in runs if run not in results]


def in_order(parts: Sequence[Part]) -> list[Part]:
    """The parts in the order of work: of each tier the tuning and first seed of every part, then the other seeds.

    A part with several seeds is there twice, with some of its seeds each.
    """
    found = []
    for tier in sorted({part.tier for part in parts}):
        of_tier = [part for part in parts if part.tier == tier]
        found += [replace(part, seeds=part.seeds[:1]) for part in of_tier]
        found += [replace(part, seeds=part.seeds[1:]) for part in of_tier if len(part.seeds) > 1]
    return found


def is_finished(settings: dict[str, Any], part: Part, results: Results) -> bool:
    """Whether all runs of a part are finished, and the tuning that chooses its rate."""
    return not tuning_runs(settings, part.tuned_by, results) and not runs_left(settings, part, results)


def parts_of(choice: Choice, results: Results, settings: dict[str, Any]) -> list[Part]:
    """The plan, as far as the results decide it."""

    def chosen(subjects: list[Subject]) -> Subject | None:
        if any(tuning_runs(settings, subject, results) for subject in subjects):
            return None
        return max(subjects, key=lambda subject: results.chosen(subject, [TUNING_SEED])[0]["tune_accuracy"])

    return plan(choice.claims, choice.tasks, choice.seeds, chosen, settings["lora"], settings["tile"])


def at_equal_time(settings: dict[str, Any], parts: Sequence[Part], times: Times) -> list[Part]:
    """Parts of the masks that claim 4 compares, with as many steps as they make in the time of a dense run.

    Those of every source at 2.5 % in tiles, and random ones of all densities, if their steps were timed
    (`timing.time_steps`), and their number is another than the settings'.
    """
    found = []
    for part in parts:
        trained = Trained.parse(part.subject.trained)
        is_compared = 4 in part.claims and part.seeds and trained.is_mask and trained.source != "found"
        if not is_compared or (
            trained.source != "random" and (trained.amount, trained.pattern) != (2.5, settings["tile"])
        ):
            continue
        n_steps = steps_in_dense_time(times, part.subject, settings[part.subject.algorithm]["n_steps"])
        if n_steps is not None and n_steps != settings[part.subject.algorithm]["n_steps"]:
            found.append(replace(part, claims=(4,), tier=9, n_steps=n_steps))
    return found


def estimate(settings: dict[str, Any], parts: Sequence[Part], results: Results, jobs: int) -> str:
    """The runs that are left of each part and claim, in their order, and their time.

    The time of a run is the median of its algorithm's finished runs, or, without any, the settings' guess, which is for
    8 at once.
    """
    rows, done, guessed = [], 0.0, False
    # Of each claim: the runs of its parts, of these the runs that are no other claim's, and when the last one ends.
    n_runs, n_own, ends = (dict.fromkeys(CLAIMS, 0.0) for _ in range(3))
    logs, tuned = set(), set()
    for part in in_order(parts):
        subject = part.subject
        if of_tuning := len(tuning_runs(settings, part.tuned_by, results)):
            # The best rate is not known before tuning ends; the runs at it are counted all the same.
            of_tuning *= part.tuned_by == subject and subject not in tuned
            tuned.add(subject)
            n = of_tuning + len(part.seeds)
        else:
            n = len(runs_left(settings, part, results))
        if not n:
            continue
        seconds = results.seconds_per_run(subject.algorithm, jobs)
        guessed = guessed or seconds is None
        seconds = float(settings["seconds"][subject.algorithm]) if seconds is None else seconds
        log = (subject.algorithm, subject.task) if Trained.parse(subject.trained).needs_finding_run else None
        done += (n + (log is not None and log not in logs)) * seconds / jobs
        logs.add(log)
        for claim in part.claims:
            n_runs[claim], ends[claim] = n_runs[claim] + n, done
            n_own[claim] += n * (len(part.claims) == 1)
        claims = " ".join(map(str, part.claims))
        seeds = " ".join([*(["tuning"] if of_tuning else []), *map(str, part.seeds)])
        rows.append((subject.algorithm, subject.task, subject.trained, seeds, claims, str(n), f"{done / 60:.0f}"))
    total = sum(int(row[5]) for row in rows)
    headers = ("algorithm", "task", "trained", "seeds", "claims", "runs", "minutes until then")
    of_claims = [
        (str(claim), f"{n_runs[claim]:.0f}", f"{n_own[claim]:.0f}", f"{ends[claim] / 60:.0f}")
        for claim in sorted({claim for part in parts for claim in part.claims})
    ]
    how = "the times of runs are partly guesses for 8 at once" if guessed else "by the times of finished runs"
    return "\n\n".join(
        [
            *([markdown_table(headers, rows, n_words=5)] if rows else []),
            markdown_table(("claim", "runs left", "of it alone", "minutes until its last"), of_claims, n_words=1),
            f"{total} runs, about {done / 60:.0f} minutes with --jobs {jobs} ({how}), with the dense runs that masks "
            "are found in; without rates beyond the first, and without further runs of masks chosen on the way",
        ]
    )
