"""Reads and writes the files of a delta log: one safetensors file per step, specified in docs/formats.md.

step_00000000.keyframe.safetensors   the whole state, every tensor under its own name
step_00000007.patch.safetensors      the changes since the parent step (`delta.codec`)
mask.safetensors                     the mask of a log that has one: a `MaskSet` file
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from ..errors import DeltaLogError
from ..files import DamagedFile, one_line, write_safetensors
from ..tensor_file import TensorFile, open_tensors
from ..tensors import combined_digest, compact_json, dtype_name, metadata_digest
from .digest import StateDigest
from .state import StateLayout

FORMAT = "sparse-opt delta log"
FORMAT_VERSION = "2"
KEYFRAME = "keyframe"
PATCH = "patch"
MASK_NAME = "mask.safetensors"
_NAME = re.compile(r"step_(\d{8,})\.(keyframe|patch)\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")
# Elements that a patch is coded over: all elements of the state, or those in the log's mask.
_SPACES = ("dense", "mask")
_REWRITE = (
    "write the log again with the version of sparse-opt that wrote it: "
    "sparse-opt delta convert --from DIR --to NEW_DIR --level tight"
)


def level_error(level: str, remedy: str) -> str:
    """Return the error for a file whose patches have a format that only earlier versions can read."""
    return f"its patches are of level {level!r}, which can no longer be read: {remedy}"


@dataclass(frozen=True)
class StepFile:
    """One file of a log, as described by its name."""

    path: Path
    step: int
    kind: str

    @property
    def where(self) -> str:
        return f"{self.path}: step {self.step}"


@dataclass(frozen=True)
class StepHeader:
    """The header of a step's file.

    Attributes:
        changed: number of elements whose bits differ from the state that a patch is, or for a keyframe would be, coded
            against; None if a keyframe's writer did not have that state.
        previous_step: the step logged before; None in the first file.
        parent_step, parent_digest: the state that a patch is coded against; None and empty in a keyframe.
        masked, payload_digest: set in patches.
        layout, log_metadata, keyframe_every: set in keyframes.
    """

    file: StepFile
    run_id: str
    changed: int | None
    numel: int
    previous_step: int | None = None
    parent_step: int | None = None
    parent_digest: str = ""
    result_digest: str = ""
    tensor_digests: tuple[str, ...] = ()
    mask_digest: str = ""
    masked: bool = False
    payload_digest: str = ""
    layout: StateLayout | None = None
    log_metadata: Mapping[str, str] | None = None
    keyframe_every: int | None = None


def checked_interval(keyframe_every: int | None) -> int | None:
    """Return the interval of keyframes, or raise DeltaLogError."""
    every = keyframe_every
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise DeltaLogError(f"keyframe_every is {every!r}, expected 1 or more, or None")
    return every


def step_file(directory: Path, step: int, kind: str) -> StepFile:
    return StepFile(directory / f"step_{step:08d}.{kind}.safetensors", step, kind)


def list_steps(directory: Path) -> tuple[dict[int, StepFile], list[Path]]:
    """List the step files of a directory in ascending order, and its safetensors files that do not belong to a log."""
    files: dict[int, StepFile] = {}
    strays = []
    for path in sorted(directory.glob("*.safetensors")):
        match = _NAME.fullmatch(path.name)
        file = step_file(directory, int(match[1]), match[2]) if match else None
        if file is not None and file.path == path and file.step not in files:
            files[file.step] = file
        elif path.name != MASK_NAME:
            strays.append(path)
    return dict(sorted(files.items())), strays


def is_pt_log(directory: Path) -> bool:
    """Whether a directory has files with the names of a log of `.pt` files: see `delta.pt`."""
    return (directory / "base_state.pt").exists() or any(directory.glob("deltas_step_*.pt"))


def require_steps(directory: Path, listed: Collection[int]) -> None:
    """Raise DeltaLogError if no step file of the directory is listed."""
    if listed:
        return
    if is_pt_log(directory):
        raise DeltaLogError(
            f"{directory}: holds a log of .pt files, expected a delta log: convert it: sparse-opt delta convert --from "
            f"{directory} --to NEW_DIR"
        )
    raise DeltaLogError(f"{directory}: holds no delta log (no step_*.safetensors file)")


def write_step(
    header: StepHeader,
    payload: Mapping[str, Tensor],
    require_lock: Callable[[str], object],
) -> None:
    """Write one step's file atomically; a patch's payload digest is computed here.

    Args:
        require_lock: `WriterLock.require_held`, called right before the file is renamed into place.

    Raises:
        DeltaLogError: the file cannot be written (disk full, read-only folder), the step has a file, or the lock was
            lost. This call then leaves no file of that name, and does not touch a file written by others.
    """
    where = header.file.where
    fields = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": header.file.kind,
        "step": str(header.file.step),
        "run_id": header.run_id,
        "previous_step": _written(header.previous_step),
        "parent_step": _written(header.parent_step),
        "parent_digest": header.parent_digest,
        "result_digest": header.result_digest,
        "tensor_digests": "".join(header.tensor_digests),
        "changed": _written(header.changed),
        "numel": str(header.numel),
        "mask_digest": header.mask_digest,
    }
    if header.file.kind == PATCH:
        fields |= {
            "space": _SPACES[header.masked],
            "payload_digest": payload_digest(payload),
        }
    else:
        assert header.layout is not None
        fields |= {
            "layout": header.layout.to_json(),
            "log_metadata": compact_json(dict(header.log_metadata or {})),
            "settings": compact_json({"keyframe_every": header.keyframe_every}),
        }
    fields["header_digest"] = metadata_digest(fields)

    def check() -> None:
        require_lock(where)

    try:
        write_safetensors(header.file.path, payload, fields, replace=False, before_publishing=check)
        _require_single(header.file)
    except (OSError, SafetensorError) as error:
        check()  # after a lost lock, another writer may have removed this writer's temporary file
        if isinstance(error, FileExistsError):
            raise DeltaLogError(_taken(header.file, header.file.path.name)) from error
        raise DeltaLogError(f"{where}: cannot be written: {one_line(error)}") from error


def _require_single(file: StepFile) -> None:
    """If the step also has a file of the other kind, remove its new file again and raise DeltaLogError.

    Checked after the file has been renamed, so that of two concurrent writers of one step at most one succeeds.
    """
    other = step_file(file.path.parent, file.step, PATCH if file.kind == KEYFRAME else KEYFRAME)
    if other.path.exists():
        file.path.unlink()
        raise DeltaLogError(_taken(file, other.path.name))


def _taken(file: StepFile, found: str) -> str:
    return f"{file.where}: not written: {found} exists already, from another writer of this log"


def read_header(file: StepFile) -> StepHeader:
    """Read a file's header. Raises DeltaLogError, naming file and step, if it is damaged or of another file."""
    with opened(file) as content:
        fields = content.metadata
    try:
        return _parse_header(file, fields)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DeltaLogError) and str(error).startswith(file.where):
            raise
        raise DeltaLogError(f"{file.where}: damaged: its header cannot be read: {one_line(error)}") from error


def _parse_header(file: StepFile, fields: dict[str, str]) -> StepHeader:
    if fields.get("format") != FORMAT:
        raise DeltaLogError(f"{file.where}: format is {fields.get('format')!r}, expected {FORMAT!r}")
    if fields.get("format_version") != FORMAT_VERSION:
        raise DeltaLogError(
            f"{file.where}: format version is {fields.get('format_version')!r}, expected {FORMAT_VERSION!r}: {_REWRITE}"
        )
    written = fields.pop("header_digest", "")
    if metadata_digest(fields) != written:
        raise DeltaLogError(
            f"{file.where}: damaged: its header has digest {metadata_digest(fields)}, expected {written!r}"
        )
    for key, expected in (("step", str(file.step)), ("kind", file.kind)):
        if fields[key] != expected:
            raise DeltaLogError(f"{file.where}: the file was written as {key} {fields[key]}; was it renamed?")
    layout, log_metadata, every, masked, settings = None, None, None, False, {}
    if file.kind == KEYFRAME:
        layout = StateLayout.from_json(fields["layout"])
        # Memory is allocated by the layout later, so it must not be larger than the file.
        if layout.nbytes > os.path.getsize(file.path):
            raise DeltaLogError(
                f"{file.where}: damaged: its layout has {layout.nbytes} bytes of tensors, "
                f"the file has {os.path.getsize(file.path)}"
            )
        log_metadata = {str(k): str(v) for k, v in json.loads(fields["log_metadata"]).items()}
        settings = json.loads(fields["settings"])
        every = checked_interval(settings["keyframe_every"])
    else:
        if fields["space"] not in _SPACES:
            raise DeltaLogError(f"{file.where}: damaged: its patch is over {fields['space']!r}")
        masked = fields["space"] == "mask"
    # Files of earlier versions name a level; `tight` is the format that is left.
    if (level := settings.get("level", fields.get("level", "tight"))) != "tight":
        raise DeltaLogError(f"{file.where}: {level_error(level, _REWRITE)}")
    return StepHeader(
        file=file,
        run_id=fields["run_id"],
        previous_step=_number(fields["previous_step"]),
        parent_step=_number(fields["parent_step"]),
        parent_digest=fields["parent_digest"],
        result_digest=fields["result_digest"],
        tensor_digests=tuple(_DIGEST.findall(fields["tensor_digests"])),
        changed=_number(fields["changed"]),
        numel=int(fields["numel"]),
        mask_digest=fields["mask_digest"],
        masked=masked,
        payload_digest=fields.get("payload_digest", ""),
        layout=layout,
        log_metadata=log_metadata,
        keyframe_every=every,
    )


def require_digests(header: StepHeader, layout: StateLayout) -> None:
    """Raise DeltaLogError unless the header's tensor digests fit the layout and give its result digest."""
    where = header.file.where
    if len(header.tensor_digests) != len(layout.tensors):
        raise DeltaLogError(f"{where}: {len(header.tensor_digests)} tensor digests, expected {len(layout.tensors)}")
    found = layout.state_digest(header.tensor_digests)
    if found != header.result_digest:
        raise DeltaLogError(f"{where}: its tensor digests give the digest {found}, expected {header.result_digest}")


def read_keyframe(header: StepHeader, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a keyframe, or of the named ones, in the layout's order, each a verified private copy.

    Raises:
        DeltaLogError: a tensor is missing or does not have the digest that the header states; names the tensor.
    """
    layout, where = header.layout, header.file.where
    assert layout is not None  # header is a keyframe's
    require_digests(header, layout)
    with opened(header.file) as content:
        if set(content.names) != set(layout.names):
            raise DeltaLogError(f"{where}: damaged: its tensors are not those of its layout")
        for spec, digest in zip(layout.tensors, header.tensor_digests, strict=True):
            if names is not None and spec.name not in names:
                continue
            tensor = content.read(spec.name)
            if (dtype_name(tensor), tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise DeltaLogError(
                    f"{where}: {spec.name} is {dtype_name(tensor)} {list(tensor.shape)}, expected {spec}"
                )
            require_tensor(header, spec.name, tensor, digest)
            yield spec.name, tensor


def require_tensor(header: StepHeader, name: str, tensor: Tensor, digest: str) -> None:
    """Raise DeltaLogError unless the tensor's bytes have the digest that the step's header states for them."""
    found = StateDigest.start([tensor]).result()[0]
    if found != digest:
        raise DeltaLogError(f"{header.file.where}: damaged: {name} has digest {found}, expected {digest}")


def read_payload(header: StepHeader) -> dict[str, Tensor]:
    """Return private copies of the tensors of a patch file, verified by the digest in the header.

    Raises:
        DeltaLogError: the payload is damaged.
    """
    with opened(header.file) as content:
        payload = {key: content.read(key) for key in content.names}
    found = payload_digest(payload)
    if found != header.payload_digest:
        raise DeltaLogError(
            f"{header.file.where}: damaged: its payload has digest {found}, expected {header.payload_digest}"
        )
    return payload


def payload_digest(payload: Mapping[str, Tensor]) -> str:
    """Return the `combined_digest` of a patch file's tensors."""
    digests = StateDigest.start(list(payload.values())).result()
    entries = zip(payload.items(), digests, strict=True)
    return combined_digest((key, dtype_name(t), tuple(t.shape), digest) for (key, t), digest in entries)


@contextlib.contextmanager
def opened(file: StepFile) -> Iterator[TensorFile]:
    """Open the file for reading. Raises DeltaLogError for read errors, also for those inside the `with` block."""
    try:
        with open_tensors(file.path) as content:
            yield content
    except FileNotFoundError as error:
        raise DeltaLogError(f"{file.where}: the file is missing") from error
    except (OSError, DamagedFile) as error:
        raise DeltaLogError(f"{file.where}: damaged: {one_line(error)}") from error


def _written(number: int | None) -> str:
    return "" if number is None else str(number)


def _number(text: str) -> int | None:
    return int(text) if text else None
