"""Reads and writes mask files: safetensors files of positions with metadata. Reads `.pt` dictionaries of bool tensors.

A `.pt` file (`pt_file`) holds name -> bool tensor, either directly, or under the key `masks` with the metadata under
`metadata`.

The safetensors file holds, for each parameter, its name and the int32 (int64 from 2**31 elements on) tensor of its
active positions. Its metadata:

    format           sparse-opt mask
    format_version   1
    shapes           JSON, name -> shape of the parameter
    pattern          element, run16, run32, tile64 or tile128
    sparsity         percent: the requested value if there was one, otherwise the actual value
    digest           xxh3_128 over names, shapes and positions
    metadata_digest  xxh3_128 over all other metadata
    method, step, model, ...   the mask's own metadata
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import MaskError
from ..files import DamagedFile, is_text, one_line, write_safetensors
from ..tensor_file import open_tensors
from ..tensors import compact_json, metadata_digest

FORMAT = "sparse-opt mask"
FORMAT_VERSION = "1"
_RESERVED = ("format", "format_version", "shapes", "pattern", "digest", "metadata_digest")
_PT_SUFFIXES = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class IndexMasks:
    """The content of a safetensors mask file; positions are not checked yet."""

    indices: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    pattern: str
    metadata: dict[str, str]
    digest: str


@dataclass(frozen=True)
class BoolMasks:
    """The content of a `.pt` mask file."""

    masks: dict[str, Any]
    metadata: dict[str, str]


def write(
    path: Path,
    indices: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    pattern: str,
    sparsity: float,
    metadata: Mapping[str, str],
    digest: str,
) -> None:
    """Write a mask file atomically. Creates missing parent folders."""
    if path.suffix != ".safetensors":
        raise MaskError(f"{path}: mask files end in .safetensors, found {path.suffix or 'no suffix'}")
    _require_text(path, indices, metadata)
    taken = sorted(set(metadata) & set(_RESERVED))
    if taken:
        raise MaskError(f"{path}: metadata key {taken[0]} is reserved by the file format")
    header = {
        "sparsity": f"{100 * sparsity:.10g}",
        **metadata,
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "shapes": compact_json({name: list(shape) for name, shape in shapes.items()}),
        "pattern": pattern,
        "digest": digest,
    }
    header["metadata_digest"] = metadata_digest(header)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(path, indices, header)
    except (OSError, SafetensorError) as error:
        raise MaskError(f"{path}: cannot write the mask: {one_line(error)}") from error


def read(path: Path) -> IndexMasks | BoolMasks:
    """Read a mask file in the format of its suffix. Raises a MaskError that names the file."""
    if not path.is_file():
        raise MaskError(f"{path}: no such mask file")
    if path.suffix not in (".safetensors", *_PT_SUFFIXES):
        raise MaskError(f"{path}: mask files end in .safetensors, {', '.join(_PT_SUFFIXES)}; found {path.suffix!r}")
    found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pt(path)
    names = found.indices if isinstance(found, IndexMasks) else found.masks
    _require_text(path, names, found.metadata)  # otherwise the mask cannot be saved again
    return found


def _require_text(path: Path, names: Iterable[str], metadata: Mapping[str, str]) -> None:
    """Raise a MaskError if a name or the metadata are no text that a safetensors file can hold."""
    for text in (*names, *metadata, *metadata.values()):
        if not isinstance(text, str) or not is_text(text):
            raise MaskError(f"{path}: {text!r:.80} is not text that can be encoded as UTF-8")


def _read_safetensors(path: Path) -> IndexMasks:
    try:
        with open_tensors(path) as file:
            header = file.metadata
            if header.get("format") != FORMAT:
                raise MaskError(f"{path}: format is {header.get('format')!r}, expected {FORMAT!r}")
            if header.get("format_version") != FORMAT_VERSION:
                raise MaskError(
                    f"{path}: format version is {header.get('format_version')!r}, expected {FORMAT_VERSION!r}"
                )
            written = header.pop("metadata_digest", None)
            if metadata_digest(header) != written:
                raise MaskError(
                    f"{path}: damaged: the metadata have digest {metadata_digest(header)}, expected {written}"
                )
            missing = [key for key in _RESERVED[:-1] if key not in header]
            if missing:
                raise MaskError(f"{path}: metadata key {missing[0]} is missing")
            shapes = _parsed_shapes(path, header["shapes"])
            if set(file.names) != set(shapes):
                raise MaskError(f"{path}: damaged: tensors and shapes have different names")
            indices = {name: file.read(name) for name in shapes}
    except (OSError, DamagedFile) as error:
        raise MaskError(f"{path}: not a readable safetensors file: {one_line(error)}") from error
    kept = {key: value for key, value in header.items() if key not in _RESERVED}
    return IndexMasks(indices, shapes, header["pattern"], kept, header["digest"])


def _parsed_shapes(path: Path, text: str) -> dict[str, tuple[int, ...]]:
    try:
        shapes = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or an integer of too many digits
        raise MaskError(f"{path}: its shapes are not JSON: {one_line(error)}") from error
    lists = isinstance(shapes, dict) and all(isinstance(shape, list) for shape in shapes.values())
    if not lists or not all(type(size) is int and size >= 0 for shape in shapes.values() for size in shape):
        raise MaskError(f"{path}: its shapes are not name -> list of sizes")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _read_pt(path: Path) -> BoolMasks:
    from ..pt_file import check_pt, load_pt

    try:
        check_pt(path)
        content = load_pt(path)
    except (OSError, DamagedFile) as error:
        raise MaskError(f"{path}: not a readable .pt dictionary of bool tensors: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise MaskError(f"{path}: holds a {type(content).__name__}, expected a dictionary of bool tensors")
    other_entries: dict[Any, Any] = {}
    masks = content
    if isinstance(content.get("masks"), dict):
        masks = content["masks"]
        other_entries = {key: value for key, value in content.items() if key != "masks"}
        tensors = [key for key, value in other_entries.items() if isinstance(value, Tensor)]
        if tensors:
            raise MaskError(f"{path}: holds a tensor {tensors[0]!r} next to 'masks', expected all masks under that key")
        if isinstance(other_entries.get("metadata"), dict):
            other_entries |= other_entries.pop("metadata")
    odd = [name for name in masks if not isinstance(name, str)]
    if odd or not masks:
        raise MaskError(f"{path}: holds {f'the key {odd[0]!r}' if odd else 'no masks'}, expected parameter names")
    for name, mask in masks.items():
        if isinstance(mask, Tensor):
            _require_stored(path, name, mask)
    metadata = {str(key): str(value) for key, value in other_entries.items() if isinstance(value, (str, int, float))}
    return BoolMasks(masks, {key: value for key, value in metadata.items() if key not in _RESERVED})


def _require_stored(path: Path, name: str, tensor: Tensor) -> None:
    """Raise unless the file stores every element of the tensor, before memory of its size is allocated."""
    if type(tensor) not in (Tensor, nn.Parameter):
        raise MaskError(f"{path}: {name} is a {type(tensor).__name__}, expected a plain tensor")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        what = "on the meta device" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise MaskError(f"{path}: {name} is {what}, expected a dense tensor with values")
    needed, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if needed > stored:
        raise MaskError(
            f"{path}: {name} is {list(tensor.shape)} with strides {list(tensor.stride())} over {stored} stored bytes, "
            f"expected {needed}: its elements share memory"
        )
