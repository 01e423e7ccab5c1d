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
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
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
from sparse_opt.trainers.data.encoding import TokenBatch, TokenSequence, collate
from sparse_opt.trainers.policy.models import disable_dropout, make_masks_skippable

from ..common.harness import Benchmark, Report, WrongResult, comma_separated, one_of_each, out_of_range
from ..common.report import Columns, machine_line, render
from ..common.shapes import LLAMA_3_2_3B_SIZES, random_model
from ..common.timing import Prepared, measure
from ..kernels.targets import Verdict
from .baseline.inputs import SMALL, word_tokenizer, words_config
from .baseline.run import Job, Mode, Sections, Step, dpo_step, prepare

MODES: tuple[Mode, ...] = ("dense", "sparse")
LIMIT_MS = 10.0
N_BATCHES = 8
N_WARMUP = 3
N_DURABLE = 3  # appends that are waited for until they are on disk
_FIRST_WORD, _N_WORDS = 3, 1000  # token ids of `word_tokenizer`

COLUMNS: Columns = {
    "mode": "{mode}",
    "ms a step": "{plain_ms[median]:.2f}",
    "logged": "{logged_ms[median]:.2f}",
    "slower by, mean": "{slower_mean_ms:.2f}",
    "median": "{slower_median_ms:.2f}",
    "append, host": "{append_host_ms[median]:.2f}",
    "changed": "{share_changed:.2%}",
    "MB a step": lambda row: f"{row['bytes_per_step'] / 1e6:.2f}",
    "behind": "{behind_s:.2f} s",
}
PART_COLUMNS: Columns = {
    "mode": "{mode}",
    "part of an append": "{part}",
    "ms": "{ms:.2f}",
    "host ms": "{host_ms:.2f}",
    "wall ms": "{wall_ms:.2f}",
}


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
    if error := (
        one_of_each("modes", args.modes, MODES)
        or out_of_range(args, "n_blocks", "n_steps", "batch_size")
        or out_of_range(args, "sequence_length", at_least=8)
    ):
        return error
    if not 0 < args.density <= 1:
        return f"--density is {args.density}, expected more than 0 and at most 1"
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


@dataclass
class Loop:
    """A training loop that can log."""

    step: Step
    section: Sections
    device: torch.device
    n_done: int = 0

    def run(self, append: Callable[[int], object] | None = None) -> float:
        """One step, and `append` with its number; the seconds until the training's stream has completed it."""
        began = time.perf_counter()
        metrics = self.step(self.n_done % N_BATCHES)
        self.n_done += 1
        if append is not None:
            append(self.n_done)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        seconds = time.perf_counter() - began
        self.section.read()
        loss = metrics["loss"].item()
        if not loss == loss:
            raise WrongResult(f"step {self.n_done}: the loss is {loss}")
        return seconds


def _run(mode: Mode, folder: Path, args: Namespace, device: torch.device) -> dict[str, Any]:
    """Measure one mode; return plain data."""
    model, mask = _model(args, device), None
    mask_file = folder / "mask.safetensors"
    if mode == "sparse":
        mask = MaskSet.random(model, density=args.density, seed=args.seed)
        mask.save(mask_file)
    loop = _loop(mode, model, mask_file, args, device)
    memory = _Memory(device)
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


def _blocks(loop: Loop, log: DeltaLog, memory: _Memory, args: Namespace, bar: tqdm) -> tuple[_Times, list[StepInfo]]:
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


def _model(args: Namespace, device: torch.device) -> nn.Module:
    """A Llama with random bf16 weights, prepared like by `trainers.policy.models.load_policy`."""
    config = words_config(SMALL if args.small else LLAMA_3_2_3B_SIZES, args.sequence_length)
    model = random_model(config, device, args.seed)
    disable_dropout(model)
    make_masks_skippable(model)
    return model.train()


def _loop(mode: Mode, model: nn.Module, mask_file: Path, args: Namespace, device: torch.device) -> Loop:
    job = Job(
        algorithm="dpo",
        mode=mode,
        model_name="random weights",
        dataset="random words",
        mask=str(mask_file),
        sequence_length=args.sequence_length,
        n_steps=N_BATCHES,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        device=str(device),
        seed=args.seed,
    )
    section = Sections(device)
    return Loop(dpo_step(prepare(job, model), _batches(args, device), section), section, device)


def _batches(args: Namespace, device: torch.device) -> list[TokenBatch]:
    """Pairs of random words of exact length; the prompt is an eighth of the sequence."""
    source, tokenizer = random.Random(args.seed), word_tokenizer()
    length, n_prompt = args.sequence_length, args.sequence_length // 8

    def words(count: int) -> list[int]:
        return [_FIRST_WORD + source.randrange(_N_WORDS) for _ in range(count)]

    def batch() -> TokenBatch:
        prompts = [words(n_prompt) for _ in range(args.batch_size)]
        completions = [
            TokenSequence([*prompt, *words(length - n_prompt - 1), tokenizer.eos_token_id], n_prompt)
            for prompt in 2 * prompts  # the chosen ones before the rejected
        ]
        return collate(completions, tokenizer.pad_token_id).to(device)

    return [batch() for _ in range(N_BATCHES)]


@dataclass(frozen=True)
class _Memory:
    """Peaks of the device's memory and of pinned host memory; nothing on a CPU."""

    device: torch.device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            torch.cuda.memory.reset_peak_host_memory_stats()

    def peaks(self) -> dict[str, int | None]:
        if self.device.type != "cuda":
            return {"device_bytes": None, "pinned_bytes": None}
        # Versions of torch count blocks in use, or all blocks of the allocator. Take the largest.
        pinned = [n for key, n in torch.cuda.memory.host_memory_stats().items() if key.endswith("bytes.peak")]
        return {"device_bytes": torch.cuda.max_memory_allocated(self.device), "pinned_bytes": max(pinned)}


def file_system(path: Path) -> str:
    """The type of the file system that a path is on, as /proc/mounts names it: `ext4`, `tmpfs`; empty if unknown."""
    mounts = Path("/proc/mounts")
    if not mounts.is_file():
        return ""
    found = (Path("/"), "")
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split(" ")
        where = Path(point.replace("\\040", " "))
        # A later mount on the same point hides an earlier one.
        if path.resolve().is_relative_to(where) and len(where.parts) >= len(found[0].parts):
            found = (where, kind)
    return found[1]


def judge(report: Mapping[str, Any]) -> list[Verdict]:
    """The verdict of each mode, on a GPU and at the 3B shape."""
    if report["settings"]["small"] or "gpu" not in report["environment"]["machine"]:
        return []
    return [
        Verdict(
            f"a log of every step, mode {row['mode']}",
            "cuda",
            None,
            "ms a step",
            max(row["slower_mean_ms"], row["slower_median_ms"]),
            LIMIT_MS,
            True,
        )
        for row in report["rows"]
    ]


def tables(report: Mapping[str, Any], *, markdown: bool = False) -> list[str]:
    """The tables: each mode, and the parts of an append."""
    parts = [
        {"mode": row["mode"], "part": name, **part} for row in report["rows"] for name, part in row["parts"].items()
    ]
    return [
        render(COLUMNS, report["rows"], markdown=markdown),
        "",
        render(PART_COLUMNS, parts, n_words=2, markdown=markdown),
        *([""] if markdown else []),
        *memory_lines(report),
    ]


def text(report: Report) -> str:
    where = f"{machine_line(report)}; level {report['settings']['level']}, file system {report['file_system']}"
    return "\n".join([where, *tables(report)])


def memory_lines(report: Mapping[str, Any]) -> list[str]:
    """How long a step takes to the disk, and what memory the log adds, as a list of each mode."""
    lines = []
    for row in report["rows"]:
        peaks = row["peaks"]
        lines.append(
            f"- {row['mode']}: on disk {row['on_disk_ms']['median']:.1f} ms after the append, "
            f"{row['on_disk_bytes_per_s'] / 1e6:.0f} MB/s; the base took {row['create_s']:.1f} s"
        )
        if peaks["plain"]["device_bytes"] is not None:
            more = {key: peaks["logged"][key] - peaks["plain"][key] for key in peaks["plain"]}
            lines.append(
                f"- {row['mode']}: the log adds {more['device_bytes'] / 2**30:.2f} GiB to the device's peak of "
                f"{peaks['plain']['device_bytes'] / 2**30:.2f} GiB (a state is {row['state_bytes'] / 2**30:.2f}), and "
                f"{more['pinned_bytes'] / 2**20:.0f} MiB of pinned memory"
            )
    return lines


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
    output="bench/results/delta_logging{_cpu}.json",
    device="cuda",
).main

if __name__ == "__main__":
    sys.exit(main())
