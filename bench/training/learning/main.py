"""Do the loops learn, and how well do sparse runs learn compared with dense and LoRA runs? On generated arithmetic.

A small Llama is trained from scratch by SFT on demonstrations, only some of them right (`trainers.arithmetic`), so that
reinforcement learning can improve it. GRPO, PPO, RFT and RLT then train with the reward of a verifier or a student:

| trained | |
|---|---|
| dense | all weights |
| lora | adapters of rank 16 on all linear layers |
| random:2.5 | a random mask of 2.5 % of the weights, another one for every seed |
| found:2.5 | the 2.5 % that changed most in a dense run of the same algorithm with another seed |
| found:2.5:tile64 | the same in tiles of 64 x 64; other patterns: run16, run32, tile128 |

The learning rate of each is the best of a few with a separate seed (`--tune`), because sparse runs need higher learning
rates than dense ones. Results are of held-out questions: for GRPO, PPO and RFT the share of right sampled answers, for
RLT the teacher's reward. `--size tiles` compares patterns: GRPO alone, on a model whose matrices are many tiles wide,
with tables of the accuracy and the best learning rate of each pattern.

Runs are parallel, each in a process of its own. The results file is written after every run, and a second call
continues from it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from sparse_opt.cli.parser import CommandParser

from ...common.environment import environment
from ...common.harness import exit_code, numbers_out_of_range, out_of_range
from ...common.report import why_unwritable
from ...common.training import beyond, rounded
from .report import Results, pattern_text, text
from .runs import ALGORITHMS, TRAINED, TUNING_SEED, Run, Trained, World, before, do, find, make_mask, make_world

SETTINGS = Path(__file__).with_name("learning.yaml")

_EPILOG = """examples:
  sparse-opt bench learning                                     # on a CPU, in minutes
  sparse-opt bench learning --size large --tune 0.3 1 3 --n_processes 14
  sparse-opt bench learning --size tiles --tune 0.3 1 3 10 --widen 2 --n_processes 14 --stop_after 420
"""


class _Work:
    """A pool of processes, and the deadline for starting new runs."""

    def __init__(self, pool: ProcessPoolExecutor, n_processes: int, deadline: float):
        self.pool = pool
        self.n_processes = n_processes
        self.deadline = deadline

    def do_all(self, function: Callable[..., Any], world: World, runs: Sequence[Run], keep: Callable[..., None]) -> int:
        """Call `keep(run, function(world, run))` for each run; return the number of runs not started in time."""
        waiting, going = list(reversed(runs)), dict[Future[Any], Run]()
        with tqdm(total=len(runs), unit="run", disable=None) as bar:
            while waiting or going:
                # Submit one by one: a pool starts everything that was submitted, whatever the deadline.
                while waiting and len(going) < self.n_processes and time.monotonic() < self.deadline:
                    run = waiting.pop()
                    going[self.pool.submit(function, world, run)] = run
                if not going:
                    break
                for future in wait(going, return_when=FIRST_COMPLETED).done:
                    keep(going.pop(future), future.result())
                    bar.update()
        return len(waiting)


def do_runs(work: _Work, world: World, runs: Sequence[Run], results: Results) -> int:
    """Make the missing masks, then do the missing runs; return the number of runs not started in time."""
    left = [run for run in runs if run.name not in results.data["runs"]]
    masked = {world.mask_file(run): run for run in left if Trained.parse(run.trained).percent is not None}
    missing = [run for file, run in masked.items() if not file.is_file()]
    if work.do_all(make_mask, world, missing, lambda run, made: None):
        return len(left)
    return work.do_all(do, world, left, results.add)


def tune(
    work: _Work,
    world: World,
    rates: Mapping[tuple[str, str], float],
    factors: Sequence[float],
    widen: int,
    results: Results,
) -> int:
    """Try multiples of each learning rate, then up to `widen` times one more if the best is the lowest or highest.

    Returns the number of runs not started in time.
    """
    trials = {key: [rounded(rate * factor) for factor in factors] for key, rate in rates.items()}
    for turn in range(widen + 1):
        runs = [Run(*key, rate, TUNING_SEED) for key, tried in trials.items() for rate in tried]
        if left := do_runs(work, world, runs, results):
            return left
        if turn < widen:
            for key in trials:
                tried = [run["learning_rate"] for run in results.of(*key, [TUNING_SEED])]
                trials[key] = beyond(tried, best_rate(results, *key))
    return 0


def best_rate(results: Results, algorithm: str, trained: str) -> float:
    """The learning rate of the best run of the tuning seed; the lowest of equal ones."""
    runs = results.of(algorithm, trained, [TUNING_SEED])
    return float(min(runs, key=lambda run: (-run["after"], run["learning_rate"]))["learning_rate"])


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write the results, print the tables, draw the curves; return 1 if the time was too short.

    Raises:
        ConfigError: the call is wrong, or the results file is of another size or other settings.
    """
    parser = _parser()
    args = parser.parse_words(sys.argv[1:] if argv is None else argv)
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))[args.size]
    args.algorithms = args.algorithms or [name for name in ALGORITHMS if name in settings]
    if missing := [name for name in args.algorithms if name not in settings]:
        parser.error(f"--algorithms {' '.join(missing)}: size {args.size} has no settings for that")
    trained = [str(Trained.parse(word)) for word in args.trained or settings.get("trained", TRAINED)]
    path = args.results or args.output_dir / "results.json"
    if problem := _problem(args) or why_unwritable(path):
        parser.error(problem)
    from sparse_opt.trainers.policy.models import resolve_device

    device = resolve_device(args.device)
    world = World(args.output_dir.resolve(), settings, str(device))
    results = Results(path, {"environment": environment(device), "size": args.size, "settings": settings})
    deadline = time.monotonic() + args.stop_after
    make_world(world, args.algorithms)
    rates = {
        (algorithm, what): float(settings[algorithm]["learning_rates"][Trained.parse(what).source])
        for algorithm in args.algorithms
        for what in trained
    }
    if any(what.startswith("found") for what in trained):
        for algorithm in args.algorithms:
            find(world, algorithm, float(settings[algorithm]["learning_rates"]["dense"]))
    with ProcessPoolExecutor(args.n_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = _Work(pool, args.n_processes, deadline)
        if args.tune and (left := tune(work, world, rates, sorted(args.tune), args.widen, results)):
            print(f"the time is up with at least {left} tuning runs left; the same call continues", file=sys.stderr)
            return 1
        for key, rate in rates.items():
            results.choose(*key, best_rate(results, *key) if args.tune else rate)
        chosen = results.data["learning_rates"]
        runs = [Run(*key, chosen[key[0]][key[1]], seed) for key in rates for seed in args.seeds]
        left = do_runs(work, world, runs, results)
    results.data["before"] |= before(world, args.algorithms)
    results.write()
    if all(Trained.parse(what).pattern in (None, "element") for what in trained):
        print(text(results, args.algorithms, trained, args.seeds))
    else:
        print("\n\n".join(pattern_text(results, name, trained, args.seeds) for name in args.algorithms))
    if args.plot is not None:
        from .plot import plot

        plot(results.data, args.seeds, args.plot)
    if left:
        print(f"the time is up with {left} runs left; the same call continues", file=sys.stderr)
    return 1 if left else 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="sparse-opt bench learning", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--size", choices=("small", "large", "tiles"), default="small", help="settings (%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("learning"), help="models, data and runs (%(default)s)")
    parser.add_argument("--results", type=Path, help="results as JSON (OUTPUT_DIR/results.json)")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, help="the loops (all of the size)")
    parser.add_argument("--trained", nargs="+", metavar="WHAT", help="see above (all of the size)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run of each (0 1 2)")
    parser.add_argument(
        "--tune",
        nargs="+",
        type=float,
        metavar="FACTOR",
        help="try these multiples of each learning rate of learning.yaml first, by one run each",
    )
    parser.add_argument(
        "--widen", type=int, default=0, help="then try up to this many more beyond the lowest or highest (%(default)s)"
    )
    parser.add_argument("--n_processes", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at once")
    parser.add_argument(
        "--stop_after", type=float, default=float("inf"), metavar="SECONDS", help="begin no run later than this"
    )
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto takes a GPU where there is one")
    parser.add_argument("--plot", type=Path, help="draw the curves of rewards to this PNG")
    return parser


def _problem(args: argparse.Namespace) -> str:
    """The error in the options; empty if they are valid."""
    if TUNING_SEED in args.seeds:
        return f"--seeds {TUNING_SEED}: this seed is used for tuning"
    if any(not factor > 0 for factor in args.tune or ()):
        return f"--tune {' '.join(f'{factor:g}' for factor in args.tune)}: expected factors above 0"
    if args.widen < 0 or (args.widen and len(args.tune or ()) < 2):
        return f"--widen is {args.widen}: expected at least 0, and above 0 only with two factors of --tune or more"
    return out_of_range(args, "n_processes") or numbers_out_of_range(args)


if __name__ == "__main__":
    sys.exit(exit_code(main))
