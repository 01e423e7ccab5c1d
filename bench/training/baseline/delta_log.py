"""The cost of logging every step (`--delta_log`): DPO steps without a log, and with a DeltaLog append after each.

One model trains throughout. Blocks of steps without and with an append alternate. Between them the log writes its
pending steps, which is not timed. A step ends when the device has completed the work on the training's stream; copies
to the host and writes continue after it and delay the next step if they must.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.delta.state import read_state
from sparse_opt.delta.writer import StepInfo
from sparse_opt.errors import SparseOptError
from sparse_opt.trainers.modes import Trained

from ...rows import Case, Row
from .modes import Job, n_tiled

SUITE = "delta_logging"
MODES = ("dense", "adamw8bit", "galore", "sparse", "tiles")
N_BLOCKS = 3  # of either kind, each of n_steps
N_DURABLE = 3  # appends that are waited for until they are on disk


@dataclass
class Loop:
    """A training loop that can log."""

    step: Callable[[int], dict[str, Tensor]]
    job: Job
    device: torch.device
    n_done: int = 0

    def run(self, append: Callable[[int], object] | None = None) -> float:
        """One step, and `append` with its number; the milliseconds until the training's stream has completed it."""
        began = time.perf_counter()
        self.step(self.n_done % self.job.n_steps)
        self.n_done += 1
        if append is not None:
            append(self.n_done)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return 1e3 * (time.perf_counter() - began)


def measure_logging(
    job: Job, trained: Trained, mask: MaskSet | None, step: Callable[[int], dict[str, Tensor]], device: torch.device
) -> dict[str, Any]:
    """Train with and without a log in the folder `job.delta_log`; return milliseconds of steps, and other values."""
    folder = Path(str(job.delta_log))
    disk = subprocess.run(["df", "--output=fstype", folder.parent], capture_output=True, text=True, check=True)
    loop, model = Loop(step, job, device), trained.policy
    first = {name: value.item() for name, value in step(0).items()}
    _reset_peaks(device)
    for _ in range(job.n_warmup):
        loop.run()
    plain_peaks = _peaks(device)
    began = time.perf_counter()
    with DeltaLog.create(folder, model, mask=mask) as log:
        create_s = time.perf_counter() - began
        samples, behind, logged = _blocks(loop, log)
        logged_peaks, samples["on disk"] = _peaks(device), []
        for _ in range(N_DURABLE):  # from an append, on an idle machine, until it is on disk
            loop.run()
            began = time.perf_counter()
            log.append(loop.n_done).wait()
            samples["on disk"].append(1e3 * (time.perf_counter() - began))
        if (found := log.step_of(model)) != log.last_step:
            raise SparseOptError(f"the model has the weights of step {found}, logged {log.last_step}")
    values = [
        *(("behind", "ms", max(behind)), ("base", "s", create_s)),
        ("changed", "share", statistics.mean(info.share or 0.0 for info in logged)),
        ("a step in the log", "bytes", statistics.mean(info.bytes for info in logged)),
        ("state", "bytes", read_state(model)[0].nbytes),
    ]
    for name, before in plain_peaks.items():
        values.append((f"{name}, without a log", "bytes", before))
        values.append((f"{name}, added by the log", "bytes", logged_peaks[name] - before))
    facts = {"steps": [first], "n_tiled": n_tiled(trained), "n_logged": len(logged)}
    return {"samples": samples, "values": values, "file_system": disk.stdout.split()[-1], **facts}


def _blocks(loop: Loop, log: DeltaLog) -> tuple[dict[str, list[float]], list[float], list[StepInfo]]:
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

    for _ in range(loop.job.n_warmup):
        loop.run(append)
    log.flush()
    _reset_peaks(loop.device)
    append_ms.clear()
    appended.clear()
    for _ in range(N_BLOCKS):
        plain += [loop.run() for _ in range(loop.job.n_steps)]
        # Log the change of this block, so that each timed step logs only its own change.
        log.append(loop.n_done)
        log.flush()
        logged += [loop.run(append) for _ in range(loop.job.n_steps)]
        began = time.perf_counter()
        log.flush()
        behind.append(1e3 * (time.perf_counter() - began))
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


def logging_rows(result: Mapping[str, Any], case: Case) -> list[Row]:
    """The rows of a mode that was logged."""
    samples = result["samples"]
    case = case | {"file_system": result["file_system"]}
    shared: dict[str, Any] = {"suite": SUITE, "case": case}
    rows = [Row.of_samples(values, **shared, metric=name, unit="ms") for name, values in samples.items()]
    values = list(result["values"])
    for name, middle in (("mean", statistics.mean), ("median", statistics.median)):
        values.append((f"slower by, {name}", "ms", middle(samples["logged step"]) - middle(samples["step"])))
    return rows + [Row(**shared, metric=m, unit=unit, value=v, n=result["n_logged"]) for m, unit, v in values]
