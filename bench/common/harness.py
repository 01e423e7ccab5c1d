"""`Benchmark`: the command line of a benchmark, and everything that all benchmarks have in common.

A benchmark declares its options, fills a report, and turns it into text. The harness parses the command line, checks
the device and the output file before any work, describes the environment, writes the report as JSON (also what was
measured before an error), prints the text, and returns the exit code: 0 done, 1 a wrong result or a missed target, 2 a
wrong command line (as `SystemExit`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparse_opt.cli.parser import CommandParser
from sparse_opt.errors import ConfigError, SparseOptError

from .environment import environment
from .report import why_unwritable, write_json

Report = dict[str, Any]

# Options whose numbers are checked in every benchmark that has them.
SIZES = ("numel", "delta_numel", "peer_numel", "model_numel")
COUNTS = (
    "n_rounds",
    "n_steps",
    "sft_steps",
    "n_blocks",
    "batch_size",
    "gradient_accumulation_steps",
    "sequence_length",
    "max_new_tokens",
    "subset_size",
    "hidden_size",
    "n_layers",
    "lora_rank",
    "shira_rank",
)


class WrongResult(AssertionError):
    """A result is wrong, so it must not be timed."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark; `main` is its command line.

    Args:
        name: name in the report.
        command: the command that runs it, by default `sparse-opt bench NAME`.
        doc: description in the help: the docstring of the module.
        options: adds the benchmark's own options.
        problem: checks the options before any work, after `numbers_out_of_range`; returns the error, or "".
        measure: fills the report. It may raise `WrongResult`.
        text: the report for a terminal.
        failures: lines for stderr after the text. If there are any, the exit code is 1.
        partial: whether the options leave out a part without which a run is not complete.
        output: default results file, which may contain options in braces and `{device}` (cpu or gpu); None writes none.
        device: default of --device, perhaps `auto`; None adds no option. With the option `--small`, a benchmark that
            has it runs on the CPU.
        threads: default of --threads, which applies to torch during the run; None adds no option.
    """

    name: str
    doc: str | None
    measure: Callable[[Namespace, Report], None]
    text: Callable[[Report], str]
    options: Callable[[CommandParser], object] = lambda parser: None
    problem: Callable[[Namespace], str] = lambda args: ""
    failures: Callable[[Report, Namespace], Sequence[str]] = lambda report, args: ()
    partial: Callable[[Namespace], bool] = lambda args: False
    command: str | None = None
    epilog: str | None = None
    output: str | None = None
    device: str | None = None
    threads: int | None = None

    def parser(self) -> CommandParser:
        """The options of all benchmarks, and this one's own."""
        command = self.command or f"sparse-opt bench {self.name}"
        parser = CommandParser(prog=command, description=self.doc, epilog=self.epilog)
        self.options(parser)
        if self.device is not None:
            parser.add_argument("--device", default=self.device, help="cpu, cuda, cuda:N or auto (%(default)s)")
        if self.threads is not None:
            parser.add_argument("--threads", type=int, default=self.threads, help="CPU threads (%(default)s)")
        shown = self.output or "default: none is written"
        names = ("--output", "--json", "--results")
        parser.add_argument(*names, dest="output", type=Path, metavar="FILE", help=f"results as JSON ({shown})")
        return parser

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the benchmark; return 0 if every result is right and every target met, else 1."""
        return exit_code(lambda: self._run(sys.argv[1:] if argv is None else argv))

    def _problem(self, args: Namespace) -> str:
        """The first error of the options; empty if they are valid."""
        if getattr(args, "small", False):
            args.device = "cpu"
        if self.device is not None and args.device == "auto":
            args.device = _best_device()
        if self.device is not None and (problem := why_unusable(args.device)):
            return problem + ("; --small runs on a CPU" if hasattr(args, "small") else "")
        if problem := numbers_out_of_range(args) or self.problem(args):
            return problem
        if args.output is None and self.output is not None:
            on_gpu = str(getattr(args, "device", "cpu")).startswith("cuda")
            names = vars(args) | {"device": "gpu" if on_gpu else "cpu"}
            args.output = Path(self.output.format(**names))
        return "" if args.output is None else why_unwritable(args.output)

    def arguments(self, words: Sequence[str]) -> Namespace:
        """The options of a command line, checked; `SystemExit` if it is wrong."""
        parser = self.parser()
        args = parser.parse_words(words)
        if problem := self._problem(args):
            parser.error(problem)
        return args

    def _run(self, words: Sequence[str]) -> int:
        args = self.arguments(words)
        device = getattr(args, "device", None) or _best_device()
        report: Report = {"benchmark": self.name, "environment": environment(device), "completed": False}
        n_described = len(report)
        threads = torch.get_num_threads()
        torch.set_num_threads(args.threads if self.threads is not None else threads)
        try:
            self.measure(args, report)
            report["completed"] = not self.partial(args)
        finally:
            torch.set_num_threads(threads)
            if args.output is not None and len(report) > n_described:  # something was measured
                write_json(args.output, report)
        print(self.text(report))
        if args.output is not None:
            print(f"\nresults: {args.output}")
        failures = self.failures(report, args)
        for line in failures:
            print(line, file=sys.stderr)
        return 1 if failures else 0


def exit_code(run: Callable[[], int]) -> int:
    """Run a command line, print its errors in one line, and return its exit code; `SystemExit` if it is wrong."""
    try:
        return run()
    except ConfigError as error:
        print(f"sparse-opt: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    except WrongResult as error:
        print(f"WRONG RESULT: {error}", file=sys.stderr)
    except SparseOptError as error:
        if os.environ.get("SPARSE_OPT_DEBUG") == "1":
            raise
        print(f"sparse-opt: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


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


def out_of_range(args: Namespace, *names: str, at_least: int = 1, below: int = 2**31) -> str:
    """The error of the first of these options, numbers or lists of numbers, that is out of range; None is valid."""
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not at_least <= value < below:
                return f"--{name} is {value}, expected at least {at_least} and less than {below}"
    return ""


def numbers_out_of_range(args: Namespace) -> str:
    """The first error of the numbers that mean the same in every benchmark; empty if they are valid."""

    def wrong(*names: str, at_least: int = 1, below: int = 2**31) -> str:
        return out_of_range(args, *(name for name in names if hasattr(args, name)), at_least=at_least, below=below)

    density, rate = getattr(args, "density", 1.0), getattr(args, "learning_rate", 0.0)
    if not 0 < density <= 1:
        return f"--density is {density}, expected more than 0 and at most 1"
    if not 0 <= rate <= torch.finfo(torch.float32).max:
        return f"--learning_rate is {rate}, expected at least 0 and at most the largest fp32 number"
    return (
        wrong(*COUNTS)
        or wrong(*SIZES, below=2**40)
        or wrong("threads", below=2**12)
        or wrong("seed", "seeds", at_least=-(2**63), below=2**64)
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
    n_ranks: int = 1,
) -> dict[str, Any] | None:
    """`python -m module JOB RESULT`: the result of `job_main` there; None, with its message printed, if it failed.

    The files are in `folder`, and the next job replaces them. `name` is the job's, for messages, which go to stderr.
    With several ranks, torchrun starts as many processes, and the result is that of rank 0.
    """
    job_file, result_file = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps({"name": name, "job": job}), encoding="utf-8")
    print(f"{name}: running", file=sys.stderr, flush=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={n_ranks}"]
    command = [sys.executable, *(launcher if n_ranks > 1 else []), "-m", module, str(job_file), str(result_file)]
    threads = str(max(1, (os.cpu_count() or 1) // n_ranks))  # torchrun would set one, and warn
    environment = {**({"OMP_NUM_THREADS": threads} if n_ranks > 1 else {}), **os.environ, **(variables or {})}
    done = subprocess.run(command, check=False, stdout=sys.__stderr__, env=environment)
    if done.returncode != 0:
        print(f"{name}: the run ended with exit code {done.returncode}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return result


def job_main(run: Callable[[dict[str, Any]], dict[str, Any]], argv: Sequence[str] | None = None) -> int:
    """The other side of `run_in_process`: read the job, run it, write the result, with several ranks that of rank 0."""
    job_file, result_file = map(Path, sys.argv[1:] if argv is None else argv)
    given = json.loads(job_file.read_text(encoding="utf-8"))
    try:
        result = run(given["job"])
    except (SparseOptError, torch.OutOfMemoryError, OSError) as error:
        print(f"sparse-opt: error: {given['name']}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        write_json(result_file, {"job": given["job"], **result})
    return 0
