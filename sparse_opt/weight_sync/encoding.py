"""The bytes of weight updates: the header of a message, and the positions, values and bitmaps that it carries.

docs/formats.md describes them byte by byte. A `Message` is a safetensors file with string metadata; transports may
move its header and its tensors apart. Senders make the tensors by `mask_tensors` and `GroupValues`; receivers read them
by `checked_mask`, and by `values_of` or `changed_tensors`, and compare the header with what they hold by
`check_follows`. To send the bitmap of changed values in another form, change `GroupValues.tensors` and `values_of`: in
memory, senders and receivers have it as `bitmap_of` returns it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..errors import DamagedMessage, ForeignMessage, OutOfOrderMessage
from ..masks import MaskSet
from ..masks.patterns import PATTERNS, matrix_shape, unit_grid, unit_sizes, whole_units
from ..tensors import compact_json, dtype_name, metadata_digest
from .digest import digest_sum, mix, to_hex, zero_extended

Kind = Literal["mask", "state", "update"]
Encoding = Literal["auto", "values", "bitmap"]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FORMAT, FORMAT_VERSION = "sparse_opt.weight_sync", "1"
_REQUIRED = ("kind", "version", "mask_digest", "result_digest", "payload_digest", "tensors")
_DIGITS = 18  # of a version, which is below 2^63 then
_CHUNK = 2**20  # bytes of a bitmap that are expanded at once
_OPTIONAL = ("base_version", "base_digest", "layout")
_NUMBERS = ("version", "base_version")
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
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def n_values(self) -> int:
        """Number of the values that a state or an update carries."""
        return sum(t.numel() for name, t in self.tensors.items() if name.endswith((".values", ".changed")))

    def header(self) -> dict[str, str]:
        """Return everything but the tensors' data as strings, with a digest: for transports that move the tensors."""
        header = {"format": FORMAT, "format_version": FORMAT_VERSION, "tensors": listed(self.tensors)}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tensors"}
        header |= {name: str(value) for name, value in values.items() if value is not None}
        return {**header, "digest": metadata_digest(header)}

    @classmethod
    def from_header(cls, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Message:
        """Rebuild a message from its header and its tensors, which may be on any device.

        Raises:
            DamagedMessage: the header's digest or a field is wrong, or the tensors are not those of the header.
        """
        checked = checked_header(header)
        entries = tensor_list(checked)
        for name, dtype, shape in entries:
            if name not in tensors:
                raise DamagedMessage(f"the message lacks the tensor {name!r}")
            found = [dtype_name(tensors[name]), list(tensors[name].shape)]
            if found != [dtype, shape]:
                raise DamagedMessage(f"{name!r} is {found[0]} {found[1]}, expected {dtype} {shape}")
        if unknown := sorted(set(tensors) - {name for name, _, _ in entries}):
            raise DamagedMessage(f"the message has the tensor {unknown[0]!r}, which its header does not list")
        values: dict[str, Any] = {name: checked[name] for name in (*_REQUIRED, *_OPTIONAL) if name in checked}
        values |= {name: int(values[name]) for name in _NUMBERS if name in values}
        return cls(**{**values, "tensors": {name: tensors[name] for name, _, _ in entries}})

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
    found = {key: value for key, value in header.items() if key != "digest"}
    if (found.get("format"), found.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise DamagedMessage(
            f"the header has format {found.get('format')!r}, version {found.get('format_version')!r}, expected "
            f"{FORMAT!r}, version {FORMAT_VERSION!r}"
        )
    if header.get("digest") != metadata_digest(found):
        raise DamagedMessage(f"the header has digest {header.get('digest')}, expected {metadata_digest(found)}")
    for key in _REQUIRED:
        if key not in found:
            raise DamagedMessage(f"the header of a message has no {key}")
    if unknown := sorted(set(found) - {*_REQUIRED, *_OPTIONAL, "format", "format_version"}):
        raise DamagedMessage(f"the header of a message has the unknown field {unknown[0]!r}")
    if found["kind"] not in get_args(Kind):
        raise DamagedMessage(f"the kind of a message is {found['kind']!r}, expected one of {', '.join(get_args(Kind))}")
    for key in _NUMBERS:
        text = found.get(key, "0")
        if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
            raise DamagedMessage(
                f"the {key} of a message is {text[:32]!r} ({len(text)} characters), expected a number of at most "
                f"{_DIGITS} digits"
            )
    expected = {"mask": {"layout"}, "state": set(), "update": {"base_version", "base_digest"}}[found["kind"]]
    if found.keys() & set(_OPTIONAL) != expected:
        raise DamagedMessage(
            f"a message of kind {found['kind']!r} has the fields {sorted(found.keys() & set(_OPTIONAL))}, expected "
            f"{sorted(expected)}"
        )
    return found


def listed(tensors: Mapping[str, Tensor]) -> str:
    """Return the JSON that `tensor_list` reads."""
    return compact_json([(name, dtype_name(t), list(t.shape)) for name, t in tensors.items()])


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


@dataclass(frozen=True)
class LayoutTensor:
    """A tensor of the mask: its name, shape, the name of its dtype, and its number of active elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nnz: int

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of the tensor as a matrix."""
        return matrix_shape(self.shape)

    @property
    def positions_dtype(self) -> torch.dtype:
        """int32, or int64 for tensors of 2**31 or more elements."""
        return torch.int32 if math.prod(self.shape) < 2**31 else torch.int64


@dataclass(frozen=True)
class Group:
    """The tensors of one dtype.

    Attributes:
        first: number of the group's first active element in the layout.
        members: indices of the tensors in the layout, in order.
        starts: [members + 1] active elements of the group before each of them, and all.
    """

    dtype: str
    first: int
    members: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def nnz(self) -> int:
        return self.starts[-1]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """The tensors of a mask in sorted order of their names, those without active elements included."""

    pattern: str
    tensors: tuple[LayoutTensor, ...]

    @classmethod
    def of(cls, mask: MaskSet, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Layout:
        """Build the layout of a mask over weights of the same names.

        Args:
            dtype: of all values that are sent; None for those of the weights.

        Raises:
            ForeignMessage: a dtype is not bfloat16, float16 or float32; names the tensor.
        """
        tensors = []
        for name in sorted(mask.indices):
            found = dtype_name(weights[name]) if dtype is None else str(dtype).removeprefix("torch.")
            if mask[name].numel() and found not in DTYPES:
                raise ForeignMessage(f"{name!r} is {found}, expected one of {', '.join(DTYPES)}")
            tensors.append(LayoutTensor(name, mask.shapes[name], found, mask[name].numel()))
        return cls(mask.pattern, tuple(tensors))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The dtypes of tensors with active elements, in sorted order of their names."""
        groups: list[Group] = []
        first = 0
        active = [i for i, t in enumerate(self.tensors) if t.nnz]
        for dtype in sorted({self.tensors[i].dtype for i in active}):
            members = tuple(i for i in active if self.tensors[i].dtype == dtype)
            starts = (0, *accumulate(self.tensors[i].nnz for i in members))
            groups.append(Group(dtype, first, members, starts))
            first += starts[-1]
        return tuple(groups)

    def names(self, group: Group) -> list[str]:
        """Return the names of a group's tensors, in order."""
        return [self.tensors[i].name for i in group.members]

    def split(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the active values of each tensor by name, as views of those of each dtype."""
        parts: dict[str, Tensor] = {}
        for group in self.groups:
            sizes = [self.tensors[i].nnz for i in group.members]
            parts.update(zip(self.names(group), values[group.dtype].split(sizes), strict=True))
        return parts

    def joined(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the active values [nnz] of each dtype, in new memory, from those of each tensor by name."""
        return {
            group.dtype: torch.cat([values[name].to(group.torch_dtype) for name in self.names(group)])
            for group in self.groups
        }

    def to_json(self) -> str:
        """Return compact JSON with sorted keys."""
        tensors = [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "nnz": t.nnz} for t in self.tensors]
        return compact_json({"pattern": self.pattern, "tensors": tensors})

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read the layout of a mask message.

        Raises:
            DamagedMessage: it is malformed.
        """
        try:
            content = json.loads(text)
            pattern, tensors = content["pattern"], tuple(_tensor(entry) for entry in content["tensors"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedMessage(f"the layout of a mask message is malformed: {error!r}") from error
        if pattern not in PATTERNS:
            raise DamagedMessage(f"the layout has the pattern {pattern!r}, expected one of {', '.join(PATTERNS)}")
        names = [t.name for t in tensors]
        if names != sorted(set(names)):
            raise DamagedMessage("the tensors of the layout are not in sorted order of their names")
        for t in tensors:
            if not 0 <= t.nnz <= math.prod(t.shape) or (t.nnz and t.dtype not in DTYPES):
                raise DamagedMessage(f"the layout lists {t.name!r} as {t.dtype} {list(t.shape)} with nnz {t.nnz}")
        return cls(pattern, tensors)


def _tensor(entry: Any) -> LayoutTensor:
    shape: Sequence[int] = entry["shape"]
    name, dtype, nnz = entry["name"], entry["dtype"], entry["nnz"]
    if not (isinstance(name, str) and isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in [nnz, *shape])):
        raise ValueError(f"{entry} is not name, shape, dtype and nnz of a tensor")
    return LayoutTensor(name, tuple(shape), dtype, nnz)


def units_of(mask: MaskSet, entry: LayoutTensor) -> Tensor:
    """Return what a mask message lists for a tensor: the ascending numbers of its units, for element masks positions.

    Units are numbered as in `masks.patterns`. The tensor is [units] in `entry.positions_dtype`.
    """
    positions = mask[entry.name]
    if mask.pattern == "element":
        return positions
    return whole_units(positions, entry.shape, mask.pattern).to(entry.positions_dtype)


def mask_tensors(mask: MaskSet, layout: Layout) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a mask message, and its payload digest."""
    tensors = {f"positions.{i}": units_of(mask, entry) for i, entry in enumerate(layout.tensors) if entry.nnz}
    return tensors, _digest_of_units(tensors)


def _digest_of_units(tensors: Mapping[str, Tensor]) -> str:
    total, count = 0, 0
    for units in tensors.values():
        total += int(digest_sum(units, count))
        count += units.numel()
    return to_hex(total)


def checked_mask(message: Message) -> tuple[Layout, dict[str, Tensor]]:
    """Return the layout of a mask message, and the units of each tensor with active elements, by the tensor's name.

    Raises:
        DamagedMessage: positions are missing, not ascending, out of range, or not as many as the layout states; or
            their digest is another one.
    """
    layout, tensors = Layout.from_json(message.layout or ""), message.tensors
    units = {}
    for i, entry in enumerate(layout.tensors):
        key = f"positions.{i}"
        if (key in tensors) != bool(entry.nnz):
            raise DamagedMessage(f"the mask message has {'no ' if entry.nnz else ''}{key} of {entry.name!r}")
        if not entry.nnz:
            continue
        given = tensors[key]
        if given.dim() != 1 or given.dtype != entry.positions_dtype:
            raise DamagedMessage(
                f"{key} of {entry.name!r} is {given.dtype} {list(given.shape)}, expected {entry.positions_dtype} [n]"
            )
        if given.numel() == 0 or not bool((given[1:] > given[:-1]).all()):
            raise DamagedMessage(f"{key} of {entry.name!r} is not ascending")
        bound = math.prod(unit_grid(entry.shape, layout.pattern))
        if int(given[0]) < 0 or int(given[-1]) >= bound:
            raise DamagedMessage(f"{key} of {entry.name!r} has numbers outside of 0:{bound}")
        if (nnz := active_elements(given, entry, layout.pattern)) != entry.nnz:
            raise DamagedMessage(f"{key} of {entry.name!r} are {nnz} elements, expected {entry.nnz}")
        units[entry.name] = given
    if extra := sorted(set(tensors) - {f"positions.{i}" for i in range(len(layout.tensors))}):
        raise DamagedMessage(f"the mask message has the tensor {extra[0]!r}, expected positions only")
    if (found := _digest_of_units(units)) != message.payload_digest:
        raise DamagedMessage(f"the positions have digest {found}, expected {message.payload_digest}")
    return layout, units


def active_elements(units: Tensor, entry: LayoutTensor, pattern: str) -> int:
    """Count the elements of some units; those at the right and bottom edge may be cut off."""
    if pattern == "element":
        return units.numel()
    return int(unit_sizes(units.to(torch.int64), entry.shape, pattern).sum())


class GroupValues(NamedTuple):
    """What a message carries for the tensors of one dtype: all values, or a bitmap and the changed ones, or nothing.

    `tensors` writes it to a message, and `values_of` reads it.

    Attributes:
        values: [nnz].
        bitmap: [bitmap_bytes(nnz)] uint8, with element e of the group as bit e % 8 of byte e // 8.
        changed: [n], the values of the elements that the bitmap marks, in order.
    """

    values: Tensor | None = None
    bitmap: Tensor | None = None
    changed: Tensor | None = None

    def tensors(self, dtype: str) -> dict[str, Tensor]:
        """Return the tensors by their names in the message."""
        return {f"{dtype}.{kind}": tensor for kind, tensor in self._asdict().items() if tensor is not None}

    def to(self, device: torch.device) -> GroupValues:
        return GroupValues(*(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in self))


def sends_all(encoding: Encoding, values: Tensor, count: int) -> bool:
    """Return whether an update sends all values [nnz], and not a bitmap and the `count` changed ones."""
    if encoding == "auto" and count:
        return bitmap_bytes(values.numel()) + count * values.element_size() >= values.nbytes
    return encoding == "values"


def values_of(message: Message, layout: Layout) -> list[GroupValues]:
    """Return what a state or an update carries for each group of the layout.

    Raises:
        DamagedMessage: tensors are missing, have other sizes than the layout, or belong to no group.
    """
    found = []
    names: set[str] = set()
    for group in layout.groups:
        given = GroupValues(*(message.tensors.get(f"{group.dtype}.{kind}") for kind in GroupValues._fields))
        values, bitmap, changed = given
        _check(f"{group.dtype}.values", values, group.torch_dtype, group.nnz)
        if values is not None and (bitmap is not None or changed is not None):
            raise DamagedMessage(f"the message has both {group.dtype}.values and changed values")
        if values is None and message.kind == "state":
            raise DamagedMessage(f"the state message has no {group.dtype}.values")
        if (bitmap is None) != (changed is None):
            raise DamagedMessage(f"the message has only one of {group.dtype}.bitmap and {group.dtype}.changed")
        _check(f"{group.dtype}.bitmap", bitmap, torch.uint8, bitmap_bytes(group.nnz))
        _check(f"{group.dtype}.changed", changed, group.torch_dtype, 0 if changed is None else changed.numel())
        names |= given.tensors(group.dtype).keys()
        found.append(given)
    if others := sorted(message.tensors.keys() - names):
        raise DamagedMessage(f"the {message.kind} message has the tensor {others[0]!r}, which the mask does not have")
    return found


class ChangedTensor(NamedTuple):
    """The elements of a tensor that a message changes.

    Attributes:
        numbers: [n] int64, ascending: which of the tensor's active elements they are.
        values: [n].
    """

    entry: LayoutTensor
    numbers: Tensor
    values: Tensor


def changed_tensors(message: Message, layout: Layout, device: torch.device) -> list[ChangedTensor]:
    """Return the tensors whose elements a state or an update carries; all of a dtype that is sent as a whole.

    For receivers that hand the values on.

    Raises:
        DamagedMessage: as `values_of`; or a bitmap marks other elements than the changed values are of, or the values
            do not have the message's digest.
    """
    found, payload = [], 0
    for group, part in zip(layout.groups, values_of(message, layout), strict=True):
        whole, bitmap, changed = part.to(device)
        if whole is not None:
            numbers, values = torch.arange(group.nnz, device=device), whole
        elif bitmap is not None and changed is not None:
            numbers, values = set_bits(bitmap), changed
            check_count(group, numbers.numel(), changed)
            if bool((numbers >= group.nnz).any()):
                raise DamagedMessage(f"{group.dtype}.bitmap marks element {int(numbers[-1])}, the mask has {group.nnz}")
        else:
            continue
        payload += int(mix(numbers + group.first, zero_extended(values)).sum())
        cuts = torch.searchsorted(numbers, torch.tensor(group.starts, dtype=torch.int64, device=device)).tolist()
        for index, start, low, high in zip(group.members, group.starts, cuts, cuts[1:], strict=False):
            if low < high:
                found.append(ChangedTensor(layout.tensors[index], numbers[low:high] - start, values[low:high]))
    check_payload(message, payload)
    return found


def check_follows(message: Message, mask_digest: str | None, version: int | None, digest: str | None) -> None:
    """Check that a state or an update applies to weights of a version, digest and mask; None: there is none yet.

    Raises:
        OutOfOrderMessage: there was no mask message, or the update does not follow the version.
        ForeignMessage: the message is for another mask.
    """
    if mask_digest is None:
        raise OutOfOrderMessage(f"version {message.version} came before the first mask message")
    if message.mask_digest != mask_digest:
        raise ForeignMessage(f"the message is for the mask {message.mask_digest}, the receiver has {mask_digest}")
    if message.kind == "state":
        return
    if version is None or message.base_version != version:
        held = "no version" if version is None else f"version {version}"
        raise OutOfOrderMessage(
            f"version {message.version} follows version {message.base_version}, the receiver has {held}: a state "
            "message is needed"
        )
    if message.base_digest != digest:
        raise OutOfOrderMessage(
            f"version {message.version} follows version {message.base_version} with digest {message.base_digest}, the "
            f"receiver has version {version} with digest {digest}: a state message is needed"
        )


def check_count(group: Group, marked: int, changed: Tensor) -> None:
    """Raise DamagedMessage unless the bitmap of a group marks as many elements as there are changed values."""
    if marked != changed.numel():
        raise DamagedMessage(
            f"{group.dtype}.bitmap marks {marked} elements, expected {changed.numel()} as in {group.dtype}.changed"
        )


def check_payload(message: Message, total: int) -> None:
    """Raise DamagedMessage unless the digest of the values that a message carries is `total`."""
    if to_hex(total) != message.payload_digest:
        raise DamagedMessage(f"the values sent have digest {to_hex(total)}, expected {message.payload_digest}")


def _check(name: str, tensor: Tensor | None, dtype: torch.dtype, numel: int) -> None:
    """Raise DamagedMessage if a tensor is not contiguous, or has another dtype or number of elements."""
    if tensor is None:
        return
    if tensor.dtype != dtype or tuple(tensor.shape) != (numel,) or not tensor.is_contiguous():
        raise DamagedMessage(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {[numel]}")


def bitmap_bytes(nnz: int) -> int:
    """Return the size of a bitmap over nnz elements, a multiple of 8 bytes."""
    return -(-nnz // 64) * 8


def bitmap_of(marked: Tensor) -> Tensor:
    """Return the bitmap [bitmap_bytes(n)] uint8 of the elements that are True in `marked` [n]."""
    padded = torch.zeros(8 * bitmap_bytes(marked.numel()), dtype=torch.uint8, device=marked.device)
    padded[: marked.numel()] = marked
    shifts = torch.arange(8, dtype=torch.uint8, device=marked.device)
    return (padded.view(-1, 8) << shifts).sum(dim=1, dtype=torch.uint8)


def set_bits(bitmap: Tensor) -> Tensor:
    """Return the ascending numbers [n] of the set bits of a bitmap, int64."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    found = [bitmap.new_empty(0, dtype=torch.int64)]
    for begin in range(0, bitmap.numel(), _CHUNK):
        bits = (bitmap[begin : begin + _CHUNK, None] >> shifts) & 1
        found.append(bits.view(-1).nonzero().view(-1) + 8 * begin)
    return torch.cat(found)
