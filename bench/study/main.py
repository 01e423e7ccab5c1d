"""Do the claims about sparse training hold on a pretrained model? Runs, tables and verdicts.

For each claim (`sparse_opt.bench.study.plan` lists them, and what can be trained), every choice of what is trained is
tuned in the same way: one run with a seed of its own for each of a few learning rates, scored on questions that are
neither trained on nor held out, and further rates while the best is the lowest or highest. Then come the runs of the
seeds at the best rate, scored on the held-out questions.

A finished run is a line of JSON in the results file. A call that was stopped continues from it, and claims share runs.
"""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from sparse_opt.analysis.output_files import require_matplotlib
from sparse_opt.cli.parser import CommandParser
from sparse_opt.trainers.run.lock import RunLock

from ..common.environment import environment
from ..common.harness import exit_code, numbers_out_of_range
from ..common.report import why_unwritable, write_json
from .plan import CLAIMS, FINDING_SEED, SETTINGS, TUNING_SEED, Choice, Run, claims_of
from .plot import plot
from .plot_updates import plot_updates
from .pool import Pool, visible_gpus
from .report import report
from .results import RESULTS_FILE, STARTS_FILE, Results, read_starts, settings_digest
from .runs import Chore, do, do_chore, is_done, needed_by, require_samples
from .schedule import at_equal_time, estimate, in_order, parts_of, runs_left
from .timing import read_times, time_steps
from .world import World, make_world, require_inputs

# In the traceback of a run that does not fit into the GPU's memory with the others.
_NO_MEMORY = ("OutOfMemoryError", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

_EPILOG = """examples:
  sparse-opt bench study --dry_run                    # the runs, and how long they take
  sparse-opt bench study --claims 1 4
  sparse-opt bench study --size small --claims 1      # a small model on sums, on a CPU
"""


class Study:
    """The runs that are left, and those that failed in this call.

    Args:
        jobs: runs at once.

    Attributes:
        starts: task -> the scores of the start, which are kept in the folder's starts.json.
    """

    def __init__(self, world: World, choice: Choice, results: Results, jobs: int):
        self.world, self.choice, self.results, self.jobs = world, choice, results, jobs
        self.failures: dict[Run | Chore, str] = {}
        self.starts = read_starts(world.folder, results)
        self._times = read_times(world.folder, results)

    def _candidates(self) -> Iterator[Run | Chore]:
        """What can be done now, the most informative first, and what runs need before them."""
        texts = Chore("texts", "all")
        if not is_done(self.world, texts):
            yield texts  # all scores need them
            return
        for task in self.choice.tasks:
            if self.starts.get(task, {}).get("inputs") != self.world.inputs(task):
                yield Chore("before", task)
        parts = parts_of(self.choice, self.results, self.world.settings)
        for part in in_order(parts + at_equal_time(self.world.settings, parts, self._times)):
            for run in runs_left(self.world.settings, part, self.results):
                yield needed_by(self.world, run) or run

    def seconds(self, job: Run | Chore) -> float:
        """How long a job lasts: the median of finished runs, before there is one the settings' estimate; 0 of a chore
        that is no run."""
        if isinstance(job, Chore) and job.kind != "log":
            return 0.0
        seconds = self.results.seconds_per_run(job.algorithm, self.jobs)
        return float(self.world.settings["seconds"][job.algorithm]) if seconds is None else seconds

    def next(self, running: Collection[Run | Chore], seconds: float = float("inf")) -> Run | Chore | None:
        """The most informative job that can begin and lasts no longer than this; None if there is none."""
        for job in self._candidates():
            if job not in running and job not in self.failures and self.seconds(job) <= seconds:
                return job
        return None

    def ended(self, job: Run | Chore, result: Any, failure: str | None, pool: Pool | None = None) -> None:
        """Write the result of a job, or report why there is none.

        A job that ran out of memory next to others is not a failure: it is done again, with one job less at once.
        """
        if failure is not None and pool is not None and pool.size > 1 and any(sign in failure for sign in _NO_MEMORY):
            pool.size -= 1
            print(f"{job.name}: out of memory; from now on {pool.size} at once", file=sys.stderr, flush=True)
        elif failure is not None:
            self.failures[job] = failure
            print(f"failed: {job.name}: {failure}", file=sys.stderr, flush=True)
        elif isinstance(job, Chore):
            if job.kind == "before":
                self.starts[job.task] = {**result, "settings": self.results.header["settings"]}
                write_json(self.world.folder / STARTS_FILE, self.starts)
        elif job not in self.results:  # else only its weights were needed
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
            kill: at the deadline end those that still run; those that last longer than the time that is left are not
                begun.
        """
        if self.jobs == 1 and not kill:
            while (job := self.next(())) is not None:
                if time.monotonic() >= deadline:
                    return False
                self.ended(job, work(self.world, job), None)
            return True
        gpus = visible_gpus() if self.world.device == "cuda" else ()
        has_said = False
        with Pool(work, self.world, self.jobs, self.world.folder / "logs", gpus) as pool:
            while True:
                left = deadline - time.monotonic()
                while not pool.is_full and left > 0:
                    if (job := self.next(pool.running, left if kill else float("inf"))) is None:
                        break
                    pool.start(job)
                if kill and not has_said and not pool.is_full and (job := self.next(pool.running)) is not None:
                    has_said = True
                    print(
                        f"{max(left, 0.0):.0f} s left: {job.name} is not begun, since it would last "
                        f"{self.seconds(job):.0f} s; nor is any other run that lasts longer than what is left",
                        file=sys.stderr,
                        flush=True,
                    )
                if not pool.running:
                    return not self.failures and self.next(()) is None
                late = time.monotonic() >= deadline
                if late and kill:
                    for job in pool.stop():
                        print(f"stopped: {job.name}", file=sys.stderr, flush=True)
                    return False
                for ended in pool.wait(float("inf") if late else deadline - time.monotonic()):
                    self.ended(*ended, pool)


def work(world: World, job: Run | Chore) -> dict[str, Any] | None:
    """Do a run or a chore; return its measurements, if it has any."""
    return do(world, job) if isinstance(job, Run) else do_chore(world, job)


def main(argv: Sequence[str] | None = None) -> int:
    """Do the runs, write the results and the page, print the page; return 1 if the time was too short.

    Raises:
        ConfigError: the call is wrong, the results file has runs of other settings, or a file of its runs is missing.
    """
    parser = _parser()
    args = parser.parse_words(sys.argv[1:] if argv is None else argv)
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))[args.size]
    tasks = args.tasks or settings["tasks"]
    args.claims = args.claims or claims_of(settings)
    path = args.results or args.output_dir / RESULTS_FILE
    if problem := _problem(args, settings) or why_unwritable(path):
        parser.error(problem)
    from sparse_opt.progress import hide_progress_bars
    from sparse_opt.trainers.policy.models import resolve_device

    hide_progress_bars(always=True)
    device = resolve_device(args.device)
    world = World(args.output_dir.resolve(), settings, str(device))
    results = Results(path, {"settings": settings_digest(settings), **environment(device)})
    choice = Choice(args.claims, tasks, args.seeds, args.size)
    if args.dry_run:
        parts = parts_of(choice, results, settings)
        parts += at_equal_time(settings, parts, read_times(world.folder, results))
        print(estimate(settings, parts, results, args.jobs))
        return 0
    finished, n_failed = True, 0
    if not args.report_only:
        deadline = time.monotonic() + args.stop_after
        signal.signal(signal.SIGTERM, _interrupt)
        with RunLock(world.folder):
            make_world(world, tasks)
            require_inputs(world, results.inputs)
            if 2 in args.claims:
                require_samples(world, results)
            if args.time_steps is not None:
                finished = time_steps(world, parts_of(choice, results, settings), results, args.time_steps, deadline)
            else:
                study = Study(world, choice, results, args.jobs)
                finished = study.run(deadline, args.kill)
                n_failed = len(study.failures)
    starts = read_starts(world.folder, results)
    parts = parts_of(choice, results, settings)
    page = report(results, parts, choice, starts, settings, read_times(world.folder, results))
    (args.output_dir / "report.md").write_text(page, encoding="utf-8")
    print(page, end="")
    if args.plot is not None:
        plot(results, parts, choice, starts, args.plot)
    if args.plot_updates is not None:
        plot_updates(results, parts, choice, args.plot_updates)
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
    parser.add_argument("--claims", nargs="+", type=int, choices=CLAIMS, help=f"claims (all of the size): {claims}")
    parser.add_argument("--tasks", nargs="+", help="tasks (all of the size)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run of each (0 1 2)")
    parser.add_argument("--report_only", action="store_true", help="write the page of the finished runs, and do none")
    parser.add_argument("--plot", type=Path, help="PNG of tuning, scores, and rates by density; needs matplotlib")
    parser.add_argument(
        "--plot_updates", type=Path, help="PNG of which weights change, where runs agree, and what is forgotten"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the runs that are left and their time")
    parser.add_argument(
        "--stop_after", type=float, default=float("inf"), metavar="SECONDS", help="begin no run later than this"
    )
    parser.add_argument(
        "--kill",
        action="store_true",
        help="at --stop_after end the runs that are not finished, and begin none that lasts longer than the time left",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at once, each in a process of its own if there are several or with --kill, on all GPUs; times of "
        "several are not compared (%(default)s)",
    )
    parser.add_argument(
        "--time_steps",
        type=int,
        metavar="N",
        help="in place of the runs, measure N steps of each choice of what is trained with the device to itself",
    )
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto takes a GPU where there is one")
    return parser


def _problem(args: Namespace, settings: dict[str, Any]) -> str:
    """The error in the options; empty if they are valid."""
    if reserved := {TUNING_SEED, FINDING_SEED} & set(args.seeds):
        return f"--seeds {reserved.pop()}: this seed is used for tuning or for finding masks"
    if unknown := set(args.tasks or ()) - set(settings["tasks"]):
        return f"--tasks {unknown.pop()}: expected some of {' '.join(settings['tasks'])}"
    if unknown_claims := set(args.claims) - set(claims_of(settings)):
        expected = " ".join(map(str, claims_of(settings)))
        return (
            f"--claims {unknown_claims.pop()} needs bf16 weights, and those of size {args.size} are "
            f"{settings['shared']['dtype']}: expected some of {expected}"
        )
    for name in ("plot", "plot_updates"):
        if (file := getattr(args, name)) is not None:
            require_matplotlib(name)
            if problem := why_unwritable(file):
                return problem
    for name in ("jobs", "time_steps"):
        if (value := getattr(args, name)) is not None and value < 1:
            return f"--{name} {value}: expected at least 1"
    if args.time_steps is not None and (args.jobs > 1 or args.kill):
        return "--time_steps measures one after the other: it is not valid with --jobs or --kill"
    return numbers_out_of_range(args)


if __name__ == "__main__":
    sys.exit(exit_code(main))
