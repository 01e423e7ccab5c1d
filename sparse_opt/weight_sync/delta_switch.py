"""DeltaSwitch: several deltas of one base in an inference engine, whose weights are those of one of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..delta.change import expanded
from ..delta.exchange import ElementSwap, changed_elements
from ..errors import DeltaError
from ..masks.positions import index_dtype
from ..options import nearest
from ..tensors import as_bits, dtype_name, materialized
from .destinations import Destination, Placed, PlacedTensor, place, refuse_shared
from .digest import signed
from .encoding import DTYPES, Layout, LayoutTensor
from .index import choose

if TYPE_CHECKING:
    from ..delta import SparseDelta


@dataclass(eq=False)
class _Registered:
    """A delta, decoded for the engine.

    Attributes:
        tensors: name -> addresses of the memory that has parts of the tensor.
        base, result: digests of the elements that the delta changes, before and after.
    """

    swap: ElementSwap
    tensors: dict[str, list[int]]
    base: int = 0
    result: int = 0


class DeltaSwitch:
    """Switches the weights of an engine between those of its base and of several deltas, in place and bit for bit.

    `DeltaSet` does this for a module that has the tensors of the deltas. An engine has parts of them in tensors of its
    own: fused projections, tensor-parallel slices. The weights must not be used while a method runs.

    Memory on the device of the weights, for each delta: indices and values as for an applied `SparseDelta`, of the
    elements that this process has.

    Args:
        weights: returns the tensors that the engine has now. A delta is refused if its memory is in none of them.

    Attributes:
        active: the name of the delta that the weights have; None for the base.
    """

    def __init__(self, weights: Callable[[], Iterable[Tensor]]) -> None:
        self._weights = weights
        self._deltas: dict[str, _Registered] = {}
        self.active: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the indices and values of all deltas."""
        return sum(delta.swap.nbytes for delta in self._deltas.values())

    @torch.inference_mode()  # weights that an engine has loaded in inference mode can only be written in it
    def register(
        self,
        name: str,
        delta: SparseDelta,
        checkpoint: Iterable[tuple[str, Tensor]],
        find: Callable[[Layout], Mapping[str, Sequence[Destination]]],
    ) -> None:
        """Decode a delta for the engine, whose weights are those of the base and remain so. Replaces one of this name.

        All tensors of the checkpoint are compared with the digests of the delta's base, and the engine's parts of those
        that the delta changes with the checkpoint. Holds one tensor and its change at a time.

        Args:
            checkpoint: name and tensor of everything that the engine has loaded.
            find: returns the destinations of the tensors of a layout; see `WeightReceiver`.

        Raises:
            DeltaError: the checkpoint is not the delta's base, the engine's weights are not those of the checkpoint, or
                another delta is active; names the tensor.
            WeightSyncError: the engine has no place for a tensor.
        """
        if self.active not in (None, name):
            raise DeltaError(f"delta {name!r} cannot be registered while {self.active!r} is active: switch to the base")
        layout = _changed(delta)
        placed = place(layout, find(layout))
        refuse_shared(placed)
        tensors = {
            key: [part.tensor.untyped_storage().data_ptr() for part in tensor.destinations if part.tensor.numel()]
            for key, tensor in placed.items()
        }
        found = _Registered(ElementSwap(_parts(delta, checkpoint, placed)), tensors)
        found.result = _digest(found.swap)
        try:
            found.swap.swap_(entered=True)
            found.base = _digest(found.swap)
        finally:
            found.swap.swap_(entered=False)
        self._deltas[name] = found
        self.active = None

    def remove(self, name: str) -> None:
        """Forget a delta that is not active, and free its memory. Raises DeltaError."""
        self._require(name)
        if name == self.active:
            raise DeltaError(f"delta {name!r} is active: switch to another one before it is removed")
        del self._deltas[name]

    @torch.inference_mode()
    def switch(self, name: str | None) -> set[str]:
        """Give the engine the weights of a delta, or with None those of the base. Returns the names of written tensors.

        The elements that were replaced are compared with their digests. If they differ, all of them are put back.

        Raises:
            DeltaError: there is no such delta, or its weights are not those that this object has left; the engine then
                keeps its weights.
        """
        if name is not None:
            self._require(name)
        steps = [(key, key == name) for key in (self.active, name) if key is not None]
        if name is not None and name == self.active:
            steps = [(name, False), (name, True)]  # verifies them
        live = {tensor.untyped_storage().data_ptr() for tensor in self._weights()}
        for key, _ in steps:
            for tensor, addresses in self._deltas[key].tensors.items():
                if not live.issuperset(addresses):
                    raise DeltaError(f"the engine has replaced {tensor} since delta {key!r} was registered: {_REMEDY}")
        begun: list[tuple[ElementSwap, bool]] = []
        try:
            for key, entered in steps:
                delta = self._deltas[key]
                begun.append((delta.swap, entered))
                delta.swap.swap_(entered=entered)
                if _digest(delta.swap) != (delta.base if entered else delta.result):
                    raise DeltaError(f"other code has changed weights that delta {key!r} changes: {_REMEDY}")
        except BaseException:
            for swap, entered in reversed(begun):
                swap.swap_(entered=not entered)
            raise
        self.active = name
        return {tensor for key, _ in steps for tensor in self._deltas[key].tensors}

    def _require(self, name: str) -> None:
        if name not in self._deltas:
            known = nearest(name, self._deltas) if self._deltas else ": none is registered"
            raise DeltaError(f"there is no delta {name!r}{known}")


_REMEDY = "load the engine's weights again, and register the delta again"


def _changed(delta: SparseDelta) -> Layout:
    """Return the tensors that a delta changes as the layout of an element mask."""
    entries = []
    for spec in sorted(delta.layout.tensors, key=lambda spec: spec.name):
        if spec.name not in delta.changes:
            continue
        if spec.dtype not in DTYPES:
            raise DeltaError(f"{spec.name} is {spec.dtype}, expected one of {', '.join(DTYPES)}")
        entries.append(LayoutTensor(spec.name, spec.shape, spec.dtype, delta.changes[spec.name].changed))
    return Layout("element", tuple(entries))


def _parts(
    delta: SparseDelta, checkpoint: Iterable[tuple[str, Tensor]], placed: Mapping[str, PlacedTensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Yield what `ElementSwap` takes for each destination of each tensor that the delta changes."""
    missing = {spec.name: spec for spec in delta.layout.tensors}
    for given, loaded in checkpoint:
        name = delta.layout.aliases.get(given, given)
        if name not in missing:
            continue
        spec = missing.pop(name)
        if (dtype_name(loaded), tuple(loaded.shape)) != (spec.dtype, spec.shape):
            found = f"{dtype_name(loaded)} {list(loaded.shape)}"
            raise DeltaError(f"{given} of the engine's checkpoint is {found}, expected {spec}")
        parts = placed[name].destinations if name in placed else ()
        old = materialized(loaded.detach().to(parts[0].tensor.device) if parts else loaded)
        new = delta.trained(name, old)
        if not parts:
            continue
        matrix = as_bits(old).view(placed[name].entry.matrix)
        run_length = delta.changes[name].run_length
        indices, values = changed_elements(old, new, run_length)
        for part in parts:
            held = part.tensor.view(matrix.dtype)
            if not torch.equal(held, matrix[part.r0 : part.r1, part.c0 : part.c1]):
                raise DeltaError(
                    f"{name} of the engine has other bits than its checkpoint: switch to the base, or load it again"
                )
            length = run_length if _keeps_runs(placed[name], part, run_length) else 1
            first = indices.to(torch.int64)
            inside, offsets = placed[name].find(
                part, first if length == run_length else expanded(first // run_length, run_length)
            )
            offsets, order = offsets.sort()
            of_part = values.view(-1, length)[inside][order].view(-1)
            yield part.memory, offsets.to(index_dtype(part.memory.numel())), of_part, length
    if missing:
        raise DeltaError(
            f"the engine's checkpoint has no tensor {next(iter(missing))}, which the delta's base has: make the delta "
            "of the two checkpoints (`sparse-opt delta diff`)"
        )


def _keeps_runs(tensor: PlacedTensor, part: Placed, run_length: int) -> bool:
    """Whether every aligned run of the tensor is one of the destination's memory too, or outside of it."""
    row_stride, column_stride = part.tensor.stride()
    bounds = (tensor.entry.matrix[1], part.c0, part.c1, row_stride)
    return tensor.is_plain(part) or (column_stride == 1 and all(n % run_length == 0 for n in bounds))


def _digest(swap: ElementSwap) -> int:
    """Return the digest of the values that the weights do not have now. Waits for the device."""
    total, first = 0, 0
    for values in swap.values:
        total += int(choose(values.device, None).digest_sum(values, first))
        first += values.numel()
    return signed(total)
