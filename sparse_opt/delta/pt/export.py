"""Exports steps of a log to `base_state.pt` and `deltas_step_{n}.pt`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...errors import DeltaLogError
from ...files import new_folder, one_line
from ...pt_file import save_pt
from ...tensors import as_bits
from ..state_log import StateLog, step_states
from .files import pt_file_name


def export_pt(
    log: StateLog, steps: Sequence[int], folder: str | Path, *, on_step: Callable[[int], None] | None = None
) -> dict[int, int]:
    """Write `base_state.pt` and one `deltas_step_{n}.pt` per step: fp32 weights, and fp32 differences to them.

    Only floating-point parameters are written, tied ones once, as by the tools that write such files. The folder is
    renamed into place after everything is written. Holds the base, one state and one fp32 difference in memory.

    Returns step -> number of elements whose bits base + difference does not reproduce: see `delta.pt.log`.

    Args:
        steps: logged ones, ascending, after the first.
        folder: missing or empty.

    Raises:
        DeltaLogError: a step is not logged or is the first one, a parameter is fp64, which fp32 does not hold, the log
            is damaged, or the folder cannot be written.
    """
    first = log.steps[0]
    if not steps or min(steps) <= first:
        raise DeltaLogError(f"{log.directory}: steps are {list(steps)}, expected steps after {first}, the base")
    specs = [spec for spec in log.layout.tensors if spec.name not in log.layout.buffers]
    names = [spec.name for spec in specs if getattr(torch, spec.dtype).is_floating_point]
    wide = [spec.name for spec in specs if spec.dtype == "float64"]
    if wide:
        raise DeltaLogError(f"{log.directory}: {wide[0]} is float64, which files of fp32 differences do not hold")
    base: dict[str, Tensor] = {}
    inexact = {}
    try:
        with new_folder(Path(folder)) as aside:
            for step, state in step_states(log, (first, *steps)):
                if not base:
                    base = {name: state[name].to(torch.float32, copy=True) for name in names}
                    _save(base, aside / pt_file_name(0))
                    continue
                differences = {name: state[name].float() - base[name] for name in names}
                _save(differences, aside / pt_file_name(step))
                inexact[step] = sum(_inexact(base[name], differences[name], state[name]) for name in names)
                if on_step is not None:
                    on_step(step)
    except OSError as error:
        raise DeltaLogError(f"{folder}: cannot be written: {one_line(error)}") from error
    return inexact


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_pt(tensors, path)
    except OSError as error:
        raise OSError(f"{path.name}: {one_line(error)}") from error


def _inexact(base: Tensor, difference: Tensor, expected: Tensor) -> int:
    found = (base + difference).to(expected.dtype)
    return int((as_bits(found) != as_bits(expected)).sum())
