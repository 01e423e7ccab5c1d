"""Cost of logging every step of a training loop: DPO steps without a log, and with a DeltaLog append after each.

One model trains throughout. Blocks of steps without and with an append alternate. Between them the log writes its
pending steps, which is not timed. A step ends when the device has completed the work on the training's stream; copies
to the host and writes continue after it and delay the next step if they must.

Modes are those of `sparse-opt bench baseline`: dense, adamw8bit and galore are full fine-tuning; sparse and tiles are
SparseAdamW on a random mask, which the log uses.
"""

from __future__ import annotations

import gc
import math
import statistics
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sparse_opt import DeltaLog, MaskSet, backends
from sparse_opt.cli.parser import CommandParser
from sparse_opt.delta.codec.words import LEVELS
from sparse_opt.delta.state import read_state
from sparse_opt.delta.writer import StepInfo
from sparse_opt.trainers.models import make_masks_skippable

from ..harness import Benchmark, WrongResult, comma_separated, not_between, one_of_each
from ..models import make_model, model_config
from ..rows import Case, Row, Run
from .baseline.inputs import random_pairs
from .baseline.modes import Job, Mode, prepare
from .baseline.peers import missing_package
from .baseline.run import Step, dpo_steps

SUITE = "delta_logging"
MODES: tuple[Mode, ...] = ("dense", "adamw8bit", "galore", "sparse", "tiles")
PATTERNS = {"sparse": "element", "tiles": "tile64"}
N_WARMUP = 3
N_DURABLE = 3  # appends that are waited for until they are on disk
N_BATCHES = 8
# What the cases of all rows have.
SETTINGS = ("small", "level", "density", "learning_rate", "sequence_length", "batch_size", "seed")


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--modes", type=comma_separated, default=["dense", "sparse"], help=f"of {','.join(MODES)} (dense,sparse)"
    )
    what.add_argument("--work_dir", type=Path, help="folder to log into (the system's for temporary files)")
    what.add_argument("--level", default="packed", choices=LEVELS, help="level of the patches (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="density of the masks (%(default)s)")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="in every mode (%(default)s)")
    what.add_argument("--sequence_length", type=int, default=512, help="tokens (%(default)s)")
    what.add_argument("--batch_size", type=int, default=1, help="pairs a step (%(default)s)")
    what.add_argument("--n_blocks", type=int, default=3, help="blocks of either kind (%(default)s)")
    what.add_argument("--n_steps", type=int, default=10, help="steps of a block (%(default)s)")
    what.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")
    what.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def problem(args: Namespace) -> str:
    if error := (one_of_each("modes", args.modes, MODES) or not_between(args, "sequence_length", at_least=8)):
        return error
    if error := missing_package(args.modes):
        return error
    cause = backends.why_unavailable(torch.device(args.device).type, args.device)
    return f"patches cannot be coded natively on {args.device}: {cause}" if cause else ""


def measure(args: Namespace, run: Run) -> None:
    """Measure each mode."""
    device = torch.device(args.device)
    for mode in (mode for mode in MODES if mode in args.modes):
        with tempfile.TemporaryDirectory(prefix="sparse_opt_delta_logging_", dir=args.work_dir) as folder:
            disk = subprocess.run(["df", "--output=fstype", folder], capture_output=True, text=True, check=True)
            case = {"mode": mode, **{name: getattr(args, name) for name in SETTINGS}}
            _measure(run, case | {"file_system": disk.stdout.split()[-1]}, mode, Path(folder), args, device)
        run.save()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(run: Run, case: Case, mode: Mode, folder: Path, args: Namespace, device: torch.device) -> None:
    """Measure one mode, and add its rows."""
    config = model_config("tiny" if args.small else "3b", args.sequence_length)
    model, mask = make_model(config, device, args.seed).train(), None
    make_masks_skippable(model)
    mask_file = folder / "mask.safetensors"
    if mode in PATTERNS:
        mask = MaskSet.random(model, density=args.density, pattern=PATTERNS[mode], seed=args.seed)
        mask.save(mask_file)
    job = Job(
        algorithm="dpo",
        mode=mode,
        model_name="random weights",
        dataset="random tokens",
        mask=str(mask_file),
        sequence_length=args.sequence_length,
        n_steps=N_BATCHES,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        device=str(device),
        seed=args.seed,
    )
    batches = [
        random_pairs(args.batch_size, args.sequence_length, config.vocab_size, args.seed + i).to(device)
        for i in range(N_BATCHES)
    ]
    loop = _Loop(dpo_steps(prepare(job, model), batches), device)
    _reset_peaks(device)
    for _ in range(N_WARMUP):
        loop.run()
    plain_peaks = _peaks(device)
    began = time.perf_counter()
    with DeltaLog.create(folder / "log", model, level=args.level, mask=mask) as log:
        create_s = time.perf_counter() - began
        samples, behind, steps = _blocks(loop, log, args)
        logged_peaks, samples["on disk"] = _peaks(device), []
        for _ in range(N_DURABLE):  # from an append, on an idle machine, until it is on disk
            loop.run()
            began = time.perf_counter()
            log.append(loop.n_done).wait()
            samples["on disk"].append(1e3 * (time.perf_counter() - began))
        if (found := log.step_of(model)) != log.last_step:
            raise WrongResult(f"mode {mode}: the model has the weights of step {found}, logged {log.last_step}")

    def add(metric: str, unit: str, value: float) -> None:
        run.add(Row(suite=SUITE, case=case, metric=metric, unit=unit, value=value, n=len(steps)))

    for metric, values in samples.items():
        run.add(Row.of_samples(values, suite=SUITE, case=case, metric=metric, unit="ms"))
    for name, middle in (("mean", statistics.mean), ("median", statistics.median)):
        add(f"slower by, {name}", "ms", middle(samples["logged step"]) - middle(samples["step"]))
    add("behind", "ms", max(behind))  # the longest that the log took to catch up after a block
    add("base", "s", create_s)
    add("changed", "share", statistics.mean(info.share or 0.0 for info in steps))
    add("a step in the log", "bytes", statistics.mean(info.bytes for info in steps))
    add("state", "bytes", read_state(model)[0].nbytes)
    for name, before in plain_peaks.items():
        add(f"{name}, without a log", "bytes", before)
        add(f"{name}, added by the log", "bytes", logged_peaks[name] - before)


# The loop


@dataclass
class _Loop:
    """A training loop that can log."""

    step: Step
    device: torch.device
    n_done: int = 0

    def run(self, append: Callable[[int], object] | None = None) -> float:
        """One step, and `append` with its number; the milliseconds until the training's stream has completed it."""
        began = time.perf_counter()
        metrics = self.step(self.n_done % N_BATCHES)
        self.n_done += 1
        if append is not None:
            append(self.n_done)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        ms = 1e3 * (time.perf_counter() - began)
        if not math.isfinite(loss := metrics["loss"].item()):
            raise WrongResult(f"step {self.n_done}: the loss is {loss}")
        return ms


def _blocks(loop: _Loop, log: DeltaLog, args: Namespace) -> tuple[dict[str, list[float]], list[float], list[StepInfo]]:
    """Alternating blocks of steps without and with an append.

    Returns:
        Milliseconds of each step, by kind, and of the host in each append; of `flush` after each block; and what was
        logged.
    """
    plain: list[float] = []
    logged: list[float] = []
    append_ms: list[float] = []
    behind: list[float] = []
    appended = []

    def append(step: int) -> None:
        began = time.perf_counter()
        appended.append(log.append(step))
        append_ms.append(1e3 * (time.perf_counter() - began))

    for _ in range(N_WARMUP):
        loop.run(append)
    log.flush()
    _reset_peaks(loop.device)
    append_ms.clear()
    appended.clear()
    for i in range(args.n_blocks):
        plain += [loop.run() for _ in range(args.n_steps)]
        # Log the change of this block, so that each timed step logs only its own change.
        log.append(loop.n_done)
        log.flush()
        logged += [loop.run(append) for _ in range(args.n_steps)]
        began = time.perf_counter()
        log.flush()
        behind.append(1e3 * (time.perf_counter() - began))
        print(f"block {i + 1} of {args.n_blocks}", flush=True)
    samples = {"step": plain, "logged step": logged, "append, host": append_ms}
    return samples, behind, [one.wait() for one in appended]


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.memory.reset_peak_host_memory_stats()


def _peaks(device: torch.device) -> dict[str, int]:
    """Peaks of the device's memory and of pinned host memory; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    # Versions of torch count blocks in use, or all blocks of the allocator. Take the largest.
    pinned = [n for key, n in torch.cuda.memory.host_memory_stats().items() if key.endswith("bytes.peak")]
    return {"peak memory": torch.cuda.max_memory_allocated(device), "pinned memory": max(pinned)}


main = Benchmark(
    name="delta_logging",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    output="bench/results/delta_logging_{device}.json",
    device="cuda",
).main
