"""The compact state as torch shows it, saves it and loads it, and its copy to another mask.

A state_dict is checked completely before it is loaded, so that an invalid one does not change the optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..files import one_line
from ..masks.positions import index_dtype
from ..tensors import is_wrapper
from .base_weights import BaseWeights
from .buckets import Bucket
from .options import shown
from .ranks.sharding import Shard
from .segments import ActiveWeight, LocalSegments

_BASE = ("base_indices", "base")
_NOT_OPTIONS = ("params", "param_names")

States = dict[Parameter, dict[str, Tensor]]


def entries(buckets: list[Bucket], bases: list[BaseWeights]) -> dict[Tensor, dict[str, Any]]:
    """Return the entries of `optimizer.state`: for each parameter, views of its part of the compact buffers."""
    state: dict[Tensor, dict[str, Any]] = {
        shard.param: bucket.parameter_state(i) for bucket in buckets for i, shard in enumerate(bucket.shards)
    }
    for base in bases:
        for i, shard in enumerate(base.shards):
            state.setdefault(shard.param, {})["base"] = base.values[base.segment(i)]
    return state


def nbytes(buckets: list[Bucket], bases: list[BaseWeights]) -> dict[str, int]:
    """Return the bytes of the compact buffers by purpose: state, master, compact_weights, indices, grad, base."""
    total = dict.fromkeys(("state", "master", "compact_weights", "indices", "grad", "base"), 0)
    for bucket in buckets:
        for name, flat in bucket.state.items():
            total["master" if name == "master" else "state"] += flat.nbytes
        if bucket.weights is not None:
            total["compact_weights"] += bucket.weights.nbytes
        for shard in bucket.shards:
            if isinstance(shard.param, ActiveWeight):
                total["compact_weights"] += shard.param.nbytes
                total["indices"] += shard.param.elements.index_bytes
        total["indices"] += bucket.index_bytes + (bucket.unsharded.index_bytes if bucket.is_sharded else 0)
        total["grad"] += bucket.gradient.values.nbytes
        if bucket.is_sharded:
            total["grad"] += bucket.nnz * bucket.gradient.values.element_size()
    shared = {id(bucket.indices) for bucket in buckets}
    for base in bases:
        total["base"] += base.values.nbytes + (0 if id(base.indices) in shared else base.index_bytes)
    return total


def copy_common(old_buckets: list[Bucket], new_buckets: list[Bucket]) -> None:
    """Copy the compact state of the elements that are in both masks, and the step counts of their parameters."""
    old = {shard: (bucket, i) for bucket in old_buckets for i, shard in enumerate(bucket.shards)}
    for bucket in new_buckets:
        for i, shard in enumerate(bucket.shards):
            if shard not in old:
                continue
            source, j = old[shard]
            bucket.steps[i] = source.steps[j]
            before, after = source.positions(j), bucket.positions(i)
            if not before.numel():  # the shard had no active element
                continue
            slot = torch.searchsorted(before, after).clamp_(max=before.numel() - 1)
            kept = before[slot] == after
            for name, flat in bucket.state.items():
                flat[bucket.segment(i)][kept] = source.state[name][source.segment(j)][slot[kept]]


def with_indices(
    state: Mapping[Tensor, dict[str, Any]], buckets: list[Bucket], bases: list[BaseWeights]
) -> defaultdict[Tensor, Any]:
    """Return the optimizer's state for saving, with each element's position in its parameter, for every pattern."""
    shown: defaultdict[Tensor, Any] = defaultdict(dict, {param: dict(values) for param, values in state.items()})
    made: dict[int, Tensor] = {}  # base weights may share their bucket's indices, which a file then stores once
    holders: list[tuple[str, LocalSegments]] = [("indices", b) for b in buckets] + [("base_indices", b) for b in bases]
    for key, holder in holders:
        if id(holder.indices) not in made:
            made[id(holder.indices)] = torch.cat([holder.positions_in_param(i) for i in range(len(holder.shards))])
        for i, shard in enumerate(holder.shards):
            shown[shard.param][key] = made[id(holder.indices)][holder.segment(i)]
    return shown


@dataclass(eq=False)
class SavedState:
    """The checked content of a state_dict, by the parameters of the optimizer that loads it."""

    names: dict[Parameter, str]
    states: States  # of the parameters that were saved with a state
    options: list[dict[str, Any]]  # of each group, copied

    @classmethod
    def of(
        cls,
        state_dict: Any,
        param_groups: list[dict[str, Any]],
        shards: Mapping[Parameter, Shard],
        buckets: list[Bucket],
        required: Collection[str],
    ) -> SavedState:
        """Check a state_dict against the optimizer's groups and buckets; ranges of options are not checked here.

        Args:
            shards: of all parameters. The states are those of the shards: a part of what was saved.
            required: the options that every group must have.

        Raises:
            ValueError: it is malformed, or was saved with another mask, shape, dtype or set of parameters.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"the saved state is a {type(state_dict).__name__}, expected a dict with 'state' and 'param_groups'"
            )
        groups = _groups(_entry(state_dict, "param_groups", (list, tuple), "list"), param_groups)
        keys = _keys(groups, param_groups)
        states = _states(_entry(state_dict, "state", Mapping, "dict"), keys, shards)
        names = {param: name for group in param_groups for name, param in _named(group)}
        _fit(states, names, buckets)
        return cls(names, states, [_options(i, group, required) for i, group in enumerate(groups)])

    def copy_options_(self, groups: list[dict[str, Any]]) -> None:
        """Copy the options into the parameter groups; a learning rate that is a tensor stays the same tensor."""
        for group, saved in zip(groups, self.options, strict=True):
            lr = group["lr"]
            group.update(saved)
            if isinstance(lr, Tensor):  # a CUDA graph may read it
                if any(other is not group and other["lr"] is lr for other in groups):
                    lr = lr.clone()
                value = saved["lr"]
                group["lr"] = lr.copy_(value.reshape(lr.shape)) if isinstance(value, Tensor) else lr.fill_(value)

    def copy_states_(self, buckets: Iterable[Bucket]) -> None:
        """Copy the states into the existing buffers."""
        for bucket in buckets:
            for i, shard in enumerate(bucket.shards):
                for key, here in bucket.parameter_state(i).items():
                    here.copy_(self.states[shard.param][key])

    def base_weights(
        self, buckets: Iterable[Bucket], shards: Mapping[Parameter, Shard]
    ) -> dict[Shard, tuple[Tensor, Tensor]]:
        """Return (positions in the local tensor, values) of the base weights saved for each shard, on its device.

        Raises:
            ValueError: a parameter was saved without base weights, or they are invalid.
        """
        active = {shard: (bucket, i) for bucket in buckets for i, shard in enumerate(bucket.shards)}
        held = {}
        for param, there in self.states.items():
            if isinstance(param, ActiveWeight):  # its base is the quantised weight
                continue
            name = self.names[param]
            if any(key not in there for key in _BASE):
                raise ValueError(
                    f"{name!r} was saved without base weights; build this optimizer with keep_base_weights=False"
                )
            shard, numel = shards[param], shards[param].local.numel()
            indices, values = there["base_indices"].to(param.device), there["base"].to(param.device)
            if values.dtype != param.dtype:
                raise ValueError(f"the base weights of {name!r} were saved as {values.dtype}, expected {param.dtype}")
            sound = indices.shape == values.shape and indices.dtype == index_dtype(param.numel()) and indices.dim() == 1
            if sound:
                indices = indices - shard.first
            if sound and indices.numel():
                sound = bool((indices[1:] > indices[:-1]).all() and indices[0] >= 0 and indices[-1] < numel)
            if sound and shard in active:
                bucket, i = active[shard]
                sound = _contains(indices, bucket.positions(i))
            if not sound:
                raise ValueError(
                    f"the base weights of {name!r} were saved with indices that are not theirs: expected an ascending "
                    "position for each value, those of all active elements among them"
                )
            held[shard] = (indices, values)
        return held


def _contains(ascending: Tensor, others: Tensor) -> bool:
    slots = torch.searchsorted(ascending, others).clamp_(max=max(ascending.numel() - 1, 0))
    return not others.numel() or (bool(ascending.numel()) and torch.equal(ascending[slots], others))


def _named(group: dict[str, Any]) -> Iterable[tuple[str, Parameter]]:
    return zip(group["param_names"], group["params"], strict=False)  # a ScalerProxy's parameter may follow, unnamed


def _entry(mapping: Mapping[Any, Any], key: str, types: Any, expected: str, what: str = "the saved state") -> Any:
    if key not in mapping:
        raise ValueError(f"{what} has no {key!r}")
    if not isinstance(mapping[key], types):
        raise ValueError(f"{key} of {what} is a {type(mapping[key]).__name__}, expected a {expected}")
    return mapping[key]


def _groups(saved: Any, here: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    sizes = []
    for i, group in enumerate(saved):
        what = f"parameter group {i} of the saved state"
        if not isinstance(group, Mapping):
            raise ValueError(f"{what} is a {type(group).__name__}, expected a dict")
        sizes.append(len(_entry(group, "params", (list, tuple), "list", what)))
    expected = [len(group["param_names"]) for group in here]
    if sizes != expected:
        raise ValueError(f"the saved state has parameter groups of {sizes} parameters, this optimizer of {expected}")
    for i, (group, own) in enumerate(zip(saved, here, strict=True)):
        names = group.get("param_names", own["param_names"])
        if not isinstance(names, (list, tuple)) or len(names) != len(own["param_names"]):
            raise ValueError(f"param_names of parameter group {i} of the saved state are not a list, one per parameter")
        for there, name in zip(names, own["param_names"], strict=True):
            if not isinstance(there, str) or there != name:
                raise ValueError(f"the saved state has parameter {shown(there)} where {name!r} is expected")
    return list(saved)


def _keys(groups: list[Mapping[str, Any]], here: list[dict[str, Any]]) -> dict[int | str, tuple[str, Parameter]]:
    """Return the saved state's key of each parameter -> (name, parameter)."""
    keys: dict[int | str, tuple[str, Parameter]] = {}
    for group, own in zip(groups, here, strict=True):
        for key, named in zip(group["params"], _named(own), strict=True):
            if not isinstance(key, (int, str)):
                raise ValueError(f"the saved state numbers {named[0]!r} {shown(key)}, expected an integer or a name")
            if key in keys:
                raise ValueError(f"the saved state names parameter {key!r} twice: {keys[key][0]!r} and {named[0]!r}")
            keys[key] = named
    return keys


def _states(
    saved: Mapping[Any, Any], keys: Mapping[int | str, tuple[str, Parameter]], shards: Mapping[Parameter, Shard]
) -> States:
    for key in saved:
        if key not in keys:
            raise ValueError(f"the saved state has a state for {shown(key)}, which is in no parameter group of it")
    states: States = {}
    for key, (name, param) in keys.items():  # in the same order on all ranks
        if key not in saved:
            continue
        values = saved[key]
        if not isinstance(values, Mapping):
            raise ValueError(f"the saved state of {name!r} is a {type(values).__name__}, expected a dict")
        if not shards[param].is_whole:
            from .ranks import sharded_state

            values = sharded_state.local_part(values, shards[param])
        for entry, value in values.items():
            if not isinstance(value, Tensor) or is_wrapper(value):
                found = type(value).__name__
            elif value.is_nested:
                found = "nested tensor"
            elif value.is_meta or value.layout != torch.strided:
                found = f"{value.layout} tensor on {value.device}"
            else:
                continue
            raise ValueError(f"{name!r}: {shown(entry)} was saved as a {found}, expected a dense tensor with values")
        states[param] = dict(values)
    return states


def _options(i: int, group: Mapping[Any, Any], required: Collection[str]) -> dict[str, Any]:
    what = f"parameter group {i} of the saved state"
    for name in required:
        if name not in group:
            raise ValueError(f"{what} has no option {name!r}")
    options = {}
    for name, value in group.items():
        if not isinstance(name, str):
            raise ValueError(f"{what} has an option {shown(name)}, expected names as text")
        if name not in _NOT_OPTIONS:
            try:
                options[name] = copy.deepcopy(value)
            except (TypeError, RuntimeError, copy.Error) as error:
                raise ValueError(f"{what}: option {name!r} can't be copied: {one_line(error)}") from error
    return options


def _fit(states: States, names: Mapping[Parameter, str], buckets: list[Bucket]) -> None:
    active = {shard.param: (bucket, i) for bucket in buckets for i, shard in enumerate(bucket.shards)}
    for param, name in names.items():
        has, had = param in active, "indices" in states.get(param, {})
        if has != had:
            raise ValueError(
                f"{name!r} is {'' if has else 'not '}active here, but {'' if had else 'not '}in the saved state"
            )
    for param, (bucket, i) in active.items():
        name = names[param]
        here = {"indices": bucket.positions_in_param(i), **bucket.parameter_state(i)}
        there = {k: v for k, v in states[param].items() if k not in _BASE}
        if there.keys() != here.keys():
            raise ValueError(f"{name!r} was saved with {shown(list(there))}, expected {sorted(here)}")
        same = there["indices"].dtype == here["indices"].dtype
        if not same or not torch.equal(there["indices"].to(here["indices"].device), here["indices"]):
            raise ValueError(
                f"{name!r} was saved under another mask: {there['indices'].numel()} active elements there, "
                f"{here['indices'].numel()} here, and not the same ones"
            )
        for key, value in there.items():
            if value.shape != here[key].shape or value.dtype != here[key].dtype:
                raise ValueError(
                    f"{name!r}: {key} was saved as {value.dtype} {list(value.shape)}, "
                    f"expected {here[key].dtype} {list(here[key].shape)}"
                )
        step = there["step"].item()
        if not 0 <= step < float("inf") or step != int(step):
            raise ValueError(f"{name!r}: step is {step}, expected a whole number >= 0")
