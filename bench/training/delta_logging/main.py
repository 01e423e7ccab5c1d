"""Cost of logging every step of a training loop: DPO steps without a log, and with a DeltaLog append after each.

One model trains throughout. Blocks of steps without and with an append alternate. Between them the log writes its
pending steps, which is not timed. A step ends when the device has completed the work on the training's stream; copies
to the host and writes continue after it and delay the next step if they must. The slow-down is the larger of the
differences of means and of medians. The parts of an append are timed separately afterwards, on the change of one step.

Mode dense is full fine-tuning, bf16 with fused AdamW. Mode sparse is SparseAdamW on a random mask, which the log uses.
The target is at most 10 ms a step, on an H200 with the shape of Llama-3.2-3B. Other runs are not judged.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from sparse_opt import DeltaLog, MaskSet, backends
from sparse_opt.cli.parser import CommandParser
from sparse_opt.delta import patches as delta_patches
from sparse_opt.delta.codec.words import LEVELS
from sparse_opt.delta.digest import StateDigest
from sparse_opt.delta.patches import LogMask, MaskedState
from sparse_opt.delta.state import StateReader, read_state
from sparse_opt.delta.writer import HostCopy, StepInfo

from ...common.harness import Benchmark, Report, WrongResult, comma_separated, one_of_each, out_of_range
from ...common.timing import Prepared, measure
from ..baseline.modes import Mode
from .loop import Loop, Memory, file_system, make_loop, make_model
from .report import judge, text

MODES: tuple[Mode, ...] = ("dense", "sparse")
N_WARMUP = 3
N_DURABLE = 3  # appends that are waited for until they are on disk


def options(parser: CommandParser) -> None:
    parser.add_argument("--modes", type=comma_separated, default=list(MODES), help=f"of {','.join(MODES)} (all)")
    parser.add_argument("--directory", type=Path, help="folder to log into (the system's for temporary files)")
    parser.add_argument("--level", default="packed", choices=LEVELS, help="level of the patches (%(default)s)")
    parser.add_argument("--density", type=float, default=0.025, help="density of mode sparse's mask (%(default)s)")
    parser.add_argument("--learning_rate", type=float, default=1e-6, help="in both modes (%(default)s)")
    parser.add_argument("--sequence_length", type=int, default=512, help="tokens (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=1, help="pairs a step (%(default)s)")
    parser.add_argument("--n_blocks", type=int, default=3, help="blocks of either kind (%(default)s)")
    parser.add_argument("--n_steps", type=int, default=10, help="steps of a block (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def problem(args: Namespace) -> str:
    if error := (one_of_each("modes", args.modes, MODES) or out_of_range(args, "sequence_length", at_least=8)):
        return error
    if args.directory is not None and not args.directory.is_dir():
        return f"--directory {args.directory}: no such folder"
    cause = backends.why_unavailable(torch.device(args.device).type, args.device)
    return f"patches cannot be coded natively on {args.device}: {cause}" if cause else ""


def run(args: Namespace, report: Report) -> None:
    """Measure each mode; what was measured before an error is in the report."""
    device = torch.device(args.device)
    names = ("small", "modes", "level", "density", "learning_rate", "sequence_length", "batch_size", "n_blocks")
    report["settings"] = {name: getattr(args, name) for name in (*names, "n_steps", "seed")}
    rows = report.setdefault("rows", [])
    try:
        for mode in (mode for mode in MODES if mode in args.modes):
            with tempfile.TemporaryDirectory(prefix="sparse_opt_delta_logging_", dir=args.directory) as folder:
                report["file_system"] = file_system(Path(folder))
                rows.append(_run(mode, Path(folder), args, device))
            _free(device)
    finally:
        report["targets"] = [verdict.as_dict() for verdict in judge(report)]


@dataclass
class _Times:
    """Seconds of each timed step; `append`: the part that the host spent in `DeltaLog.append`."""

    plain: list[float] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    append: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)  # of `flush` after each block


def _run(mode: Mode, folder: Path, args: Namespace, device: torch.device) -> dict[str, Any]:
    """Measure one mode; return plain data."""
    model, mask = make_model(args, device), None
    mask_file = folder / "mask.safetensors"
    if mode == "sparse":
        mask = MaskSet.random(model, density=args.density, seed=args.seed)
        mask.save(mask_file)
    loop = make_loop(mode, model, mask_file, args, device)
    memory = Memory(device)
    memory.reset()
    with tqdm(total=2 * args.n_blocks, desc=f"bench delta_logging, {mode}", disable=None, leave=False) as bar:
        for _ in range(N_WARMUP):
            loop.run()
        plain_memory = memory.peaks()

        began = time.perf_counter()
        log = DeltaLog.create(folder / "log", model, level=args.level, mask=mask)
        create_s = time.perf_counter() - began
        with log:
            times, infos = _blocks(loop, log, memory, args, bar)
            logged_memory = memory.peaks()
            durable = [_durable(loop, log) for _ in range(N_DURABLE)]
            if (found := log.step_of(model)) != log.last_step:
                raise WrongResult(f"mode {mode}: the model has the weights of step {found}, logged {log.last_step}")
    layout, _ = read_state(model)
    parts = _parts(loop, model, mask, args.level, device)
    steps = infos[-args.n_blocks * args.n_steps :]
    return {
        "mode": mode,
        "numel": layout.numel,
        "state_bytes": layout.nbytes,
        "mask_nnz": None if mask is None else mask.nnz,
        "plain_ms": _statistics(times.plain),
        "logged_ms": _statistics(times.logged),
        "slower_mean_ms": 1e3 * (statistics.mean(times.logged) - statistics.mean(times.plain)),
        "slower_median_ms": 1e3 * (statistics.median(times.logged) - statistics.median(times.plain)),
        "append_host_ms": _statistics(times.append),
        "behind_s": max(times.behind),  # the longest that the log took to catch up after a block
        "create_s": create_s,
        "steps": [
            {"kind": info.kind, "masked": info.masked, "changed": info.changed, "bytes": info.bytes} for info in steps
        ],
        "bytes_per_step": statistics.mean(info.bytes for info in steps),
        "share_changed": statistics.mean(info.share or 0.0 for info in steps),
        # While nothing else runs: from `append` until the step is on disk.
        "on_disk_ms": _statistics([seconds for seconds, _ in durable]),
        "on_disk_bytes_per_s": statistics.median(info.bytes / seconds for seconds, info in durable),
        "peaks": {"plain": plain_memory, "logged": logged_memory},
        "parts": parts,
    }


def _blocks(loop: Loop, log: DeltaLog, memory: Memory, args: Namespace, bar: tqdm) -> tuple[_Times, list[StepInfo]]:
    times, appended = _Times(), []

    def append(step: int) -> None:
        began = time.perf_counter()
        appended.append(log.append(step))
        times.append.append(time.perf_counter() - began)

    def catch_up() -> None:
        began = time.perf_counter()
        log.flush()
        times.behind.append(time.perf_counter() - began)

    for _ in range(N_WARMUP):
        loop.run(append)
    catch_up()
    memory.reset()
    times.append.clear()
    times.behind.clear()
    for _ in range(args.n_blocks):
        times.plain += [loop.run() for _ in range(args.n_steps)]
        bar.update()
        # Log the change of this block, so that each timed step logs only its own change.
        log.append(loop.n_done)
        log.flush()
        times.logged += [loop.run(append) for _ in range(args.n_steps)]
        catch_up()
        bar.update()
    return times, [one.wait() for one in appended]


def _durable(loop: Loop, log: DeltaLog) -> tuple[float, StepInfo]:
    """Seconds from an append, on an idle machine, until the step is on disk."""
    loop.run()
    began = time.perf_counter()
    info = log.append(loop.n_done).wait()
    return time.perf_counter() - began, info


def _parts(
    loop: Loop, model: nn.Module, mask: MaskSet | None, level: str, device: torch.device
) -> dict[str, dict[str, Any]]:
    """The parts of an append, each timed separately on the change of one step."""
    layout, tensors = read_state(model)
    old = {name: tensor.clone() for name, tensor in tensors.items()}
    loop.run()
    layout, new = read_state(model)
    masked = None if mask is None else MaskedState(LogMask(mask), layout, old)
    shadow = {name: tensor.clone() for name, tensor in old.items()}
    patch = delta_patches.encode(layout, old, new, level, None, masked=masked)
    reader = StateReader(layout)

    def restore() -> None:
        delta_patches.copy_(shadow, old, layout.names)

    def advance_shadow() -> None:
        delta_patches.encode(layout, shadow, new, level, None, advance=True)

    variants: dict[str, Callable[[], object]] = {
        "read the state": lambda: reader.read(model, "bench"),
        "encode": lambda: delta_patches.encode(layout, old, new, level, None),
        "encode, and advance the shadow": Prepared(restore, advance_shadow),
        "digests": lambda: StateDigest.start([new[name] for name in layout.names]),
        "copy to the host": lambda: HostCopy(patch.parts()).result(),
    }
    if masked is not None:
        variants["encode, over the mask"] = lambda: masked.encode(new, level, None, advance=False)
    return {name: timing.as_dict() for name, timing in measure(variants, device=device, n_rounds=10).items()}


def _statistics(seconds: Sequence[float]) -> dict[str, Any]:
    """Milliseconds: mean, median, the largest, and each."""
    ms = [1e3 * value for value in seconds]
    return {"mean": statistics.mean(ms), "median": statistics.median(ms), "max": max(ms), "each": ms}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


main = Benchmark(
    name="delta_logging",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=run,
    text=text,
    failures=lambda report, args: [f"MISSED: {verdict.text}" for verdict in judge(report) if not verdict.met],
    output="bench/results/delta_logging_{device}.json",
    device="cuda",
).main

if __name__ == "__main__":
    sys.exit(main())
