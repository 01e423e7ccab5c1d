"""`Benchmark`: the command line of a benchmark. `Work`: something to check and then to time.

A benchmark declares its options and fills a `Run` with rows. The harness parses the command line, checks the device and
the output file before any work, writes the rows as JSON (also those that were measured before an error), prints them as
a table, and returns the exit code: 0 done, 1 a wrong result (or with --strict a missed target).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparse_opt.errors import SparseOptError
from sparse_opt.files import written_aside
from sparse_opt.options import CommandParser

from . import report, rows, timing
from .rows import NOT_MEASURED, Case, Row, Run

# Options that have the same range in every benchmark that has them.
SIZES = ("numel", "delta_numel", "peer_numel")
COUNTS = (
    *("n_rounds", "n_steps", "steps_in_a_row", "batch_size", "micro_batch_size", "sequence_length", "max_new_tokens"),
    *("subset_size", "hidden_size", "n_layers", "lora_rank", "experts"),
)
# Segments that grow: a peak of allocated memory then needs hardly more reserved memory.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Folders that are made if they do not exist.
FOLDERS = ("mask_dir", "work_dir", "folder")


class WrongResult(AssertionError):
    """A result is wrong, so it must not be timed."""


# Check, then time


@dataclass
class Work:
    """A call to time, and the case of its rows.

    Args:
        call: or several that do the same on different buffers, taken in turns; each may be `timing.Prepared`.
        check: raises `WrongResult` if the result is wrong, so that the call is not timed.
        peers: of the time on the device; those that are other cases are of the wall time too.
    """

    case: Case
    call: timing.Variant
    check: Callable[[], object] | None = None
    peers: dict[str, float | Case] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.case = rows.clean(self.case)


def passes(run: Run, what: str, check: Callable[[], object] | None) -> bool:
    """Run a check; record and print its failure."""
    try:
        if check is not None:
            check()
    except WrongResult as error:
        run.wrong.append(f"{what}: {error}")
        print(f"WRONG RESULT, not timed: {run.wrong[-1]}", flush=True)
        return False
    return True


def time_works(run: Run, suite: str, works: Iterable[Work], device: torch.device, n_rounds: int) -> None:
    """Check the works, time those with right results in turns, and add their rows; print each.

    On a GPU each has three rows: time on the device, time until the call returns, and time until the work is done.
    """
    works = list(works)
    common = rows.in_common([work.case for work in works])
    right = [work for work in works if passes(run, rows.label(work.case, common), work.check)]
    calls = {str(i): work.call for i, work in enumerate(right)}
    timings = timing.measure(calls, device=device, n_rounds=n_rounds)
    for work, found in zip(right, timings.values(), strict=True):
        row = Row.of_timing(vars(found), suite=suite, case=work.case, peers=work.peers)
        run.add(row)
        run.save()
        spread = f"{rows.number(found.p20_ms)} - {rows.number(found.p80_ms)}"
        print(f"{rows.label(work.case, common)}: {rows.quantity(found.ms, 'ms', 4)} ({spread})", flush=True)
        if device.type == "cuda":
            cases: dict[str, float | Case] = {k: peer for k, peer in work.peers.items() if isinstance(peer, dict)}
            for metric, value, peers in (("host time", found.host_ms, {}), ("wall time", found.wall_ms, cases)):
                run.add(Row(suite=suite, case=work.case, metric=metric, unit="ms", value=value, n=row.n, peers=peers))


# The command line


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark; `main` is its command line.

    Args:
        name: name of the command, and the suite of its rows.
        doc: description in the help: the docstring of the module.
        options: adds the benchmark's own options.
        problem: checks the options before any work, after `out_of_range`; returns the error, or "".
        measure: fills the run. It may raise `WrongResult`.
        output: default results file, which may contain options in braces and `{device}` (cpu or gpu); None writes none.
        device: default of --device, perhaps `auto`. With the option `--small`, a benchmark that has it runs on the CPU.
        threads: default of --threads, which applies to torch during the run; None adds no option.
    """

    name: str
    doc: str | None
    measure: Callable[[Namespace, Run], None]
    options: Callable[[CommandParser], object] = lambda parser: None
    problem: Callable[[Namespace], str] = lambda args: ""
    epilog: str | None = None
    output: str | None = None
    device: str = "auto"
    threads: int | None = None

    def parser(self) -> CommandParser:
        """This benchmark's own options, and those of all."""
        parser = CommandParser(prog=f"sparse-opt bench {self.name}", description=self.doc, epilog=self.epilog)
        self.options(parser)
        where = parser.add_argument_group("where it runs")
        where.add_argument("--device", default=self.device, help="cpu, cuda, cuda:N or auto (%(default)s)")
        if self.threads is not None:
            where.add_argument("--threads", type=int, default=self.threads, help="CPU threads (%(default)s)")
        results = parser.add_argument_group("results")
        shown = self.output or "default: none is written"
        results.add_argument("--output", type=Path, metavar="FILE", help=f"rows as JSON ({shown})")
        results.add_argument("--resume", action="store_true", help="keep the other rows of --output")
        results.add_argument("--strict", action="store_true", help="end with 1 if a target is missed")
        return parser

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the benchmark; return 0 if every result is right, else 1. `sparse-opt` reports the errors that it raises.

        Raises:
            ConfigError: the command line is wrong.
        """
        try:
            return self._run(sys.argv[1:] if argv is None else argv)
        except WrongResult as error:
            print(f"WRONG RESULT: {error}", file=sys.stderr)
            return 1

    def _problem(self, args: Namespace) -> str:
        """The first error of the options; empty if they are valid."""
        if getattr(args, "small", False):
            args.device = "cpu"
        if args.device == "auto":
            args.device = "cuda" if torch.cuda.is_available() else "cpu"
        if problem := why_unusable(args.device):
            return problem + ("; --small runs on a CPU" if hasattr(args, "small") else "")
        if problem := out_of_range(args) or self.problem(args):
            return problem
        if args.output is None and self.output is not None:
            names = vars(args) | {"device": "gpu" if args.device.startswith("cuda") else "cpu"}
            args.output = Path(self.output.format(**names))
        return "" if args.output is None else why_unwritable(args.output)

    def _run(self, words: Sequence[str]) -> int:
        parser = self.parser()
        args = parser.parse_words(words)
        if problem := self._problem(args):
            parser.error(problem)
        run = Run(rows.environment(args.device), completed=False, output=args.output)
        if args.resume and args.output is not None and args.output.is_file():
            keep(run, rows.read(args.output))
        n_kept, threads = len(run.rows), torch.get_num_threads()
        torch.set_num_threads(args.threads if self.threads is not None else threads)
        try:
            run.completed = True  # a benchmark that leaves something out sets it to False
            self.measure(args, run)
        except BaseException:
            run.completed = False
            raise
        finally:
            torch.set_num_threads(threads)
            if args.output is not None and len(run.rows) > n_kept:
                rows.write(args.output, run)
        print(report.text(run))
        if args.output is not None and run.rows:
            print(f"\nresults: {args.output}")
        failures = [f"WRONG RESULT: {line}" for line in run.wrong]
        if args.strict:
            failures += [f"MISSED: {verdict.text}" for verdict in report.judge(run) if not verdict.met]
        if not run.completed:
            failures += [note for note in run.notes if note.startswith(NOT_MEASURED)] or ["not all rows were measured"]
        for line in failures:
            print(line, file=sys.stderr)
        return 1 if failures else 0


def keep(run: Run, earlier: Run) -> None:
    """Take over the rows of an earlier run, each with what its environment had that this one's has not."""
    for row in earlier.rows:
        then = earlier.environment_of(row)
        other = {name: value for name, value in then.items() if run.environment.get(name) != value}
        run.rows.append(Row(**vars(row) | {"environment": other}))
    run.notes += [note for note in earlier.notes if not note.startswith(NOT_MEASURED)]


# Checks of options


def why_unusable(device: str) -> str:
    """Empty if torch can use the device (cpu or cuda), else the error."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        return f"--device is {device}, expected cpu, cuda or cuda:N"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"--device {device}: torch {torch.__version__} finds no CUDA device here"
    return ""


def why_unwritable(path: Path) -> str:
    """Empty if a file can be written to `path`, else the reason why not. Makes the folder."""
    probe = path.with_name(f"{path.name}.probe{os.getpid()}")  # processes of torchrun may call this at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(probe) as aside:
            aside.touch()
        probe.unlink()
    except OSError as error:
        return f"results cannot be written to {path}: {error.strerror}"
    return ""


def not_between(args: Namespace, *names: str, at_least: float = 1, below: float = 2**31) -> str:
    """The error of the first of these options, numbers or lists of numbers, that is out of range; None is valid."""
    for name in names:
        given = getattr(args, name, None)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not at_least <= value < below:
                return f"--{name} is {value}, expected at least {at_least} and less than {below}"
    return ""


def out_of_range(args: Namespace) -> str:
    """The first error of the options that mean the same in every benchmark; empty if they are valid.

    Makes the folders that options name.
    """
    density, rate = getattr(args, "density", 1.0), getattr(args, "learning_rate", 0.0)
    if not 0 < density <= 1:
        return f"--density is {density}, expected more than 0 and at most 1"
    if not 0 <= rate <= torch.finfo(torch.float32).max:
        return f"--learning_rate is {rate}, expected at least 0 and at most the largest fp32 number"
    n_warmup, n_steps = getattr(args, "n_warmup", None), getattr(args, "n_steps", None)
    if n_warmup is not None and n_steps is not None and not 0 <= n_warmup < n_steps:
        return f"--n_steps {n_steps} leaves nothing after --n_warmup {n_warmup}"
    for name in FOLDERS:
        folder = getattr(args, name, None)
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"--{name} {folder}: cannot make this folder: {error.strerror}"
    return (
        not_between(args, *COUNTS)
        or not_between(args, *SIZES, below=2**40)
        or not_between(args, "threads", below=2**12)
        or not_between(args, "seed", at_least=-(2**63), below=2**64)
        or not_between(args, "limit_gib", at_least=sys.float_info.min, below=math.inf)
    )


def one_of_each(name: str, values: Sequence[str], allowed: Sequence[str]) -> str:
    """The error of an option that takes a list, each of ``allowed`` at most once."""
    if not values or set(values) - set(allowed) or len(set(values)) < len(values):
        return f"--{name} {','.join(values)}: expected some of {', '.join(allowed)}, each once"
    return ""


def comma_separated(text: str) -> list[str]:
    """An argparse `type`: the words between commas."""
    return text.split(",")


# Measurements in a process of their own, so that peaks of memory are their own


def run_in_process(
    module: str,
    name: str,
    job: Mapping[str, Any],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    n_ranks: int | None = None,
) -> Any:
    """`python -m module JOB RESULT`: the result of `job_main` there; None, with its message printed, if it failed.

    The files are in `folder`, and the next job replaces them. `name` is the job's, for messages, which go to stderr.
    With `n_ranks`, torchrun starts as many processes, and the result is that of rank 0.
    """
    job_file, result_file = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps({"name": name, "job": job}), encoding="utf-8")
    print(f"{name}: running", file=sys.stderr, flush=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={n_ranks}"]
    command = [sys.executable, *(launcher if n_ranks else []), "-m", module, str(job_file), str(result_file)]
    threads = str(max(1, (os.cpu_count() or 1) // (n_ranks or 1)))  # torchrun would set one, and warn
    environment = {**({"OMP_NUM_THREADS": threads} if n_ranks else {}), **os.environ, **(variables or {})}
    done = subprocess.run(command, check=False, stdout=sys.__stderr__, env=environment)
    if done.returncode != 0:
        print(f"{name}: the run ended with exit code {done.returncode}", file=sys.stderr)
        return None
    return json.loads(result_file.read_text(encoding="utf-8"))


def job_main(run: Callable[[dict[str, Any]], Any], argv: Sequence[str] | None = None) -> int:
    """The other side of `run_in_process`: read the job, run it, write the result, with several ranks that of rank 0."""
    job_file, result_file = map(Path, sys.argv[1:] if argv is None else argv)
    given = json.loads(job_file.read_text(encoding="utf-8"))
    try:
        result = run(given["job"])
    except (SparseOptError, torch.OutOfMemoryError, OSError) as error:
        print(f"sparse-opt: error: {given['name']}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        result_file.write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
    return 0


def limit_memory(device: torch.device, limit_gib: float | None) -> float:
    """Limit torch's allocator on a GPU to `limit_gib` GiB, for this process; return the usable bytes.

    Args:
        limit_gib: None for the whole GPU. On a CPU nothing is limited, and the bytes without a limit are infinite.
    """
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else math.inf
    usable = total if limit_gib is None else min(total, limit_gib * 2**30)
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(usable / total, device)
    return usable
