"""Do the claims about sparse training hold on a pretrained model? Runs, tables and verdicts.

For each claim (`sparse_opt.bench.study.plan` lists them, and what can be trained), every choice of what is trained is
tuned in the same way: one run with a seed of its own for each of a few learning rates, scored on questions that are
neither trained on nor held out, and further rates while the best is the lowest or highest. Then come the runs of the
seeds at the best rate, scored on the held-out questions.

A finished run is a line of JSON in the results file. A call that was stopped continues from it, and claims share runs.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash
import yaml
from tqdm import tqdm

from sparse_opt.cli.parser import CommandParser

from ..common.environment import environment
from ..common.harness import exit_code, numbers_out_of_range
from ..common.report import why_unwritable
from ..common.training import beyond
from .plan import CLAIMS, FINDING_SEED, TUNING_SEED, Run, Subject, all_subjects, first_rates
from .report import report
from .results import Results
from .runs import ALGORITHMS, World, before, do, make_world

SETTINGS = Path(__file__).with_name("study.yaml")
# Rates beyond the lowest or highest that tuning tries at most.
WIDEN = 2

_EPILOG = """examples:
  sparse-opt bench study --dry_run                    # the runs, and how long they take
  sparse-opt bench study --claims 1 4
  sparse-opt bench study --size small --claims 1      # a small model on sums, on a CPU
"""


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


def seed_runs(subject: Subject, seeds: Sequence[int], results: Results) -> list[Run]:
    """The runs of the seeds at the best rate that are not finished."""
    rate = results.best_rate(subject)
    assert rate is not None
    runs = [Run(subject.algorithm, subject.task, subject.trained, rate, seed) for seed in seeds]
    return [run for run in runs if run not in results]


def study(world: World, subjects: Sequence[Subject], seeds: Sequence[int], results: Results, deadline: float) -> bool:
    """Do the missing runs of the subjects, one after the other; return whether all are finished in time."""
    with tqdm(total=len(subjects), unit="subject", disable=None) as bar:
        for subject in subjects:
            while runs := tuning_runs(world.settings, subject, results) or seed_runs(subject, seeds, results):
                for run in runs:
                    if time.monotonic() >= deadline:
                        return False
                    results.add(run, do(world, run))
            bar.update()
    return True


def estimate(settings: dict[str, Any], subjects: Sequence[Subject], seeds: Sequence[int], results: Results) -> str:
    """The runs that are left of each subject, and their time by the median of the algorithm's finished runs."""
    lines, total, unknown = [], 0.0, set()
    for subject in subjects:
        n = len(tuning_runs(settings, subject, results))
        # The best rate is not known before tuning ends; its runs are counted all the same.
        n += len(seeds) if n else len(seed_runs(subject, seeds, results))
        seconds = results.seconds_per_run(subject.algorithm)
        if n and seconds is None:
            unknown.add(subject.algorithm)
        total += n * (seconds or 0.0)
        lines.append(f"{subject.algorithm:<5} {subject.task:<18} {subject.trained:<22} {n} runs")
    if total or not unknown:
        lines.append(f"about {total / 3600:.2f} hours, without rates beyond the first, by the times of finished runs")
    if unknown:
        lines.append(f"not counted, because no run is finished: {' '.join(sorted(unknown))}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Do the runs, write the results and the page, print the page; return 1 if the time was too short.

    Raises:
        ConfigError: the call is wrong, or the results file has runs of other settings.
    """
    parser = _parser()
    args = parser.parse_words(sys.argv[1:] if argv is None else argv)
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))[args.size]
    tasks = args.tasks or settings["tasks"]
    path = args.results or args.output_dir / "results.jsonl"
    if problem := _problem(args, settings) or why_unwritable(path):
        parser.error(problem)
    from sparse_opt.trainers.policy.models import resolve_device
    from sparse_opt.trainers.run.progress import hide_progress_bars

    hide_progress_bars(always=True)
    device = resolve_device(args.device)
    world = World(args.output_dir.resolve(), settings, str(device))
    header = {
        "settings": xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True).encode()),
        **environment(device),
    }
    results = Results(path, header)
    subjects = all_subjects(args.claims, tasks, args.algorithms)
    if args.dry_run:
        print(estimate(settings, subjects, args.seeds, results))
        return 0
    deadline = time.monotonic() + args.stop_after
    make_world(world, tasks)
    finished = study(world, subjects, args.seeds, results, deadline)
    starts = {task: before(world, task)["test"] for task in tasks}
    page = report(results, args.claims, tasks, args.algorithms, args.seeds, starts)
    (args.output_dir / "report.md").write_text(page, encoding="utf-8")
    print(page, end="")
    if not finished:
        print("the time is up; the same call continues", file=sys.stderr)
    return 0 if finished else 1


def _parser() -> CommandParser:
    parser = CommandParser(prog="sparse-opt bench study", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--size", choices=("smollm2", "small"), default="smollm2", help="settings (%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("study"), help="model, data and runs (%(default)s)")
    parser.add_argument("--results", type=Path, help="finished runs, a line each (OUTPUT_DIR/results.jsonl)")
    claims = "; ".join(f"{number}: {text}" for number, text in CLAIMS.items())
    parser.add_argument("--claims", nargs="+", type=int, choices=CLAIMS, default=list(CLAIMS), help=claims)
    parser.add_argument("--tasks", nargs="+", help="tasks (all of the size)")
    parser.add_argument(
        "--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="the loops of claim 1 (all)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run of each (0 1 2)")
    parser.add_argument("--dry_run", action="store_true", help="print the runs that are left and their time")
    parser.add_argument(
        "--stop_after", type=float, default=float("inf"), metavar="SECONDS", help="begin no run later than this"
    )
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto takes a GPU where there is one")
    return parser


def _problem(args: Namespace, settings: dict[str, Any]) -> str:
    """The error in the options; empty if they are valid."""
    if reserved := {TUNING_SEED, FINDING_SEED} & set(args.seeds):
        return f"--seeds {reserved.pop()}: this seed is used for tuning or for finding masks"
    if unknown := set(args.tasks or ()) - set(settings["tasks"]):
        return f"--tasks {unknown.pop()}: expected some of {' '.join(settings['tasks'])}"
    return numbers_out_of_range(args)


if __name__ == "__main__":
    sys.exit(exit_code(main))
