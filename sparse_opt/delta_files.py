"""The files of a delta log: one safetensors file a step, each self-describing.

    step_00000000.keyframe.safetensors   the whole state, every tensor under its own name
    step_00000007.patch.safetensors      what changed since the parent step (`delta_codec`)

Metadata, all strings:

    format, format_version   sparse-opt delta log, 1
    kind, step               as in the file's name
    run_id                   32 hex digits that all files of one log share
    parent_step              the step logged before this one; empty in the first file
    parent_digest            result_digest of that step; empty in the first file
    result_digest            digest of the state at this step: `StateLayout.state_digest`
    tensor_digests           xxh3_128 of each tensor's bytes at this step, in the layout's order, 32 hex digits each
    changed, numel           elements whose bits differ from the parent's, and all elements
    codec, payload_digest    of a patch: `index_value`, and `combined_digest` of the file's tensors
    layout                   of a keyframe: JSON of tensors, tied names and buffers: `StateLayout.to_json`
    log_metadata             of a keyframe: JSON of what `DeltaLog.create` was given
    keyframe_every           of a keyframe: likewise; empty for never
    header_digest            `metadata_digest` of all of the above
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import delta_codec
from .atomic_files import one_line, write_safetensors
from .delta_codec import PatchGroup
from .delta_state import StateLayout
from .errors import DeltaLogError
from .tensor_state import combined_digest, compact_json, dtype_name, metadata_digest, tensor_digest

FORMAT = "sparse-opt delta log"
FORMAT_VERSION = "1"
KEYFRAME = "keyframe"
PATCH = "patch"
_NAME = re.compile(r"step_(\d{8,})\.(keyframe|patch)\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class StepFile:
    """One file of a log, by its name alone."""

    path: Path
    step: int
    kind: str

    @property
    def where(self) -> str:
        return f"{self.path}: step {self.step}"


@dataclass(frozen=True)
class StepHeader:
    """What a step's file says of itself. The last three are a keyframe's."""

    file: StepFile
    run_id: str
    parent_step: int | None
    parent_digest: str
    result_digest: str
    tensor_digests: tuple[str, ...]
    changed: int
    numel: int
    payload_digest: str = ""
    layout: StateLayout | None = None
    log_metadata: Mapping[str, str] | None = None
    keyframe_every: int | None = None


def step_file(directory: Path, step: int, kind: str) -> StepFile:
    return StepFile(directory / f"step_{step:08d}.{kind}.safetensors", step, kind)


def list_steps(directory: Path) -> tuple[dict[int, StepFile], list[Path]]:
    """The step files of a directory in ascending order, and the other safetensors files in it."""
    files: dict[int, StepFile] = {}
    strays = []
    for path in sorted(directory.glob("*.safetensors")):
        match = _NAME.fullmatch(path.name)
        file = step_file(directory, int(match[1]), match[2]) if match else None
        if file is None or file.path != path or file.step in files:
            strays.append(path)
        else:
            files[file.step] = file
    return dict(sorted(files.items())), strays


def write_step(header: StepHeader, payload: Mapping[str, Tensor]) -> None:
    """Write one step's file, whole or not at all.

    Raises:
        DeltaLogError: the file cannot be written (disk full, read-only folder); nothing is left under its name.
    """
    fields = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": header.file.kind,
        "step": str(header.file.step),
        "run_id": header.run_id,
        "parent_step": "" if header.parent_step is None else str(header.parent_step),
        "parent_digest": header.parent_digest,
        "result_digest": header.result_digest,
        "tensor_digests": "".join(header.tensor_digests),
        "changed": str(header.changed),
        "numel": str(header.numel),
    }
    if header.layout is None:
        fields |= {"codec": delta_codec.CODEC, "payload_digest": _payload_digest(payload)}
    else:
        fields["layout"] = header.layout.to_json()
        fields["log_metadata"] = compact_json(dict(header.log_metadata or {}))
        fields["keyframe_every"] = "" if header.keyframe_every is None else str(header.keyframe_every)
    fields["header_digest"] = metadata_digest(fields)
    try:
        write_safetensors(header.file.path, payload, fields)
    except (OSError, SafetensorError) as error:
        raise DeltaLogError(f"{header.file.where}: cannot be written: {one_line(error)}") from error


def read_header(file: StepFile) -> StepHeader:
    """Raises DeltaLogError, naming file and step, if the header is damaged or not this file's."""
    with _opened(file) as opened:
        fields = opened.metadata() or {}
    try:
        return _parse_header(file, fields)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, DeltaLogError):
            raise
        raise DeltaLogError(f"{file.where}: damaged: its header cannot be read: {one_line(error)}") from error


def _parse_header(file: StepFile, fields: dict[str, str]) -> StepHeader:
    for key, wanted in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
        if fields.get(key) != wanted:
            raise DeltaLogError(f"{file.where}: {key} is {fields.get(key)!r}, wanted {wanted!r}")
    written = fields.pop("header_digest", "")
    if metadata_digest(fields) != written:
        raise DeltaLogError(
            f"{file.where}: damaged: its header has digest {metadata_digest(fields)}, it says {written!r}"
        )
    for key, wanted in (("step", str(file.step)), ("kind", file.kind)):
        if fields[key] != wanted:
            raise DeltaLogError(f"{file.where}: the file was written as {key} {fields[key]}; was it renamed?")
    layout, log_metadata, keyframe_every = None, None, None
    if file.kind == KEYFRAME:
        layout = StateLayout.from_json(fields["layout"])
        log_metadata = {str(k): str(v) for k, v in json.loads(fields["log_metadata"]).items()}
        keyframe_every = int(fields["keyframe_every"]) if fields["keyframe_every"] else None
    elif fields["codec"] != delta_codec.CODEC:
        raise DeltaLogError(f"{file.where}: codec is {fields['codec']!r}, wanted {delta_codec.CODEC!r}")
    return StepHeader(
        file=file,
        run_id=fields["run_id"],
        parent_step=int(fields["parent_step"]) if fields["parent_step"] else None,
        parent_digest=fields["parent_digest"],
        result_digest=fields["result_digest"],
        tensor_digests=tuple(_DIGEST.findall(fields["tensor_digests"])),
        changed=int(fields["changed"]),
        numel=int(fields["numel"]),
        payload_digest=fields.get("payload_digest", ""),
        layout=layout,
        log_metadata=log_metadata,
        keyframe_every=keyframe_every,
    )


def require_digests(header: StepHeader, layout: StateLayout) -> None:
    """Raise DeltaLogError unless the header's tensor digests are of this layout and add up to its result digest."""
    where = header.file.where
    if len(header.tensor_digests) != len(layout.tensors):
        raise DeltaLogError(f"{where}: {len(header.tensor_digests)} tensor digests, wanted {len(layout.tensors)}")
    found = layout.state_digest(header.tensor_digests)
    if found != header.result_digest:
        raise DeltaLogError(f"{where}: its tensor digests make {found}, its result digest is {header.result_digest}")


def read_keyframe(header: StepHeader, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a keyframe, or of the named ones, in the layout's order, each a verified private copy.

    Raises:
        DeltaLogError: a tensor is missing or does not have the digest that the header states; names the tensor.
    """
    layout, where = header.layout, header.file.where
    assert layout is not None  # read_header gives every keyframe one
    require_digests(header, layout)
    with _opened(header.file) as opened:
        if set(opened.keys()) != set(layout.names):
            raise DeltaLogError(f"{where}: damaged: its tensors are not those of its layout")
        for spec, digest in zip(layout.tensors, header.tensor_digests, strict=True):
            if names is not None and spec.name not in names:
                continue
            # A copy, since the file is mapped: what is verified here is what the caller keeps.
            tensor = opened.get_tensor(spec.name).clone()
            if (dtype_name(tensor), tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise DeltaLogError(
                    f"{where}: {spec.name} is {dtype_name(tensor)} {list(tensor.shape)}, its layout says {spec}"
                )
            require_tensor(header, spec.name, tensor, digest)
            yield spec.name, tensor


def require_tensor(header: StepHeader, name: str, tensor: Tensor, digest: str) -> None:
    """Raise DeltaLogError unless the tensor's bytes have the digest that the step's header states for them."""
    found = tensor_digest(tensor)
    if found != digest:
        raise DeltaLogError(f"{header.file.where}: damaged: {name} has digest {found}, the header says {digest}")


def read_patch(header: StepHeader, layout: StateLayout) -> list[PatchGroup]:
    """The changes of a patch file, with its payload digest and every position checked.

    Raises:
        DeltaLogError: the payload is damaged or does not fit the layout.
    """
    where = header.file.where
    require_digests(header, layout)
    with _opened(header.file) as opened:
        payload = {key: opened.get_tensor(key).clone() for key in opened.keys()}
    found = _payload_digest(payload)
    if found != header.payload_digest:
        raise DeltaLogError(
            f"{where}: damaged: its payload has digest {found}, the header says {header.payload_digest}"
        )
    return delta_codec.unpack(layout, payload, where)


def _payload_digest(payload: Mapping[str, Tensor]) -> str:
    return combined_digest((key, dtype_name(t), tuple(t.shape), tensor_digest(t)) for key, t in payload.items())


@contextlib.contextmanager
def _opened(file: StepFile) -> Iterator[Any]:
    try:
        with safe_open(file.path, framework="pt") as opened:
            yield opened
    except FileNotFoundError as error:
        raise DeltaLogError(f"{file.where}: the file is missing") from error
    except (OSError, SafetensorError) as error:
        raise DeltaLogError(f"{file.where}: damaged: {one_line(error)}") from error
