"""The state that a delta log keeps: which tensors a model has, ties stored once, and the digest of all their bits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import DeltaLogError
from .tensor_state import BITS_DTYPE, canonical_names, combined_digest, compact_json, dtype_name, is_wrapper

_SHOWN_MISMATCHES = 3
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (`bfloat16`) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def element_size(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_size

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class StateLayout:
    """The tensors of a state in the model's order.

    `aliases` maps each further name of a tied tensor to the first one; `buffers` are the tensors that are no
    parameters, where a module said so.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    buffers: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.tensors)

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    def state_digest(self, tensor_digests: Sequence[str]) -> str:
        """xxh3_128 over names, dtypes, shapes and the digest of each tensor's bytes, given in the layout's order."""
        pairs = zip(self.tensors, tensor_digests, strict=True)
        return combined_digest((spec.name, spec.dtype, spec.shape, digest) for spec, digest in pairs)

    def mismatches(self, other: StateLayout) -> list[str]:
        """How `other` differs from this layout, one line a tensor; order and buffers take no part."""
        mine, theirs = ({spec.name: spec for spec in layout.tensors} for layout in (self, other))
        lines = [f"{name} is missing" for name in mine if name not in theirs]
        lines += [f"{name} is not in the log" for name in theirs if name not in mine]
        lines += [
            f"{name} is {theirs[name]}, {spec} in the log"
            for name, spec in mine.items()
            if name in theirs and theirs[name] != spec
        ]
        if not lines and dict(self.aliases) != dict(other.aliases):
            lines.append(f"tied names are {dict(other.aliases)}, {dict(self.aliases)} in the log")
        return lines

    def require_same(self, other: StateLayout, where: str) -> None:
        """Raise DeltaLogError, listing the differences, unless `other` has the same tensors."""
        lines = self.mismatches(other)
        if lines:
            more = len(lines) - _SHOWN_MISMATCHES
            listed = "; ".join(lines[:_SHOWN_MISMATCHES]) + (f"; and {more} more" if more > 0 else "")
            raise DeltaLogError(f"{where}: the model is not the logged one: {listed}")

    def to_json(self) -> str:
        tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.tensors]
        return compact_json({"tensors": tensors, "aliases": dict(self.aliases), "buffers": sorted(self.buffers)})

    @classmethod
    def from_json(cls, text: str) -> StateLayout:
        """Raises ValueError, KeyError or TypeError on text that `to_json` did not write."""
        content = json.loads(text)
        tensors = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in content["tensors"])
        for spec in tensors:
            if not isinstance(getattr(torch, spec.dtype, None), torch.dtype) or spec.element_size not in BITS_DTYPE:
                raise ValueError(f"{spec.name} has the dtype {spec.dtype!r}")
            # So few dimensions, each below 2**63, that their product stays a small number.
            sizes = len(spec.shape) <= _MOST_DIMENSIONS and all(type(n) is int and 0 <= n < 2**63 for n in spec.shape)
            if not sizes or spec.numel >= 2**63:
                raise ValueError(f"{spec.name} has a shape that no tensor has")
        names = {spec.name for spec in tensors}
        if len(names) != len(tensors):
            raise ValueError("a tensor is listed twice")
        aliases = dict(content["aliases"])
        if names & aliases.keys() or not names.issuperset(aliases.values()):
            raise ValueError("its tied names are not those of its tensors")
        return cls(tensors, aliases, frozenset(content["buffers"]))


class StateReader:
    """Reads a state of one layout step after step. Where its tensors are still those that were read last, all that was
    found of them still holds, which spares a model of 254 tensors some milliseconds.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self._marks: list[tuple[object, ...]] | None = None
        self._tensors: dict[str, Tensor] = {}

    def read(self, model_or_state: nn.Module | Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """The layout's tensors, as `read_state` gives them.

        Raises:
            DeltaLogError: as `read_state`; or the tensors are not the layout's. Begins with `where`.
        """
        marks = _marks(model_or_state)
        if marks is None or marks != self._marks:
            found, tensors = read_state(model_or_state)
            self._layout.require_same(found, where)
            self._marks, self._tensors = marks, tensors
        return self._tensors


def _marks(model_or_state: nn.Module | Mapping[str, Tensor]) -> list[tuple[object, ...]] | None:
    """What tells this state from others: which tensors it has, and where they lie. None where that cannot be told."""
    marks: list[tuple[object, ...]] = []
    named: list[Iterable[tuple[str, Tensor | None]]] = []
    if not isinstance(model_or_state, nn.Module):
        named.append(model_or_state.items())
    else:
        for part in model_or_state.modules():
            # What else it may put into its state dict, hooks and methods of its own decide.
            if part._state_dict_hooks or part._state_dict_pre_hooks or not _is_plain(type(part)):
                return None
            marks.append((part, *part._non_persistent_buffers_set))
            named += [part._parameters.items(), part._buffers.items()]
    for items in named:
        for name, tensor in items:
            if tensor is None:
                continue
            if type(tensor) not in (Tensor, nn.Parameter):
                return None  # of others than plain tensors the place in memory does not say everything
            place = tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
            marks.append((name, *place))
    return marks


def _is_plain(kind: type[nn.Module]) -> bool:
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
    )


def read_state(model_or_state: nn.Module | Mapping[str, Tensor]) -> tuple[StateLayout, dict[str, Tensor]]:
    """The layout of a module's `state_dict()`, or of a state dict, and its tensors under their first names.

    The tensors share storage with the model and are not copied.

    Raises:
        DeltaLogError: an entry is no plain strided tensor of 1, 2, 4 or 8 byte elements that lies in memory; the model
            is sharded (FSDP, DTensor, DeepSpeed ZeRO-3).
    """
    module = model_or_state if isinstance(model_or_state, nn.Module) else None
    if module is not None:
        _require_whole(module)
    # `module` tells the two apart, which a type checker does not follow.
    state: dict[str, Tensor] = dict(model_or_state.state_dict() if module is not None else model_or_state)  # type: ignore[union-attr,arg-type]
    for name, tensor in state.items():
        _require_plain(name, tensor)
    firsts = canonical_names(state)
    tensors = {name: tensor.detach() for name, tensor in state.items() if firsts[name] == name}
    specs = tuple(TensorSpec(name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items())
    aliases = {name: first for name, first in firsts.items() if first != name}
    buffers: frozenset[str] = frozenset()
    if module is not None:
        buffers = frozenset(tensors.keys() - {n for n, _ in module.named_parameters(remove_duplicate=False)})
    return StateLayout(specs, aliases, buffers), tensors


def _require_whole(module: nn.Module) -> None:
    # By name: neither package need be there. `state_dict()` of the first would wait for all ranks.
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise DeltaLogError("the model is sharded by FullyShardedDataParallel: log a full state dict, gathered first")
    for name, param in module.named_parameters():
        if hasattr(param, "ds_id"):
            raise DeltaLogError(f"{name} is sharded by DeepSpeed ZeRO-3: log a full state dict, gathered first")


def _require_plain(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise DeltaLogError(f"state entry {name} is {type(tensor).__name__}, wanted a tensor")
    if is_wrapper(tensor):
        raise DeltaLogError(
            f"state entry {name} is {type(tensor).__name__}, wanted a plain tensor: gather sharded ones first"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise DeltaLogError(
            f"state entry {name} is {tensor.layout} on {tensor.device}, wanted a strided tensor in memory"
        )
    if tensor.element_size() not in BITS_DTYPE:
        raise DeltaLogError(f"state entry {name} is {tensor.dtype}, wanted elements of 1, 2, 4 or 8 bytes")
