"""Messages from a sender to receivers, and their form as bytes: a safetensors file with string metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..errors import DamagedMessage
from ..tensors import compact_json, dtype_name, metadata_digest

Kind = Literal["mask", "state", "update"]
FORMAT, FORMAT_VERSION = "sparse_opt.weight_sync", "1"
_REQUIRED = ("kind", "version", "mask_digest", "result_digest", "payload_digest", "tensors")
_DIGITS = 18  # of a version, which is below 2^63 then
_OPTIONAL = ("base_version", "base_digest", "layout")
Entry = tuple[str, str, list[int]]  # of a tensor: name, dtype as torch names it, and shape


@dataclass(frozen=True)
class Message:
    """A message of a `WeightSender`, complete and ready to be sent.

    Attributes:
        kind: "mask" (positions, the first message to every receiver), "state" (all active values) or "update" (the
            active values that changed since `base_version`).
        version: version of the sender's weights that the receiver has after this message.
        mask_digest: `MaskSet.digest` of the sender's mask.
        result_digest: digest of the active weights at `version` (`weight_sync.digest`), 16 hex digits.
        payload_digest: the same sum over what the message carries: the values sent, or the positions.
        tensors: by name. mask: `positions.{i}` of tensor i of the layout, int32 or int64. state: `{dtype}.values`.
            update: for each dtype `{dtype}.values`, or `{dtype}.bitmap` (uint8) and `{dtype}.changed`, or neither if no
            value of the dtype changed.
        base_version, base_digest: of the weights that an update applies to; None otherwise.
        layout: JSON of the `Layout`, in a mask message only.
    """

    kind: Kind
    version: int
    mask_digest: str
    result_digest: str
    payload_digest: str
    tensors: dict[str, Tensor] = field(repr=False)
    base_version: int | None = None
    base_digest: str | None = None
    layout: str | None = field(default=None, repr=False)

    def wait(self) -> Message:
        """Return this message, which is complete. See `PendingMessage.wait`."""
        return self

    @property
    def entries(self) -> list[Entry]:
        """Name, dtype and shape of each tensor."""
        return [(name, dtype_name(t), list(t.shape)) for name, t in self.tensors.items()]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def header(self) -> dict[str, str]:
        """Return everything but the tensors' data as strings, with a digest: for transports that move the tensors."""
        return dict(self._header)

    @cached_property
    def _header(self) -> dict[str, str]:
        header = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "version": str(self.version),
            "mask_digest": self.mask_digest,
            "result_digest": self.result_digest,
            "payload_digest": self.payload_digest,
            "tensors": compact_json(self.entries),
        }
        optional = {
            "base_version": None if self.base_version is None else str(self.base_version),
            "base_digest": self.base_digest,
            "layout": self.layout,
        }
        header.update({key: value for key, value in optional.items() if value is not None})
        return {**header, "digest": metadata_digest(header)}

    @classmethod
    def from_header(cls, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Message:
        """Rebuild a message from its header and its tensors, which may be on any device.

        Raises:
            DamagedMessage: the header's digest or a field is wrong, or the tensors are not those of the header.
        """
        return cls.from_fields(checked_header(header), tensors)

    @classmethod
    def from_fields(cls, fields: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Message:
        """`from_header` of what `checked_header` has returned."""
        for name, dtype, shape in tensor_list(fields):
            if name not in tensors:
                raise DamagedMessage(f"the message lacks the tensor {name!r}")
            found = [dtype_name(tensors[name]), list(tensors[name].shape)]
            if found != [dtype, shape]:
                raise DamagedMessage(f"{name!r} is {found[0]} {found[1]}, expected {dtype} {shape}")
        names = [name for name, _, _ in tensor_list(fields)]
        if unknown := sorted(set(tensors) - set(names)):
            raise DamagedMessage(f"the message has the tensor {unknown[0]!r}, which its header does not list")
        return cls(
            kind=fields["kind"],  # type: ignore[arg-type]  # checked_header has compared it
            version=int(fields["version"]),
            mask_digest=fields["mask_digest"],
            result_digest=fields["result_digest"],
            payload_digest=fields["payload_digest"],
            tensors={name: tensors[name] for name in names},
            base_version=int(fields["base_version"]) if "base_version" in fields else None,
            base_digest=fields.get("base_digest"),
            layout=fields.get("layout"),
        )

    def to_bytes(self) -> bytes:
        """Return a safetensors file with the header as its metadata. Copies tensors of a GPU to the host."""
        return save({name: t.cpu().contiguous() for name, t in self.tensors.items()}, metadata=self.header())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Message:
        """Read a message; its tensors are on the CPU. The receiver compares their values with the digests.

        Raises:
            DamagedMessage: the bytes are truncated or are not a message, or the header was changed.
        """
        data = bytes(data)
        try:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])["__metadata__"]
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedMessage(f"{len(data)} bytes are not a message: {' '.join(str(error).split())}") from error
        return cls.from_header(header, tensors)


def checked_header(header: Any) -> dict[str, str]:
    """Return a header whose digest and fields are right.

    Raises:
        DamagedMessage: a field is missing or wrong, or the digest is not that of the fields.
    """
    if not isinstance(header, Mapping) or not all(isinstance(v, str) for pair in header.items() for v in pair):
        raise DamagedMessage(f"the header of a message is a {type(header).__name__}, expected strings by name")
    fields = {key: value for key, value in header.items() if key != "digest"}
    if (fields.get("format"), fields.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise DamagedMessage(
            f"the header has format {fields.get('format')!r}, version {fields.get('format_version')!r}, expected "
            f"{FORMAT!r}, version {FORMAT_VERSION!r}"
        )
    if header.get("digest") != metadata_digest(fields):
        raise DamagedMessage(f"the header has digest {header.get('digest')}, expected {metadata_digest(fields)}")
    for key in _REQUIRED:
        if key not in fields:
            raise DamagedMessage(f"the header of a message has no {key}")
    if unknown := sorted(set(fields) - {*_REQUIRED, *_OPTIONAL, "format", "format_version"}):
        raise DamagedMessage(f"the header of a message has the unknown field {unknown[0]!r}")
    if fields["kind"] not in get_args(Kind):
        raise DamagedMessage(
            f"the kind of a message is {fields['kind']!r}, expected one of {', '.join(get_args(Kind))}"
        )
    for key in ("version", "base_version"):
        if key in fields and not (fields[key].isascii() and fields[key].isdecimal() and len(fields[key]) <= _DIGITS):
            found = f"{fields[key][:32]!r} ({len(fields[key])} characters)"
            raise DamagedMessage(f"the {key} of a message is {found}, expected a number of at most {_DIGITS} digits")
    expected = {"mask": {"layout"}, "state": set(), "update": {"base_version", "base_digest"}}[fields["kind"]]
    if fields.keys() & set(_OPTIONAL) != expected:
        raise DamagedMessage(
            f"a message of kind {fields['kind']!r} has the fields {sorted(fields.keys() & set(_OPTIONAL))}, expected "
            f"{sorted(expected)}"
        )
    return fields


def tensor_list(header: Mapping[str, str]) -> list[Entry]:
    """Return (name, dtype, shape) of each tensor of a header, in order, for a transport that allocates them.

    Raises:
        DamagedMessage: the list is malformed, or a dtype is not one of torch.
    """
    try:
        entries = [(name, dtype, shape) for name, dtype, shape in json.loads(header["tensors"])]
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedMessage(f"the list of a message's tensors is malformed: {error}") from error
    for name, dtype, shape in entries:
        known = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
        sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if not (isinstance(name, str) and known and sizes):
            raise DamagedMessage(f"the list of a message's tensors has the entry {[name, dtype, shape]}")
    return entries
