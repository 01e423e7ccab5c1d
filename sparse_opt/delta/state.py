"""Reads the state that a delta log stores: a model's tensors, with tied ones once, their layout and digest."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import DeltaLogError, listed
from ..files import is_text, one_line
from ..tensor_file import DTYPES
from ..tensors import canonical_names, combined_digest, compact_json, dtype_name, holds_base_weights, is_wrapper

_RESERVED_NAME = "__metadata__"
_DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
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

    `aliases` maps each further name of a tied tensor to the first one; `buffers` are the tensors of a module that are
    not parameters.
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
        """Return xxh3_128 over names, dtypes, shapes and the tensors' digests, given in the layout's order."""
        pairs = zip(self.tensors, tensor_digests, strict=True)
        return combined_digest((spec.name, spec.dtype, spec.shape, digest) for spec, digest in pairs)

    def mismatches(self, other: StateLayout, mine_is: str = "the log") -> list[str]:
        """Return how `other` differs from this layout, one line per tensor; order and buffers are ignored."""
        mine, theirs = ({spec.name: spec for spec in layout.tensors} for layout in (self, other))
        lines = [f"{name} is missing" for name in mine if name not in theirs]
        lines += [f"{name} is not in {mine_is}" for name in theirs if name not in mine]
        lines += [
            f"{name} is {theirs[name]}, {spec} in {mine_is}"
            for name, spec in mine.items()
            if name in theirs and theirs[name] != spec
        ]
        if not lines and dict(self.aliases) != dict(other.aliases):
            lines.append(f"tied names are {dict(other.aliases)}, {dict(self.aliases)} in {mine_is}")
        return lines

    def require_same(self, other: StateLayout, where: str) -> None:
        """Raise DeltaLogError, listing the differences, unless `other` has the same tensors."""
        lines = self.mismatches(other)
        if lines:
            raise DeltaLogError(f"{where}: the model is not the logged one: {listed(lines, '; ')}")

    def within(self, logged: StateLayout) -> StateLayout:
        """Return this layout of a model without what a log of `named_parameters()` alone lacks.

        These are the buffers, and the further names of tied parameters. A log that has buffers lacks nothing.
        """
        if logged.buffers:
            return self
        names = {*logged.names, *logged.aliases}
        tensors = tuple(spec for spec in self.tensors if spec.name in names or spec.name not in self.buffers)
        return StateLayout(tensors, {a: first for a, first in self.aliases.items() if a in names}, self.buffers)

    def to_json(self) -> str:
        tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.tensors]
        return compact_json({"tensors": tensors, "aliases": dict(self.aliases), "buffers": sorted(self.buffers)})

    @classmethod
    def from_json(cls, text: str) -> StateLayout:
        """Parse text written by `to_json`. Raises ValueError, KeyError or TypeError on any other text."""
        content = json.loads(text)
        tensors = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in content["tensors"])
        for spec in tensors:
            if getattr(torch, spec.dtype, None) not in DTYPES.values():
                raise ValueError(f"{spec.name} has the dtype {spec.dtype!r}")
            # Limits the number of dimensions, each below 2**63, so that their product stays a small number.
            sizes = len(spec.shape) <= _MOST_DIMENSIONS and all(type(n) is int and 0 <= n < 2**63 for n in spec.shape)
            if not sizes or spec.numel >= 2**63:
                raise ValueError(f"{spec.name} has an invalid shape")
        names = {spec.name for spec in tensors}
        if len(names) != len(tensors):
            raise ValueError("a tensor is listed twice")
        aliases = dict(content["aliases"])
        if names & aliases.keys() or not names.issuperset(aliases.values()):
            raise ValueError("its tied names do not fit its tensors")
        return cls(tensors, aliases, frozenset(content["buffers"]))


class FullState(dict[str, Tensor]):
    """The state dict of a module, gathered from its shards.

    Attributes:
        buffers: the names of those tensors that are not parameters.
        base_weights: whether the module held its base weights.
    """

    def __init__(self, buffers: Collection[str], base_weights: bool = False) -> None:
        super().__init__()
        self.buffers = frozenset(buffers)
        self.base_weights = base_weights


def read_logged(model_or_state: nn.Module | Mapping[str, Tensor], layout: StateLayout, where: str) -> dict[str, Tensor]:
    """Return the tensors of a state that is to be logged after step 0.

    The module's `state_dict()` is called each time, because it can change without a change of the parameters.

    Raises:
        DeltaLogError: as `read_state`; or the tensors do not fit the layout, or the model holds its base weights.
    """
    try:
        found, tensors = read_state(model_or_state)
    except DeltaLogError as error:
        raise DeltaLogError(f"{where}: {error}") from error
    layout.require_same(found, where)
    gathered_base = isinstance(model_or_state, FullState) and model_or_state.base_weights
    if gathered_base or holds_base_weights(tensors.values()):
        raise DeltaLogError(f"{where}: the model holds its base weights: leave base_weights() first")
    return tensors


def read_state(model_or_state: nn.Module | Mapping[str, Tensor]) -> tuple[StateLayout, dict[str, Tensor]]:
    """Return the layout of a module's `state_dict()`, or of a state dict, and its tensors under their first names.

    The tensors share storage with the model and are not copied.

    Raises:
        DeltaLogError: an entry is not a plain strided tensor in memory, or has a dtype or a name that safetensors files
            do not support; or the model is sharded (FSDP, DTensor, DeepSpeed ZeRO-3).
    """
    tensors, aliases = _read_tensors(model_or_state)
    specs = tuple(TensorSpec(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items())
    buffers: frozenset[str] = frozenset()
    if isinstance(model_or_state, nn.Module):
        parameters = model_or_state.named_parameters(remove_duplicate=False)
        buffers = frozenset(tensors.keys() - {name for name, _ in parameters})
    elif isinstance(model_or_state, FullState):
        buffers = frozenset(tensors.keys() & model_or_state.buffers)
    return StateLayout(specs, aliases, buffers), tensors


def _read_tensors(model_or_state: nn.Module | Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a state under their first names, and further name -> first name of tied ones."""
    if isinstance(model_or_state, nn.Module):
        _require_whole(model_or_state)
        state = dict(model_or_state.state_dict())
    else:
        state = dict(model_or_state)
    for name, tensor in state.items():
        _require_name(name)
        _require_plain(name, tensor)
    firsts = canonical_names(state)
    tensors = {name: tensor.detach() for name, tensor in state.items() if firsts[name] == name}
    return tensors, {name: first for name, first in firsts.items() if first != name}


def _require_whole(module: nn.Module) -> None:
    for part in module.modules():
        # Compared by name, without importing either package. FSDP's `state_dict()` would wait for all ranks.
        if type(part).__name__ == "FullyShardedDataParallel":
            raise DeltaLogError(
                "the model is sharded by FullyShardedDataParallel: log a full state dict, gathered first"
            )
        for parameter in part._parameters.values():
            if hasattr(parameter, "ds_id"):
                names = (name for name, found in module.named_parameters() if found is parameter)
                raise DeltaLogError(
                    f"{next(names)} is sharded by DeepSpeed ZeRO-3: log a full state dict, gathered first"
                )


def _require_name(name: object) -> None:
    if not isinstance(name, str):
        raise DeltaLogError(f"state entry {name!r} is named by a {type(name).__name__}, expected a string")
    if name == _RESERVED_NAME:
        raise DeltaLogError(f"state entry {name} has a name that is reserved by the file format")
    if not is_text(name):
        raise DeltaLogError(f"state entry {name!r} has a name that cannot be encoded as UTF-8")


def _require_plain(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise DeltaLogError(f"state entry {name} is {type(tensor).__name__}, expected a tensor")
    if type(tensor) is not Tensor:
        _require_plain_type(name, tensor)
    if tensor.is_nested:
        raise DeltaLogError(f"state entry {name} is nested, expected a tensor of one shape")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise DeltaLogError(
            f"state entry {name} is {tensor.layout} on {tensor.device}, expected a strided tensor in memory"
        )
    if tensor.dtype not in DTYPES.values():
        raise DeltaLogError(
            f"state entry {name} is {tensor.dtype}, expected a dtype that safetensors files hold: {_DTYPE_NAMES}"
        )
    try:
        stored = tensor.untyped_storage().nbytes()
    except RuntimeError as error:
        raise DeltaLogError(f"state entry {name} has no memory of its own: {one_line(error)}") from error
    if tensor.numel() and not stored:
        raise DeltaLogError(f"state entry {name} has {tensor.numel()} elements, and their memory was freed")


def _require_plain_type(name: str, tensor: Tensor) -> None:
    kind = type(tensor)
    if is_lazy(tensor):
        raise DeltaLogError(f"state entry {name} is {kind.__name__}, expected an initialized tensor")
    if is_wrapper(tensor) or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise DeltaLogError(f"state entry {name} is {kind.__name__}, expected a plain tensor: gather sharded tensors")
