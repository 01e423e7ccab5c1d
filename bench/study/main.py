"""Do the claims about sparse training hold on a pretrained model? Runs, tables and verdicts.

For each claim (`sparse_opt.bench.study.plan` lists them, and what can be trained), every choice of what is trained is
tuned in the same way: one run with a seed of its own for each of a few learning rates, scored on questions that are
neither trained on nor held out, and further rates while the best is the lowest or highest. Then come the runs of the
seeds at the best rate, scored on the held-out questions.

A finished run is a line of JSON in the results file. A call that was stopped continues from it, and claims share runs.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import xxhash
import yaml

from sparse_opt.analysis.figures import require_matplotlib
from sparse_opt.cli.parser import CommandParser
from sparse_opt.trainers.run.lock import RunLock

from ..common.environment import environment
from ..common.harness import exit_code, numbers_out_of_range
from ..common.report import why_unwritable, write_json
from ..common.training import beyond
from .plan import CLAIMS, FINDING_SEED, OF_DENSE, TUNING_SEED, Choice, Part, Run, Subject, first_rates, plan
from .plot import plot
from .pool import Pool, visible_gpus
from .report import report
from .results import Results
from .runs import Chore, before, do, do_chore, is_done, needed_by
from .world import World, make_world

SETTINGS = Path(__file__).with_name("study.yaml")
# Rates beyond the lowest or highest that tuning tries at most.
WIDEN = 2
# Settings that say which runs there are.
_OF_PLAN = ("tasks", "factors", "learning_rates", "sgd_rate", "tile", "texts")
# Until a run of its algorithm is finished, a run is taken to last this long in an estimate.
SECONDS_A_RUN = 150

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

    return plan(choice.claims, choice.tasks, choice.seeds, chosen, settings["tile"])


class Study:
    """The runs that are left, and those that failed in this call.

    Args:
        jobs: runs at once; 1 does them in this process.
    """

    def __init__(self, world: World, choice: Choice, results: Results, jobs: int):
        self.world, self.choice, self.results, self.jobs = world, choice, results, jobs
        self.failures: dict[Run | Chore, str] = {}

    def next(self, running: Collection[Run | Chore]) -> Run | Chore | None:
        """The most informative run that can begin, or what it needs; None if all wait or are done."""
        for task in self.choice.tasks:
            chore = Chore("before", task)
            if not is_done(self.world, chore) and chore not in running and chore not in self.failures:
                return chore
        for part in parts_of(self.choice, self.results, self.world.settings):
            for run in runs_left(self.world.settings, part, self.results):
                found = needed_by(self.world, run) or run
                if found not in running and found not in self.failures:
                    return found
        return None

    def ended(self, job: Run | Chore, result: Any, failure: str | None) -> None:
        """Write the result of a job, or report why there is none."""
        if failure is not None:
            self.failures[job] = failure
            print(f"failed: {job.name}: {failure}", file=sys.stderr, flush=True)
        elif isinstance(job, Run) and job not in self.results:  # else only its weights were needed
            self.results.add(job, {**result, "jobs": self.jobs})
            print(
                f"{job.name}: {result['accuracy']:.3f} (tune {result['tune_accuracy']:.3f}), {result['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def run(self, deadline: float, kill: bool) -> bool:
        """Do the runs; return whether all were done in time.

        Args:
            deadline: begin none later, by `time.monotonic()`.
            kill: at the deadline end those that still run.
        """
        if self.jobs == 1:
            while (job := self.next(())) is not None:
                if time.monotonic() >= deadline:
                    return False
                self.ended(job, work(self.world, job), None)
            return True
        gpus = visible_gpus() if self.world.device == "cuda" else ()
        with Pool(work, self.world, self.jobs, self.world.folder / "logs", gpus) as pool:
            while True:
                while not pool.is_full and time.monotonic() < deadline and (job := self.next(pool.running)) is not None:
                    pool.start(job)
                if not pool.running:
                    return not self.failures and self.next(()) is None
                late = time.monotonic() >= deadline
                if late and kill:
                    for job in pool.stop():
                        print(f"stopped: {job.name}", file=sys.stderr, flush=True)
                    return False
                for ended in pool.wait(float("inf") if late else deadline - time.monotonic()):
                    self.ended(*ended)


def work(world: World, job: Run | Chore) -> dict[str, Any] | None:
    """Do a run or a chore."""
    if isinstance(job, Run):
        return do(world, job)
    do_chore(world, job)
    return None


def estimate(settings: dict[str, Any], parts: Sequence[Part], results: Results, jobs: int) -> str:
    """The runs that are left of each part, and their time by the median of the algorithm's finished runs."""
    lines, total, n_total, guessed = [], 0.0, 0, False
    for part in parts:
        subject = part.subject
        own = part.tuned_by == subject
        n = len(tuning_runs(settings, subject, results)) if own else 0
        left = runs_left(settings, part, results)
        # The best rate is not known before tuning ends; the runs at it are counted all the same.
        if n:
            n += len(part.seeds)
        elif subject.trained in OF_DENSE and results.best_rate(part.tuned_by) is None:
            n = len(part.seeds)
        elif results.best_rate(part.tuned_by) is None or tuning_runs(settings, part.tuned_by, results):
            n = 1 + len(part.seeds)
        else:
            n = len(left)
        seconds = results.seconds_per_run(subject.algorithm)
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
    # Which runs there are may differ between calls; rows say their task and learning rate.
    of_runs = {name: value for name, value in settings.items() if name not in _OF_PLAN}
    header = {
        "settings": xxhash.xxh3_64_hexdigest(json.dumps(of_runs, sort_keys=True).encode()),
        **environment(device),
    }
    results = Results(path, header)
    choice = Choice(args.claims, tasks, args.seeds)
    if args.dry_run:
        print(estimate(settings, parts_of(choice, results, settings), results, args.jobs))
        return 0
    starts_file = args.output_dir / "starts.json"
    finished, n_failed = True, 0
    if not args.report_only:
        deadline = time.monotonic() + args.stop_after
        signal.signal(signal.SIGTERM, _interrupt)
        with RunLock(world.folder):
            make_world(world, tasks)
            study = Study(world, choice, results, args.jobs)
            finished = study.run(deadline, args.kill)
            n_failed = len(study.failures)
            starts = {task: before(world, task) for task in tasks if is_done(world, Chore("before", task))}
            write_json(starts_file, starts)
    starts = json.loads(starts_file.read_text(encoding="utf-8")) if starts_file.is_file() else {}
    parts = parts_of(choice, results, settings)
    page = report(results, parts, choice, starts)
    (args.output_dir / "report.md").write_text(page, encoding="utf-8")
    print(page, end="")
    if args.plot is not None:
        plot(results, parts, choice, starts, args.plot)
    if n_failed:
        print(f"{n_failed} failed; the same call tries them again", file=sys.stderr)
    elif not finished:
        print("the time is up; the same call continues", file=sys.stderr)
    return 0 if finished else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> CommandParser:
    parser = CommandParser(prog="sparse-opt bench study", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--size", choices=("smollm2", "small"), default="smollm2", help="settings (%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("study"), help="model, data and runs (%(default)s)")
    parser.add_argument("--results", type=Path, help="finished runs, a line each (OUTPUT_DIR/results.jsonl)")
    claims = "; ".join(f"{number}: {text}" for number, text in CLAIMS.items())
    parser.add_argument("--claims", nargs="+", type=int, choices=CLAIMS, default=list(CLAIMS), help=claims)
    parser.add_argument("--tasks", nargs="+", help="tasks (all of the size)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run of each (0 1 2)")
    parser.add_argument("--report_only", action="store_true", help="write the page of the finished runs, and do none")
    parser.add_argument("--plot", type=Path, help="PNG of tuning, scores and rates; needs matplotlib")
    parser.add_argument("--dry_run", action="store_true", help="print the runs that are left and their time")
    parser.add_argument(
        "--stop_after", type=float, default=float("inf"), metavar="SECONDS", help="begin no run later than this"
    )
    parser.add_argument("--kill", action="store_true", help="at --stop_after end the runs that are not finished")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at once, each in a process of its own, on all GPUs; their times are not compared (%(default)s)",
    )
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto takes a GPU where there is one")
    return parser


def _problem(args: Namespace, settings: dict[str, Any]) -> str:
    """The error in the options; empty if they are valid."""
    if reserved := {TUNING_SEED, FINDING_SEED} & set(args.seeds):
        return f"--seeds {reserved.pop()}: this seed is used for tuning or for finding masks"
    if unknown := set(args.tasks or ()) - set(settings["tasks"]):
        return f"--tasks {unknown.pop()}: expected some of {' '.join(settings['tasks'])}"
    if args.plot is not None:
        require_matplotlib("plot")
        if problem := why_unwritable(args.plot):
            return problem
    if args.jobs < 1:
        return f"--jobs {args.jobs}: expected at least 1"
    return numbers_out_of_range(args)


if __name__ == "__main__":
    sys.exit(exit_code(main))
