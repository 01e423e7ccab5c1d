"""Converts logs of `.pt` files, `base_state.pt` and `deltas_step_{n}.pt`, that other tools have written.

Both are dictionaries, name -> dense tensor, written by torch.save; `run_metadata.json` may name the model. The state at
step n is base + difference, added in fp32 (fp64 where one of the two is) and rounded to the dtype of the base.
docs/delta_logs.md has the tools, the conventions, and the bits that such files do not store.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DeltaLogError
from ..files import DamagedFile, one_line
from ..pt_file import check_pt, load_pt
from ..tensors import as_bits, dtype_name
from .convert import write_log
from .state import StateLayout, read_state

BASE_FILE, METADATA_FILE = "base_state.pt", "run_metadata.json"
_NAME = re.compile(r"deltas_step_(\d+)\.pt")
_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def list_pt_files(folder: Path) -> dict[int, Path]:
    """Return step -> file, ascending; step 0 is the base, `base_state.pt`.

    Raises:
        DeltaLogError: the base or all files of differences are missing, one of them is of step 0, or a step has two.
    """
    base = folder / BASE_FILE
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("deltas_*.pt")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        step = int(match[1])
        if step == 0:
            raise DeltaLogError(f"{path}: is of step 0, expected a later step: {base} is step 0")
        if step in files:
            raise DeltaLogError(f"{folder}: {files[step].name} and {path.name} are both of step {step}")
        files[step] = path
    if not files:
        raise DeltaLogError(f"{folder}: holds no deltas_step_*.pt file, expected at least one")
    if not base.is_file():
        raise DeltaLogError(f"{base}: file not found, expected the base state of {folder}")
    return {0: base} | dict(sorted(files.items()))


def convert_pt(
    folder: str | Path,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    keyframe_every: int | None = None,
    metadata: Mapping[str, str] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Write every step of a log of `.pt` files into a new delta log. Holds the base, a file and two states in memory.

    Files are unpickled with `weights_only=True`, and the checksums of their records are compared, which torch.load does
    not do. A parameter of the base that is missing from a step's file keeps its value, with a warning.

    Args:
        directory: missing or empty; renamed into place after everything is written.
        dtype: store floating-point tensors in this dtype instead of the base's, exactly.
        keyframe_every: as in `DeltaLog.create`.
        metadata: added to that of `run_metadata.json`, and preferred for keys in both.
        on_step: called with each written step.

    Raises:
        DeltaLogError: there is no such log, a file is damaged or does not fit the base, a value has no exact form in
            `dtype`, or the directory cannot be written.
    """
    files = list_pt_files(Path(folder))
    stored = _read_metadata(Path(folder)) | dict(metadata or {})
    write_log(Path(directory), _states(files, dtype), keyframe_every, stored, on_step=on_step)


def _states(files: Mapping[int, Path], dtype: torch.dtype | None) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (step, the state at that step), further names of tied tensors with the tensor of the first name."""
    content, where = _tensors(files[0], 0), f"{files[0]}: step 0"
    odd = [name for name, tensor in content.items() if tensor.dtype not in (*_FLOATING, *_INTEGER)]
    if odd:
        raise DeltaLogError(f"{where}: {odd[0]} is {dtype_name(content[odd[0]])}: it has no difference")
    try:
        layout, base = read_state(content)
    except DeltaLogError as error:
        raise DeltaLogError(f"{where}: {error}") from error
    for step, path in files.items():
        state = _added(base, _tensors(path, step), layout, path, step) if step else base
        found = {name: _in_dtype(tensor, dtype, name, path, step) for name, tensor in state.items()}
        yield step, found | {alias: found[name] for alias, name in layout.aliases.items()}


def _added(
    base: Mapping[str, Tensor], differences: Mapping[str, Tensor], layout: StateLayout, path: Path, step: int
) -> dict[str, Tensor]:
    """Return base + differences. Raises DeltaLogError for differences that do not fit."""
    where = f"{path}: step {step}"
    absent = [name for name in base if name not in differences]
    if absent:
        warnings.warn(
            f"{where}: holds no difference for {len(absent)} of {len(base)} tensors of the base, the first of them "
            f"{absent[0]}: they keep their values",
            stacklevel=4,
        )
    found = dict(base)
    for name, delta in differences.items():
        first = layout.aliases.get(name, name)
        if first not in base:
            raise DeltaLogError(f"{where}: holds {name}, which the base does not")
        old = base[first]
        if delta.layout != torch.strided or delta.is_quantized or delta.device.type != "cpu":
            raise DeltaLogError(f"{where}: {name} is {delta.layout} on {delta.device}, expected a dense CPU tensor")
        kinds = _FLOATING if old.is_floating_point() else _INTEGER
        if delta.shape != old.shape or delta.dtype not in kinds:
            raise DeltaLogError(
                f"{where}: {name} is {dtype_name(delta)} {list(delta.shape)}, in the base it is "
                f"{dtype_name(old)} {list(old.shape)}"
            )
        if first != name and not _same_bits(differences.get(first), delta):
            raise DeltaLogError(f"{where}: {name} and {first} are tied in the base and differ here")
        if not old.is_floating_point():
            found[first] = old + delta.to(old.dtype)
        else:
            wide = torch.promote_types(torch.promote_types(old.dtype, delta.dtype), torch.float32)
            found[first] = (old.to(wide) + delta.to(wide)).to(old.dtype)
    return found


def _same_bits(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.dtype == b.dtype and torch.equal(as_bits(a.contiguous()), as_bits(b.contiguous()))


def _in_dtype(tensor: Tensor, dtype: torch.dtype | None, name: str, path: Path, step: int) -> Tensor:
    if dtype is None or not tensor.is_floating_point():
        return tensor
    # NaN counts as exact in every dtype.
    count = int((tensor.to(dtype).to(tensor.dtype) != tensor).logical_and_(~tensor.isnan()).sum())
    if count:
        raise DeltaLogError(
            f"{path}: step {step}: {name}: {count} of {tensor.numel()} values have no exact "
            f"{str(dtype).removeprefix('torch.')} form; they are {dtype_name(tensor)}"
        )
    return tensor.to(dtype)


def _read_metadata(folder: Path) -> dict[str, str]:
    """Return the strings and numbers of `run_metadata.json`, with `model_name` also as `model`."""
    path = folder / METADATA_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DeltaLogError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise DeltaLogError(f"{path}: holds a {type(content).__name__}, expected a JSON object")
    found = {key: str(value) for key, value in content.items() if isinstance(value, str | int | float)}
    return ({"model": found["model_name"]} if "model_name" in found else {}) | found


def _tensors(path: Path, step: int) -> dict[str, Tensor]:
    """Read the tensors of a file, after the checksums of all its records have been compared.

    Raises:
        DeltaLogError: the file is missing or damaged, or has other content.
    """
    where = f"{path}: step {step}"
    try:
        check_pt(path)
        content = load_pt(path)
    except FileNotFoundError as error:
        raise DeltaLogError(f"{where}: the file is missing") from error
    except (OSError, DamagedFile) as error:
        raise DeltaLogError(f"{where}: damaged: {one_line(error)}") from error
    if not isinstance(content, Mapping):
        raise DeltaLogError(f"{where}: holds a {type(content).__name__}, expected a dictionary of tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise DeltaLogError(f"{where}: entry {name!r} is {type(value).__name__}, expected tensors by name")
        # A tensor with strides of 0 can have any size, which would be allocated.
        if value.layout == torch.strided and value.nbytes > path.stat().st_size:
            raise DeltaLogError(
                f"{where}: {name} is {dtype_name(value)} {list(value.shape)}, more than the file has bytes for"
            )
    return {name: tensor.detach() for name, tensor in content.items()}
