"""The report of the study, and the tables and figures of docs/study.md, from finished runs:

python -m studies.smollm2.report                              # all tables of all claims
python -m studies.smollm2.report --write                      # docs/study.md and docs/figures
python -m studies.smollm2.report --output_dir study           # of runs of your own
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from sparse_opt.tables import markdown_table

from ..training import ROOT, SOURCES, TUNING_SEED, fill_tables
from .plan import PLAN, Run, Study
from .verdicts import OF_SCORES, best_of, compared, difference, law, overlaps, ratio, score_of, verdict

RESULTS = Path(__file__).with_name("results")
Rows = Sequence[Mapping[str, Any]]


def claims_of(study: Study) -> list[int]:
    return sorted({claim for part in study.parts for claim in part.claims})


def verdict_table(study: Study) -> str:
    """The verdicts on all claims, of all tasks together and of each."""
    rows = []
    for claim in claims_of(study):
        of_tasks = [verdict(study, claim, tasks) for tasks in (study.tasks, *([task] for task in study.tasks))]
        unfinished = sum(not study.is_finished(part) for part in study.parts if claim in part.claims)
        rows.append((f"{claim}. {study.settings['claims'][claim]}", *of_tasks, str(unfinished)))
    return markdown_table(("claim", "verdict", *study.tasks, "unfinished rows"), rows, n_words=2 + len(study.tasks))


def difference_table(study: Study) -> str:
    """The comparisons that the verdicts on claims 3 to 6, 8 and 9 are from."""
    words = {True: "yes", False: "no", None: "not shown"}
    rows = [
        (str(claim), task, str(first), str(second), f"{found.value:+.3f}", f"{found.error:.3f}", words[found.not_below])
        for claim in claims_of(study)
        if claim in OF_SCORES
        for task in study.tasks
        for (first, second), found in compared(study, claim, study.of_claim(claim, [task])).items()
    ]
    headers = ("claim", "task", "trained", "compared with", "difference", "known up to", "not below")
    return markdown_table(headers, rows, n_words=4)


def rate_table(study: Study) -> str:
    """Shares of the weights that dense runs changed, and ranks of their updates, by learning rate."""
    of_ranks: dict[str, Callable[[Iterable[float]], float]] = {
        "numerical": mean,
        "numerical_min": min,
        "effective": mean,
    }
    rows = []
    for part in study.of_claim(1, study.tasks):
        by_rate = defaultdict(list)
        for row in study.of(part.subject, (TUNING_SEED, *part.seeds)):
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
                    *(f"{of(rank[kind] for rank in ranks):.3f}" if ranks else "" for kind, of in of_ranks.items()),
                    f"{mean(run['accuracy'] for run in runs):.3f}",
                )
            )
    headers = ("task", "algorithm", "learning rate", "runs", "bf16 changed", "fp32 changed", "moved by > 1e-5", "rank",
               "lowest rank", "effective rank", "after")  # fmt: skip
    return markdown_table(headers, rows, n_words=2)


def overlap_table(study: Study) -> str:
    """Weights that two runs have both changed, in relation to chance."""
    by_kind = defaultdict(list)
    for first, second, counts in overlaps(study, study.of_claim(2, study.tasks)):
        by_kind[difference_of(first, second)].append(counts)
    rows = []
    for kind, found in sorted(by_kind.items()):
        ratios, smaller = [ratio(counts) for counts in found], [min(c["n"], c["n_other"]) for c in found]
        shares = [
            mean(counts[key] / n for counts, n in zip(found, smaller, strict=True))
            for key in ("n_both", "expected_by_tensor", "expected")
        ]
        stderr = max(counts["n_both_stderr"] / max(1.0, counts["expected"]) for counts in found)
        between = f"{min(ratios):.2f}" + (f" to {max(ratios):.2f}" if len(ratios) > 1 else "")
        rows.append((kind, str(len(found)), *(f"{share:.1%}" for share in shares), between, f"{stderr:.3f}"))
    headers = ("runs differ in", "pairs", "in common", "by chance in tensors", "and exponents", "ratio",
               "its standard error")  # fmt: skip
    return markdown_table(headers, rows)


def difference_of(first: Run, second: Run) -> str:
    """In which of algorithm, task and seed two runs differ, in words."""
    return ", ".join(name for name in ("algorithm", "task", "seed") if getattr(first, name) != getattr(second, name))


def closeness_table(study: Study) -> str:
    """How close runs come to the dense run of their seed."""
    rows = [
        (
            row["task"],
            row["trained"],
            str(row["seed"]),
            f"{row['accuracy']:.3f}",
            *(f"{row['closeness'][name]:.1%}" for name in ("within_1e-5", "within_1e-4")),
            *(f"{row['closeness'][name]:.3f}" for name in ("distance", "cosine")),
        )
        for part in study.of_claim(3, study.tasks)
        for row in study.rows_of(part)
        if "closeness" in row
    ]
    headers = (
        "task",
        "trained",
        "seed",
        "after",
        "within 1e-5",
        "within 1e-4",
        "distance / update",
        "cosine of updates",
    )
    return markdown_table(headers, rows, n_words=2)


def source_table(study: Study, task: str) -> str:
    """The held-out scores of masks, with the spread of several seeds: a row for each source, a column for each size."""
    scores: dict[str, dict[tuple[float | None, str | None], str]] = defaultdict(dict)
    for part in study.of_claim(4, [task]):
        runs = study.rows_of(part)
        if part.trained.is_mask and has_seeds(runs):
            score = score_of(runs)
            spread = "" if math.isnan(score.spread) else f" ± {score.spread:.3f}"
            scores[part.trained.source][part.trained[1:]] = f"{score.mean:.3f}{spread}"
    sizes = {size for found in scores.values() for size in found}
    columns = sorted(sizes, key=lambda size: (size[1] == "element", -(size[0] or 0)))
    rows = [(source, *(scores[source].get(size, "") for size in columns)) for source in SOURCES if source in scores]
    return markdown_table((f"{task}, masks of", *(f"{amount:g} %, {pattern}" for amount, pattern in columns)), rows)


def equal_time_table(study: Study) -> str:
    """The held-out scores of masks in the time of their task's dense runs."""
    rows = []
    for dense in study.of_claim(4, study.tasks):
        timed = [part for part in study.parts if part.n_steps and part.subject.task == dense.subject.task]
        timed = [part for part in timed if has_seeds(study.rows_of(part))]
        if dense.subject.trained != "dense" or not timed:
            continue
        for part in (dense, *timed):
            runs, of_dense = study.rows_of(part), score_of(study.rows_of(dense))
            found = difference(score_of(runs), of_dense)
            known = part is not dense and not math.isnan(found.error)
            n_steps = part.n_steps or study.settings[dense.subject.algorithm]["max_steps"]
            rows.append(
                (
                    part.subject.task,
                    part.subject.trained,
                    f"{study.step_seconds.get(study.timed_as(part.subject)):.2f}",
                    str(n_steps),
                    f"{score_of(runs).mean:.3f}",
                    seeds_text(runs),
                    f"{score_of(study.rows_of(replace(part, n_steps=None))).mean:.3f}",
                    *((f"{found.value:+.3f}", f"{found.error:.3f}") if known else ("", "")),
                )
            )
    headers = ("task", "trained", "s a step", "steps in dense's time", "held out", "seeds", "of equal steps",
               "above dense", "known up to")  # fmt: skip
    return markdown_table(headers, rows, n_words=2)


def wall_time_table(study: Study) -> str:
    """The mean reward in training of claim 10's runs, after quarters of the time that the shortest of them takes."""
    rows, quarters = [], (0.25, 0.5, 0.75, 1.0)
    for task in study.tasks:
        timed = []
        for part in study.of_claim(10, [task]):
            seconds, runs = study.step_seconds.get(study.timed_as(part.subject)), study.rows_of(part)
            if seconds is not None and runs:
                timed.append((part.subject.trained, seconds, runs))
        whole = min((seconds * max(map(int, runs[0]["rewards"])) for _, seconds, runs in timed), default=0.0)
        for trained, seconds, runs in timed:
            found = (reward_after(runs, q * whole / seconds) for q in quarters)
            rows.append((task, trained, f"{seconds:.2f}", *found))
        if timed:
            rows.append((task, "after", "", *(f"{q * whole:.0f} s" for q in quarters)))
    return markdown_table(("task", "trained", "s a step", "1/4", "1/2", "3/4", "all"), rows, n_words=2)


def reward_after(runs: Rows, n_steps: float) -> str:
    """The mean reward of the last step, at most this one, that the runs have one of."""
    steps = [step for step in runs[0]["rewards"] if int(step) <= n_steps]
    return f"{mean(run['rewards'][max(steps, key=int)] for run in runs):.3f}" if steps else ""


def score_table(study: Study) -> str:
    """What GRPO learned and forgot by task, without masks of one seed, which `source_table` has; first the start."""
    rows = []
    of_grpo = [part for part in study.parts if part.subject.algorithm == "grpo"]
    of_grpo = [part for part in of_grpo if part.claims and (len(part.seeds) != 1 or not part.trained.is_mask)]
    for task in study.tasks:
        for base in ("", ":nf4"):
            if start := study.starts.get(task + base):
                found = (f"{start['accuracy']:.3f}", "", "", "", "", *forgotten([start]))
                rows.append((task, f"nothing{base}", "", "", *found, ""))
        for part in of_grpo:
            if part.subject.task == task and (runs := study.rows_of(part)):
                step = study.step_seconds.get(study.timed_as(part.subject))
                rows.append(
                    (
                        task,
                        part.subject.trained,
                        f"{runs[0]['n_trained']:,}" if "n_trained" in runs[0] else "all",
                        f"{runs[0]['learning_rate']:.2g}",
                        f"{score_of(runs).mean:.3f}",
                        seeds_text(runs) if has_seeds(runs) else "tuning",
                        f"{mean(run['changed_bf16'] for run in runs):.1%}",
                        mean_of(runs, "optimizer_bytes", "{:,.1f}", 1e-6),
                        mean_of(runs, "peak_memory_bytes", "{:.2f}", 1e-9),
                        *forgotten(runs),
                        "" if step is None else f"{step:.2f}",
                    )
                )
    headers = ("task", "trained", "values", "learning rate", "held out", "seeds", "bf16 changed", "optimizer MB",
               "peak GB", "perplexity", "other tasks", "s a step")  # fmt: skip
    return markdown_table(headers, rows, n_words=2)


def law_table(study: Study) -> str:
    """The best learning rates, and the exponent of the density that is fitted to them on each task."""
    rows, parts = [], study.of_claim(7, study.tasks)
    for part in parts:
        if (best := best_of(study, part.subject)) is not None:
            values = [row["n_trained"] for row in study.of(part.subject, [TUNING_SEED]) if "n_trained" in row]
            dense = study.best_rate(part.subject._replace(trained="dense"))
            of_dense = f"{float(f'{best.rate / dense:.2g}'):g}" if dense else ""
            numbers = (f"{best.rate:g}", f"{best.low:.3g}", f"{best.high:.3g}", of_dense)
            count = f"{mean(values):,.0f}" if values else "all"
            rows.append((part.subject.task, part.subject.trained, count, *numbers))
    headers = ("task", "trained", "values", "best rate", "from", "to", "of dense's")
    lines = [
        f"{task}: rate ~ density^-p, p = {found.p:.2f} over {found.n} densities, "
        f"p between {found.low:.2f} and {found.high:.2f}"
        for task in study.tasks
        if (found := law(study, parts, task)) is not None
    ]
    return "\n\n".join([markdown_table(headers, rows, n_words=2), *lines])


def has_seeds(runs: Rows) -> bool:
    return any(run["seed"] != TUNING_SEED for run in runs)


def seeds_text(runs: Rows) -> str:
    return " ".join(f"{run['accuracy']:.3f}" for run in runs)


def mean_of(runs: Rows, key: str, form: str, factor: float) -> str:
    """The mean of a measurement that some runs do not have."""
    values = [run[key] for run in runs if run.get(key) is not None]
    return form.format(mean(values) * factor) if values else ""


def forgotten(rows: Rows) -> tuple[str, str]:
    """The perplexity of the start's texts, and the accuracy on other tasks."""
    perplexities = [row["perplexity"] for row in rows]
    others = [score for row in rows for score in row["others"].values()]
    of_texts = "not finite" if None in perplexities else f"{mean(perplexities):.3f}"
    return of_texts, f"{mean(others):.3f}" if others else ""


# The tables of docs/study.md by name.
TABLES: dict[str, Callable[[Study], str]] = {
    "study_verdicts": verdict_table,
    "study_scores": score_table,
    "study_sources": lambda study: source_table(study, study.tasks[0]),
    "study_equal_time": equal_time_table,
    "study_differences": difference_table,
    "study_laws": law_table,
    "study_rates": rate_table,
    "study_overlaps": overlap_table,
    "study_closeness": closeness_table,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.smollm2.report", description=__doc__.partition(":")[0])
    parser.add_argument("--output_dir", type=Path, default=RESULTS, help="folder of results.jsonl (%(default)s)")
    parser.add_argument("--plan", type=Path, default=PLAN, help="the plan of these runs (%(default)s)")
    parser.add_argument("--write", action="store_true", help="write the tables and figures of docs/study.md instead")
    args = parser.parse_args(argv)
    study = Study(args.output_dir, args.plan)
    if not args.write:
        tables = TABLES | ({"study_wall_time": wall_time_table} if 10 in claims_of(study) else {})
        print("\n\n".join(f"## {name}\n\n{table(study)}" for name, table in tables.items()))
        return 0
    from .figures import plot

    fill_tables(ROOT / "docs/study.md", {name: table(study) for name, table in TABLES.items()})
    plot(study, ROOT / "docs/figures/study.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
