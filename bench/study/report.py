"""The report of the study: a verdict and a table for each claim."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from sparse_opt.tables import markdown_table

from .law import best_of, law
from .plan import CLAIMS, TUNING_SEED, Choice, Part, Run
from .results import Results
from .schedule import is_finished
from .verdicts import overlaps, ratio, rows_of, score_of, verdict


def report(
    results: Results,
    parts: Sequence[Part],
    choice: Choice,
    before: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
) -> str:
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
                rows.append(_row(part, found, before.get(part.subject.task)))
        n_missing = sum(not is_finished(settings, part, results) for part in of_claim)
        found_verdict = verdict(claim, results, of_claim, choice.tasks, before, settings)
        lines.append(f"## Claim {claim}: {CLAIMS[claim]}\n\n**{found_verdict}**")
        if n_missing:
            lines.append(f"{n_missing} of {len(of_claim)} rows are not finished.")
        if rows:
            lines.append(markdown_table(_HEADERS, rows, n_words=3))
            lines += further_tables(claim, results, of_claim, choice.tasks, before, settings)
    return "\n\n".join(lines) + "\n"


_HEADERS = (
    "task", "algorithm", "trained", "learning rate", "before", "tuning", "after", "spread", "seeds", "bf16 changed",
    "s a run",
)  # fmt: skip


def _row(part: Part, runs: list[dict[str, Any]], before: Mapping[str, Any] | None) -> tuple[str, ...]:
    subject, score = part.subject, score_of(runs)
    n_seeds = str(score.n) if score.n == len(part.seeds) else f"{score.n} of {len(part.seeds)}"
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
        n_seeds if runs[0]["seed"] != TUNING_SEED else "tuning",
        f"{mean(run['changed_bf16'] for run in runs):.1%}",
        f"{mean(alone):.0f}" if alone else "",
    )


def further_tables(
    claim: int,
    results: Results,
    parts: Sequence[Part],
    tasks: Sequence[str],
    before: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
) -> list[str]:
    """What a claim needs besides the scores; nothing without its runs."""
    if claim == 1:
        return [table for table in (_by_rate(results, parts), _by_component(results, parts)) if table]
    if claim == 2:
        return _overlaps(results, parts)
    if claim == 3:
        return _closeness(results, parts)
    if claim == 5:
        return _memory_and_forgetting(results, parts, before)
    if claim == 7:
        return _laws(results, parts, tasks, before, settings)
    return []


def _laws(
    results: Results,
    parts: Sequence[Part],
    tasks: Sequence[str],
    before: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
) -> list[str]:
    rows = []
    for part in parts:
        best = best_of(settings, results, part.subject, before.get(part.subject.task))
        if best is not None:
            values = [row["n_trained"] for row in results.of(part.subject, [TUNING_SEED]) if "n_trained" in row]
            numbers = (f"{best.rate:g}", f"{best.low:.3g}", f"{best.high:.3g}")
            rows.append(
                (part.subject.task, part.subject.trained, f"{mean(values):,.0f}" if values else "all", *numbers)
            )
    headers = ("task", "trained", "values", "best rate", "from", "to")
    tables = [markdown_table(headers, rows, n_words=2)] if rows else []
    for task in tasks:
        found = law(settings, results, parts, task, before.get(task))
        if found is not None:
            interval = f"p between {found.low:.2f} and {found.high:.2f}"
            tables.append(f"{task}: rate ~ density^-p, p = {found.p:.2f} over {found.n} densities, {interval}")
    return tables


def _by_rate(results: Results, parts: Sequence[Part]) -> str:
    rows = []
    for part in parts:
        by_rate = defaultdict(list)
        for row in results.of(part.subject, (TUNING_SEED, *part.seeds)):
            by_rate[row["learning_rate"]].append(row)
        for rate, runs in sorted(by_rate.items()):
            ranks = [run["ranks"] for run in runs if run.get("ranks")]
            rows.append(
                (
                    part.subject.task,
                    part.subject.algorithm,
                    f"{rate:g}",
                    str(len(runs)),
                    f"{mean(run['changed_bf16'] for run in runs):.1%}",
                    f"{mean(run['changed_1e-5'] for run in runs):.1%}",
                    *(f"{mean(rank[kind] for rank in ranks):.3f}" if ranks else "" for kind in _RANKS),
                    f"{mean(run['accuracy'] for run in runs):.3f}",
                )
            )
    headers = ("task", "algorithm", "learning rate", "runs", "bf16 changed", "moved by > 1e-5", *_RANKS.values())
    return markdown_table((*headers, "after"), rows, n_words=2)


_RANKS = {"numerical": "rank", "numerical_min": "lowest rank", "effective": "effective rank"}


def _by_component(results: Results, parts: Sequence[Part]) -> str:
    found = {part.subject: runs for part in parts if (runs := rows_of(results, part))}
    names = list(dict.fromkeys(name for runs in found.values() for name in runs[0]["changed_by_component"]))
    rows = [
        (
            subject.task,
            subject.algorithm,
            *(f"{mean(row['changed_by_component'].get(name, 0.0) for row in runs):.1%}" for name in names),
        )
        for subject, runs in found.items()
    ]
    return markdown_table(("task", "algorithm", *names), rows, n_words=2)


def _overlaps(results: Results, parts: Sequence[Part]) -> list[str]:
    by_kind = defaultdict(list)
    for first, second, counts in overlaps(results, parts):
        by_kind[_difference(first, second)].append(counts)
    rows = []
    for kind, found in sorted(by_kind.items()):
        ratios = [ratio(counts) for counts in found]
        stderr = max(counts["n_both_stderr"] / max(1.0, counts["expected"]) for counts in found)
        rows.append(
            (
                kind,
                str(len(found)),
                f"{mean(c['n_both'] / max(1, min(c['n'], c['n_other'])) for c in found):.1%}",
                f"{mean(c['expected_by_tensor'] / max(1, min(c['n'], c['n_other'])) for c in found):.1%}",
                f"{mean(c['expected'] / max(1, min(c['n'], c['n_other'])) for c in found):.1%}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{stderr:.3f}",
            )
        )
    headers = (
        "runs differ in", "pairs", "in common", "by chance in tensors", "and exponents", "ratio", "its standard error",
    )  # fmt: skip
    return [markdown_table(headers, rows, n_words=1)] if rows else []


def _difference(first: Run, second: Run) -> str:
    names = ("algorithm", "task", "seed")
    return ", ".join(name for name in names if getattr(first, name) != getattr(second, name))


def _closeness(results: Results, parts: Sequence[Part]) -> list[str]:
    rows = [
        (
            row["trained"],
            str(row["seed"]),
            f"{row['accuracy']:.3f}",
            *(f"{row['closeness'][name]:.1%}" for name in ("within_1e-5", "within_1e-4")),
            *(f"{row['closeness'][name]:.3f}" for name in ("distance", "cosine")),
        )
        for part in parts
        for row in rows_of(results, part)
        if "closeness" in row
    ]
    headers = ("trained", "seed", "after", "within 1e-5", "within 1e-4", "distance / update", "cosine of updates")
    return [markdown_table(headers, rows, n_words=1)] if rows else []


def _memory_and_forgetting(
    results: Results, parts: Sequence[Part], before: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    rows = []
    for part in parts:
        runs = [row for row in rows_of(results, part) if "perplexity" in row]
        if not runs:
            continue
        start = before.get(part.subject.task, {})
        alone = [run["step_time_s"] for run in runs if run["jobs"] == 1]
        rows.append(
            (
                part.subject.task,
                part.subject.trained,
                f"{runs[0]['n_trained']:,}" if "n_trained" in runs[0] else "all",
                f"{mean(run['optimizer_bytes'] for run in runs) / 1e6:,.1f}",
                f"{mean(run['accuracy'] for run in runs):.3f}",
                _mean_of_others(runs),
                _mean_of_others([start]) if start else "",
                _perplexity(runs),
                _perplexity([start]) if start else "",
                f"{mean(alone):.3f}" if alone else "",
            )
        )
    headers = (
        "task", "trained", "values", "optimizer MB", "after", "other tasks", "before", "perplexity", "before",
        "s a step",
    )  # fmt: skip
    return [markdown_table(headers, rows, n_words=2)] if rows else []


def _perplexity(rows: Sequence[Mapping[str, Any]]) -> str:
    values = [row["perplexity"] for row in rows]
    return "not finite" if None in values else f"{mean(values):.3f}"


def _mean_of_others(rows: Sequence[Mapping[str, Any]]) -> str:
    scores = [score for row in rows for score in row["others"].values()]
    return f"{mean(scores):.3f}" if scores else ""
