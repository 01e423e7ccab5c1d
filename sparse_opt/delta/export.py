"""Exports steps of a log to files that other programs read, and rewrites logs.

    export_state    the whole state, dense: one safetensors file, as `safetensors.torch.load_file` and loaders of
                    checkpoints read it
    export_values   the changes since another step: flat positions and new values, one safetensors file

`export_values` writes for each tensor that changed

    {name}.indices  int32 (int64 from 2**31 elements on) [changed], flat positions in row-major order, ascending
    {name}.values   the tensor's dtype [changed], the new values, bit for bit

These are the keys of grail's sparse updates (https://github.com/one-covenant/grail, `apply_sparse_delta`), and per
tensor the fields of vLLM's `CheckpointWeightPatch` (https://docs.vllm.ai/en/latest/api/vllm/model_executor/model_loader/
checkpoint_weight_patch/), whose loader takes floating-point values that are not NaN. NeMo-RL's and verl's sparse
updates are messages between their processes and have no file format. Values overwrite: applied twice, or to a state in
between, they give the same result. Metadata, all strings:

    format, format_version     sparse-opt sparse values, 1
    since, step                the two steps
    since_digest, step_digest  `StateLog.digest` of them, which a reader may compare before and after
    shapes                     JSON, name -> shape of every tensor that changed
    aliases                    JSON, further name -> first name of tied tensors
    model                      where the log says
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import DeltaLogError
from ..files import new_folder, one_line, write_safetensors
from ..masks.mask_set import MaskSet
from ..tensors import as_bits, compact_json
from .files import MASK_NAME, LogSettings, list_steps
from .log import DeltaLog
from .state_log import StateLog, step_states

OnTensor = Callable[[], None]


def export_state(log: StateLog, step: int, path: str | Path, *, on_tensor: OnTensor | None = None) -> None:
    """Write the state at a step as one safetensors file, tied tensors once. Holds the state in memory.

    Raises:
        DeltaLogError: the step is not logged, the log is damaged, or the file cannot be written or is in the folder of
            a delta log.
    """
    _require_target(Path(path))
    tensors = {}
    for name in log.layout.names:
        tensors[name] = _single(log, name, step)
        _call(on_tensor)
    # transformers only loads files with `format: pt`.
    metadata = {"format": "pt", "step": str(step), "digest": log.digest(step), **_model(log)}
    _write(Path(path), tensors, metadata)


def export_values(log: StateLog, since: int, step: int, path: str | Path, *, on_tensor: OnTensor | None = None) -> int:
    """Write positions and new values of the elements whose bits differ between two steps; return their number.

    Holds two states of one tensor, and the changes, in memory.

    Raises:
        DeltaLogError: `since` is not before `step`, one is not logged, the log is damaged, or the file cannot be
            written or is in the folder of a delta log.
    """
    if since >= step:
        raise DeltaLogError(f"{log.directory}: since is step {since}, expected a step before {step}")
    _require_target(Path(path))
    parts: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    changed = 0
    for name in log.layout.names:
        # Cloned: a yielded tensor is valid only until the next one is read.
        old, new = (tensor.clone() for _, tensor in log.tensor_states(name, [since, step]))
        positions = (as_bits(old) != as_bits(new)).nonzero().squeeze(1)
        if len(positions):
            narrow = torch.int32 if new.numel() < 2**31 else torch.int64
            parts[f"{name}.indices"] = positions.to(narrow)
            parts[f"{name}.values"] = new.view(-1)[positions]
            shapes[name] = list(new.shape)
            changed += len(positions)
        _call(on_tensor)
    metadata = {
        "format": "sparse-opt sparse values",
        "format_version": "1",
        "since": str(since),
        "step": str(step),
        "since_digest": log.digest(since),
        "step_digest": log.digest(step),
        "shapes": compact_json(shapes),
        "aliases": compact_json(dict(log.layout.aliases)),
        **_model(log),
    }
    _write(Path(path), parts, metadata)
    return changed


def _single(log: StateLog, name: str, step: int) -> Tensor:
    return next(tensor for _, tensor in log.tensor_states(name, [step])).contiguous()


def _model(log: StateLog) -> dict[str, str]:
    return {"model": log.metadata["model"]} if "model" in log.metadata else {}


def _call(callback: Callable[..., None] | None, *arguments: Any) -> None:
    if callback is not None:
        callback(*arguments)


def _require_target(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise DeltaLogError(f"{path}: the file ends in {path.suffix or 'no suffix'}, expected .safetensors")
    if list_steps(path.parent)[0]:
        # The file could replace a step or the mask of the log.
        raise DeltaLogError(f"{path}: is in the folder of a delta log: choose another folder")


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(path, tensors, metadata)
    except (OSError, SafetensorError) as error:
        raise DeltaLogError(f"{path}: cannot be written: {one_line(error)}") from error


def convert(
    log: DeltaLog,
    directory: str | Path,
    *,
    level: str | None = None,
    keyframe_every: int | None = None,
    metadata: Mapping[str, str] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Write every step of a log into a new one whose states have the same bits, and the same digests.

    The mask is copied too. Holds two states in memory.

    Args:
        directory: missing or empty; renamed into place after everything is written.
        level, keyframe_every: as in `DeltaLog.create`; None uses the settings of `log`.
        metadata: added to that of `log`, and preferred for keys in both.
        on_step: called with each written step.

    Raises:
        DeltaLogError: the log is damaged, has buffers (which cannot be distinguished from parameters in a state), or
            does not begin with step 0; or the directory cannot be written.
    """
    layout, steps, old = log.layout, log.steps, log.settings
    if layout.buffers:
        raise DeltaLogError(
            f"{log.directory}: {len(layout.buffers)} of its tensors are buffers, the first of them "
            f"{min(layout.buffers)}: they would be parameters in the new log"
        )
    if steps[0] != 0:
        raise DeltaLogError(f"{log.directory}: begins with step {steps[0]}, expected 0")
    settings = LogSettings(level or old.level, old.against, keyframe_every or old.keyframe_every)
    mask = MaskSet.load(log.directory / MASK_NAME) if log.mask_digest else None
    states = (
        (step, state | {alias: state[name] for alias, name in layout.aliases.items()})
        for step, state in step_states(log, steps)
    )
    write_log(Path(directory), states, settings, dict(log.metadata) | dict(metadata or {}), mask, on_step)


def write_log(
    target: Path,
    states: Iterator[tuple[int, Mapping[str, Tensor]]],
    settings: LogSettings,
    metadata: Mapping[str, str],
    mask: MaskSet | None = None,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Write (step, state), the first of them step 0, into a new log, which is renamed into place at the end.

    Raises:
        DeltaLogError: the directory cannot be written, or holds something.
    """
    try:
        with new_folder(target) as aside:
            base = next(states)[1]
            with DeltaLog.create(
                aside,
                base,
                level=settings.level,
                against="base" if settings.against == "base" else "previous",
                keyframe_every=settings.keyframe_every,
                mask=mask,
                metadata=metadata,
            ) as written:
                _call(on_step, 0)
                for step, state in states:
                    written.append(step, state)
                    _call(on_step, step)
    except OSError as error:
        raise DeltaLogError(f"{target}: cannot be written: {one_line(error)}") from error
