"""The report of the study: a verdict and a table for each claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from sparse_opt.tables import markdown_table

from .plan import CLAIMS, TUNING_SEED, Choice, Part
from .results import Results
from .schedule import is_finished
from .tables import further_tables, mean_of, step_seconds
from .timing import Times
from .verdicts import rows_of, score_of, verdict


def report(
    results: Results,
    parts: Sequence[Part],
    choice: Choice,
    before: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
    times: Times | None = None,
) -> str:
    """The page, as Markdown: all verdicts, of each task alone too, then the tables. Claims without results say so.

    Args:
        before: task -> the scores of the start.
        times: of steps that had the device to themselves.
    """
    times = times or {}
    summaries = [_summary(claim, results, parts, choice, before, settings) for claim in choice.claims]
    lines = [_verdict_table(choice, summaries)]
    for claim, (title, found, *_, n_missing) in zip(choice.claims, summaries, strict=True):
        of_claim = [part for part in parts if claim in part.claims]
        rows = []
        for part in of_claim:
            if runs := rows_of(results, part):
                rows.append(_row(part, runs, before.get(part.subject.task), times))
        lines.append(f"## Claim {title.replace('.', ':', 1)}\n\n**{found}**")
        lines.append(f"    {choice.command(claim)}")
        if n_missing != "0":
            lines.append(f"{n_missing} of {len(of_claim)} rows are not finished.")
        if rows:
            lines.append(markdown_table(_HEADERS, rows, n_words=3))
            lines += further_tables(claim, results, of_claim, choice.tasks, before, settings, times)
    return "\n\n".join(lines) + "\n"


def verdict_table(
    results: Results,
    parts: Sequence[Part],
    choice: Choice,
    before: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
) -> str:
    """The verdicts on all claims, of all tasks together and of each."""
    summaries = [_summary(claim, results, parts, choice, before, settings) for claim in choice.claims]
    return _verdict_table(choice, summaries)


def _summary(
    claim: int,
    results: Results,
    parts: Sequence[Part],
    choice: Choice,
    before: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
) -> list[str]:
    """The row of a claim in the table of verdicts."""
    of_claim = [part for part in parts if claim in part.claims]
    verdicts = [verdict(claim, results, of_claim, choice.tasks, before, settings)]
    for task in choice.tasks:
        of_task = [part for part in of_claim if part.subject.task == task]
        verdicts.append(verdict(claim, results, of_task, [task], before, settings))
    n_missing = sum(not is_finished(settings, part, results) for part in of_claim)
    return [f"{claim}. {CLAIMS[claim]}", *verdicts, str(n_missing)]


def _verdict_table(choice: Choice, summaries: Sequence[Sequence[str]]) -> str:
    headers = ("claim", "verdict", *choice.tasks, "unfinished rows")
    return markdown_table(headers, summaries, n_words=2 + len(choice.tasks))


_HEADERS = (
    "task", "algorithm", "trained", "learning rate", "before", "tuning", "after", "spread", "seeds", "bf16 changed",
    "peak GB", "optimizer MB", "s a step", "s a run",
)  # fmt: skip


def _row(part: Part, runs: list[dict[str, Any]], before: Mapping[str, Any] | None, times: Times) -> tuple[str, ...]:
    subject, score = part.subject, score_of(runs)
    n_seeds = str(score.n) if score.n == len(part.seeds) else f"{score.n} of {len(part.seeds)}"
    # Runs that shared the device with others took longer than alone.
    alone = [run["seconds"] for run in runs if run["jobs"] == 1]
    step = step_seconds(times, part, runs)
    return (
        subject.task,
        subject.algorithm,
        subject.trained,
        f"{runs[0]['learning_rate']:g}",
        "" if before is None else f"{before['accuracy']:.3f}",
        f"{mean(run['tune_accuracy'] for run in runs):.3f}",
        f"{score.mean:.3f}",
        "" if math.isnan(score.spread) else f"{score.spread:.3f}",
        n_seeds if runs[0]["seed"] != TUNING_SEED else "tuning",
        f"{mean(run['changed_bf16'] for run in runs):.1%}",
        mean_of(runs, "peak_memory_bytes", "{:.2f}", 1e-9),
        mean_of(runs, "optimizer_bytes", "{:,.1f}", 1e-6),
        "" if step is None else f"{step:.3f}",
        f"{mean(alone):.0f}" if alone else "",
    )
