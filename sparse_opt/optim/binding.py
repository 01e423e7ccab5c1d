"""Binds a mask to parameters: the active parameters, their buckets, and the implementation that serves each bucket."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .. import backends
from ..masks.mask_set import MaskSet, require_own_memory
from ..masks.positions import index_dtype
from ..ops.checks import FLOAT_DTYPES
from . import quantised
from .buckets import Bucket
from .gradients.gradient_buffer import NativeGradientBuffer
from .gradients.python_collection import PythonGradientBuffer
from .ranks.sharding import Shard
from .segments import ActiveWeight, Segments, Tiles, fits_uint16, packed, run_length_of


class ModelLinks:
    """The dictionary entries by which a model reaches its active parameters, to notice that one was replaced.

    Args:
        model: None if it is unknown; then only `torch.utils.swap_tensors` is noticed.
        named: the parameters of the optimizer's groups.
        buckets: of the active parameters.
    """

    def __init__(self, model: nn.Module | None, named: Mapping[str, Parameter], buckets: Sequence[Bucket]) -> None:
        self._model = model_reference(model)
        self._named, self._ids = named, {id(param) for param in named.values()}
        inside = _ids(model)  # a model need not have all parameters that the optimizer was built from
        self._shards = [shard for bucket in buckets for shard in bucket.shards if id(shard.param) in inside]
        swappable = [shard.param for bucket in buckets if bucket.bound is None for shard in bucket.shards]
        self._implementations = [(param, param._cdata) for param in swappable]
        self._find()

    def _find(self) -> None:
        model = self._model()
        links = [] if model is None else _links(model, {id(shard.param) for shard in self._shards}, set())
        self._dicts = [dictionary for dictionary, _, _ in links]
        self._keys = [key for _, key, _ in links]
        self._values = [value for _, _, value in links]

    def require_intact(self, groups: list[dict[str, Any]]) -> None:
        """Raise a RuntimeError that names a parameter which the model, or the optimizer's groups, no longer have."""
        replaced = self.replaced()
        given = {id(group["params"][0]) for group in groups if group["param_names"]}
        if given - self._ids:
            given = {id(param) for group in groups for param in group["params"]}
            replaced = next((param for param in self._named.values() if id(param) not in given), None)
        if replaced is not None:
            name = next(name for name, param in self._named.items() if param is replaced)
            raise RuntimeError(
                f"{name!r} was replaced after the optimizer was built, as load_state_dict(assign=True), an assignment "
                "to a layer's weight and accelerate's prepare do: call rebind(model) before the first step, or build a "
                "new optimizer after it"
            )

    def replaced(self) -> Parameter | None:
        """Return an active parameter that the model no longer has, None if it has all."""
        for param, implementation in self._implementations:
            if param._cdata != implementation:
                return param
        if all(map(operator.is_, map(dict.get, self._dicts, self._keys), self._values)):
            return None
        # Parameters may have moved to another module, as by torch.nn.utils.parametrize. Under FSDP2 a module has its
        # unsharded ones from its forward to its backward pass; then the links stay as they are.
        held = _ids(self._model())
        if not held:
            return None
        for shard in self._shards:
            if id(shard.param) not in held and id(shard.unsharded) not in held:
                return shard.param
        if all(id(shard.param) in held for shard in self._shards):
            self._find()
        return None


def model_reference(model: nn.Module | None) -> Callable[[], nn.Module | None]:
    """Return a weak reference to the model, or to the one that `torch.compile` has wrapped."""
    return (lambda: None) if model is None else weakref.ref(getattr(model, "_orig_mod", model))


def _ids(model: nn.Module | None) -> set[int]:
    return set() if model is None else {id(param) for param in model.parameters()}


def _links(module: nn.Module, ids: set[int], seen: set[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return (dictionary, key, value) of each entry on a path from the module to the parameters with these ids."""
    seen.add(module)
    links: list[tuple[dict[str, Any], str, Any]] = [
        (module._parameters, name, param) for name, param in module._parameters.items() if id(param) in ids
    ]
    for name, child in module._modules.items():
        if child is not None and child not in seen and (below := _links(child, ids, seen)):
            links += [*below, (module._modules, name, child)]
    return links


def active_parameters(
    named: dict[str, Parameter], mask: MaskSet, frozen: Collection[Parameter], model: nn.Module | None
) -> tuple[MaskSet, dict[Parameter, Tensor]]:
    """Return the mask under the parameters' names, and the indices of each parameter with active elements.

    Args:
        frozen: parameters that do not require grad only because the optimizer has frozen them.
        model: the module that the parameters belong to, if known; it may have others.

    Raises:
        MaskError: the mask does not fit the model, or a parameter with active elements shares memory with another.
        ValueError: the mask has no active element, or one in a parameter that cannot be trained.
    """
    mask = mask.resolve(quantised.whole(named, model))
    active = {
        named[name]: _all_of(param) if isinstance(param := named[name], ActiveWeight) else mask[name]
        for name in mask.names
        if mask[name].numel()
    }
    if not active:
        raise ValueError(f"the mask has no active element in any of the {len(named)} parameters given")
    if model is not None:
        of_model = dict(model.named_parameters())
        ids = {id(p) for p in active}
        require_own_memory(of_model, [name for name, p in of_model.items() if id(p) in ids])
    ours = {id(p) for p in frozen}
    for name, param in named.items():
        if param not in active:
            continue
        if not param.requires_grad and id(param) not in ours:
            raise ValueError(
                f"the mask has {active[param].numel()} active elements in {name!r}, which does not require grad: call "
                "requires_grad_(True) on it, or leave it out of the mask"
            )
        if not param.is_contiguous():
            raise ValueError(f"{name!r} has strides {param.stride()}, expected a contiguous parameter")
        if param.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name!r} is {param.dtype}, expected bfloat16, float16 or float32")
    return mask, active


def _all_of(param: Tensor) -> Tensor:
    return torch.arange(param.numel(), dtype=index_dtype(param.numel()), device="cpu")


def build_buckets(
    groups: list[dict[str, Any]],
    active: dict[Parameter, Tensor],
    shards: Mapping[Parameter, Shard],
    pattern: str,
    backend: str | None,
) -> list[Bucket]:
    """Build the buckets of all groups, in the groups' order, without state and gradients, for a mask of `pattern`.

    A bucket has the parameters that one op call can take: of one group, device, dtype and layout of the indices. The
    run length is 1 for parameters whose rows, or shards, do not hold whole runs. All ranks build the same buckets, of
    different shards.
    """
    split: dict[tuple[Any, ...], tuple[list[str], list[Shard]]] = {}
    for number, group in enumerate(groups):
        # The last parameter may be a ScalerProxy's, which has no name.
        for name, param in zip(group["param_names"], group["params"], strict=False):
            if param in active:
                shard = shards[param]
                run_length = run_length_of(param.shape, pattern)
                if shard.chunk % run_length:
                    run_length = 1
                narrow = fits_uint16(param, active[param], run_length)
                key = (
                    number,
                    run_length,
                    narrow,
                    shard.is_whole,
                    isinstance(param, ActiveWeight),
                    param.device,
                    param.dtype,
                    index_dtype(param.numel()),
                )
                names, its_shards = split.setdefault(key, ([], []))
                names.append(name)
                its_shards.append(shard)
    buckets: list[Bucket] = []
    for (number, run_length, narrow, is_whole, *_), (names, its_shards) in split.items():
        positions = [active[shard.param] for shard in its_shards]
        unsharded = _segments_of([shard.unsharded for shard in its_shards], positions, run_length, narrow)
        local, first_slots = unsharded, [0] * len(names)
        if not is_whole:
            parts = [shard.local_positions(every) for shard, every in zip(its_shards, positions, strict=True)]
            first_slots = [first for _, first in parts]
            local = _segments_of([s.local for s in its_shards], [part for part, _ in parts], run_length, narrow)
        buckets.append(
            Bucket(
                **local.shared(),
                shards=its_shards,
                unsharded=unsharded,
                first_slots=first_slots,
                group=groups[number],
                names=names,
                ordinal=len(buckets) + its_shards[0].number * len(split),
                ops=backends.functions(local.device, backend),
                lr=torch.zeros(1, dtype=torch.float32, device=local.device),
                steps=torch.zeros(len(names), dtype=torch.float32, device=local.device),
            )
        )
    return buckets


def _segments_of(params: Sequence[Tensor], positions: Sequence[Tensor], run_length: int, narrow: bool) -> Segments:
    """Concatenate the sorted `positions` in the flattened `params` on their device."""
    indices, index_bases, starts, ends = packed(positions, run_length, narrow)
    device = params[0].device
    index_bases = None if index_bases is None else index_bases.to(device)
    return Segments(list(params), indices.to(device), index_bases, starts, ends, run_length)


def bind(bucket: Bucket, backend: str | None, *, values: Tensor, tiles: Tiles | None, compact: bool) -> None:
    """Set the bucket's gradient buffer and the native object that makes its steps: native ones where they can run.

    Args:
        values: memory of the compact gradient, [nnz of the whole parameters]; with dense gradients it may be [0].
        compact: whether the optimizer was built with grads='compact'.
    """
    bucket.bound = _bound(bucket, backend)
    bound_gradient = _bound(bucket.unsharded, backend) if bucket.is_sharded else bucket.bound
    buffer = {
        **bucket.unsharded.shared(),
        "names": bucket.names,
        "values": values,
        "sum_sq": torch.zeros(len(bucket.params), dtype=torch.float32, device=bucket.device),
        "tiles": tiles,
        "ops": bucket.ops,
    }
    if bound_gradient is not None and compact:
        bucket.gradient = NativeGradientBuffer(**buffer, bound=bound_gradient)
    else:
        bucket.gradient = PythonGradientBuffer(**buffer)


def _bound(segments: Segments, backend: str | None) -> Any:
    return backends.bind(
        segments.params,
        segments.indices,
        segments.starts,
        segments.ends,
        run_length=segments.run_length,
        index_bases=segments.index_bases,
        backend=backend,
    )
