"""The tables that claims have besides the scores."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from sparse_opt.tables import markdown_table

from .law import best_of, law
from .plan import SOURCES, TUNING_SEED, Part, Run, Trained
from .results import Results
from .schedule import at_equal_time
from .timing import Times, timed_as
from .verdicts import OF_SCORES, compared, difference, overlaps, ratio, rows_of, score_of


def further_tables(
    claim: int,
    results: Results,
    parts: Sequence[Part],
    tasks: Sequence[str],
    before: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
    times: Times,
) -> list[str]:
    """What a claim needs besides the scores; nothing without its runs."""
    differences = _differences(claim, results, parts, tasks)
    if claim == 1:
        return [_by_rate(results, parts), *_by_place(results, parts)]
    if claim == 2:
        return _overlaps(results, parts)
    if claim == 3:
        return differences + _closeness(results, parts)
    if claim == 4:
        by_source = [table for task in tasks for table in source_table(results, parts, task)]
        return by_source + differences + at_equal_time_table(results, parts, settings, times)
    if claim in (5, 8):
        return [*differences, score_table(results, parts, before, times)]
    if claim == 7:
        return _laws(results, parts, tasks, before, settings)
    return differences


def _differences(claim: int, results: Results, parts: Sequence[Part], tasks: Sequence[str]) -> list[str]:
    """The comparisons that the verdicts on the claims in `OF_SCORES` are from."""
    if claim not in OF_SCORES:
        return []
    words = {True: "yes", False: "no", None: "not shown"}
    rows = [
        (task, str(first), str(second), f"{found.value:+.3f}", f"{found.error:.3f}", words[found.not_below])
        for task in tasks
        for (first, second), found in compared(
            claim, results, [part for part in parts if part.subject.task == task]
        ).items()
    ]
    headers = ("task", "trained", "compared with", "difference", "known up to", "not below")
    return [markdown_table(headers, rows, n_words=3)] if rows else []


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
            dense = results.best_rate(replace(part.subject, trained="dense"))
            of_dense = f"{float(f'{best.rate / dense:.2g}'):g}" if dense else ""
            numbers = (f"{best.rate:g}", f"{best.low:.3g}", f"{best.high:.3g}", of_dense)
            rows.append(
                (part.subject.task, part.subject.trained, f"{mean(values):,.0f}" if values else "all", *numbers)
            )
    headers = ("task", "trained", "values", "best rate", "from", "to", "of dense's")
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
                    mean_of(runs, "changed_fp32", "{:.1%}", 1),
                    f"{mean(run['changed_1e-5'] for run in runs):.1%}",
                    *(f"{of(rank[kind] for rank in ranks):.3f}" if ranks else "" for kind, (_, of) in _RANKS.items()),
                    f"{mean(run['accuracy'] for run in runs):.3f}",
                )
            )
    headers = ("task", "algorithm", "learning rate", "runs", "bf16 changed", "fp32 changed", "moved by > 1e-5")
    return markdown_table((*headers, *(name for name, _ in _RANKS.values()), "after"), rows, n_words=2)


# Of the runs of a row.
_RANKS: dict[str, tuple[str, Callable[[Iterable[float]], float]]] = {
    "numerical": ("rank", mean),
    "numerical_min": ("lowest rank", min),
    "effective": ("effective rank", mean),
}


def _by_place(results: Results, parts: Sequence[Part]) -> list[str]:
    """The shares of changed bf16 weights by component, and by layer: a column for each subject."""
    found = {part.subject: runs for part in parts if (runs := rows_of(results, part))}
    tables = []
    for what, key in (("component", "changed_by_component"), ("layer", "changed_by_layer")):
        names = list(dict.fromkeys(name for runs in found.values() for name in runs[0][key]))
        rows = [
            (name, *(f"{mean(row[key].get(name, 0.0) for row in runs):.1%}" for runs in found.values()))
            for name in names
        ]
        headers = (f"changed by {what}", *(f"{subject.algorithm} {subject.task}" for subject in found))
        tables.append(markdown_table(headers, rows, n_words=1))
    return tables


def source_table(results: Results, parts: Sequence[Part], task: str) -> list[str]:
    """The held-out scores of masks on a task: a row for each source, a column for each size and pattern.

    With several seeds the mean and the spread. None unless there are several sources.
    """
    scores: dict[str, dict[tuple[float, str], str]] = defaultdict(dict)
    for part in parts:
        trained, runs = Trained.parse(part.subject.trained), rows_of(results, part)
        if trained.is_mask and part.subject.task == task and runs and runs[0]["seed"] != TUNING_SEED:
            assert trained.amount is not None and trained.pattern is not None
            score = score_of(runs)
            spread = "" if math.isnan(score.spread) else f" ± {score.spread:.3f}"
            scores[trained.source][trained.amount, trained.pattern] = f"{score.mean:.3f}{spread}"
    if len(scores) < 2:
        return []
    sizes = sorted(
        {size for found in scores.values() for size in found}, key=lambda size: (size[1] == "element", -size[0])
    )
    rows = [(source, *(scores[source].get(size, "") for size in sizes)) for source in SOURCES if source in scores]
    headers = (f"{task}, masks of", *(f"{amount:g} %, {pattern}" for amount, pattern in sizes))
    return [markdown_table(headers, rows, n_words=1)]


def at_equal_time_table(results: Results, parts: Sequence[Part], settings: dict[str, Any], times: Times) -> list[str]:
    """The held-out scores of masks in the time of their task's dense runs, below dense's own; none without both."""
    rows: list[tuple[str, ...]] = []
    scored = [part for part in at_equal_time(settings, parts, times) if _has_seeds(results, part)]
    for dense in (part for part in parts if part.subject.trained == "dense" and _has_seeds(results, part)):
        of_task = [part for part in scored if part.subject.task == dense.subject.task]
        n_steps = settings[dense.subject.algorithm]["n_steps"]
        for part in [replace(dense, n_steps=n_steps), *of_task] if of_task else []:
            equal_steps = replace(part, n_steps=None)
            runs = rows_of(results, equal_steps if part.n_steps == n_steps else part)
            found = difference(score_of(runs), score_of(rows_of(results, dense)))
            is_known = part.subject != dense.subject and not math.isnan(found.error)
            rows.append(
                (
                    part.subject.task,
                    part.subject.trained,
                    f"{step_seconds(times, part, runs):.2f}",
                    str(part.n_steps),
                    f"{score_of(runs).mean:.3f}",
                    _seeds(runs),
                    f"{score_of(rows_of(results, equal_steps)).mean:.3f}",
                    f"{found.value:+.3f}" if is_known else "",
                    f"{found.error:.3f}" if is_known else "",
                )
            )
    headers = (
        "task", "trained", "s a step", "steps in dense's time", "held out", "seeds", "of equal steps", "above dense",
        "known up to",
    )  # fmt: skip
    return [markdown_table(headers, rows, n_words=2)] if rows else []


def _has_seeds(results: Results, part: Part) -> bool:
    return any(row["seed"] != TUNING_SEED for row in rows_of(results, part))


def _seeds(runs: Sequence[Mapping[str, Any]]) -> str:
    return " ".join(f"{run['accuracy']:.3f}" for run in runs)


def step_seconds(times: Times, part: Part, runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of a step that had the device to itself: as measured, or of runs that were alone; None without any."""
    key = timed_as(part.subject)
    if key is not None and key in times:
        return float(times[key]["step_time_s"])
    alone = [run["step_time_s"] for run in runs if run["jobs"] == 1]
    return mean(alone) if alone else None


def mean_of(runs: Sequence[Mapping[str, Any]], key: str, form: str, factor: float) -> str:
    """The mean of a measurement that some runs do not have."""
    values = [run[key] for run in runs if run.get(key) is not None]
    return form.format(mean(values) * factor) if values else ""


def _overlaps(results: Results, parts: Sequence[Part]) -> list[str]:
    by_kind = defaultdict(list)
    for first, second, counts in overlaps(results, parts):
        by_kind[difference_of(first, second)].append(counts)
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


def difference_of(first: Run, second: Run) -> str:
    """In which of algorithm, task and seed two runs differ, in words."""
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


def score_table(results: Results, parts: Sequence[Part], before: Mapping[str, Mapping[str, Any]], times: Times) -> str:
    """What GRPO learned and forgot under each choice of what is trained, by task; first what the start has."""
    rows: list[tuple[str, ...]] = []
    of_grpo = [part for part in parts if part.subject.algorithm == "grpo"]
    for task in dict.fromkeys(part.subject.task for part in of_grpo):
        if start := before.get(task):
            forgotten = (_perplexity([start]), _mean_of_others([start]))
            rows.append((task, "nothing", "", "", f"{start['accuracy']:.3f}", "", "", "", *forgotten, ""))
        for part in of_grpo:
            if part.subject.task == task and (runs := rows_of(results, part)):
                step = step_seconds(times, part, runs)
                rows.append(
                    (
                        task,
                        part.subject.trained,
                        f"{runs[0]['n_trained']:,}" if "n_trained" in runs[0] else "all",
                        f"{runs[0]['learning_rate']:.2g}",
                        f"{score_of(runs).mean:.3f}",
                        "tuning" if runs[0]["seed"] == TUNING_SEED else _seeds(runs),
                        f"{mean(run['changed_bf16'] for run in runs):.1%}",
                        mean_of(runs, "optimizer_bytes", "{:,.1f}", 1e-6),
                        _perplexity(runs),
                        _mean_of_others(runs),
                        "" if step is None else f"{step:.2f}",
                    )
                )
    headers = (
        "task", "trained", "values", "learning rate", "held out", "seeds", "bf16 changed", "optimizer MB", "perplexity",
        "other tasks", "s a step",
    )  # fmt: skip
    return markdown_table(headers, rows, n_words=2)


def _perplexity(rows: Sequence[Mapping[str, Any]]) -> str:
    values = [row["perplexity"] for row in rows]
    return "not finite" if None in values else f"{mean(values):.3f}"


def _mean_of_others(rows: Sequence[Mapping[str, Any]]) -> str:
    scores = [score for row in rows for score in row["others"].values()]
    return f"{mean(scores):.3f}" if scores else ""
