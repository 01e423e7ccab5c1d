"""State across masks and across processes: carrying it to a new mask, and loading a state_dict."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .base_weights import BaseWeights, rebuild
from .buckets import Bucket
from .segments import Segments, index_dtype

_BASE = ("base_indices", "base")


def carry(old_buckets: list[Bucket], new_buckets: list[Bucket]) -> None:
    """Copy the compact state of the elements that both masks have, and the step counts of their parameters."""
    old = {param: (bucket, i) for bucket in old_buckets for i, param in enumerate(bucket.params)}
    for bucket in new_buckets:
        for i, param in enumerate(bucket.params):
            if param not in old:
                continue
            source, j = old[param]
            bucket.steps[i] = source.steps[j]
            before, after = source.positions(j), bucket.positions(i)
            slot = torch.searchsorted(before, after).clamp_(max=before.numel() - 1)
            kept = before[slot] == after
            for name, flat in bucket.state.items():
                flat[bucket.segment(i)][kept] = source.state[name][source.segment(j)][slot[kept]]


def with_indices(
    state: Mapping[Tensor, dict[str, Any]], buckets: list[Bucket], bases: list[BaseWeights]
) -> defaultdict[Tensor, Any]:
    """The optimizer's state as it is saved: with the position of each element, also where the mask takes runs."""
    shown: defaultdict[Tensor, Any] = defaultdict(dict, {param: dict(values) for param, values in state.items()})
    made: dict[int, Tensor] = {}  # base weights may share their bucket's indices, and a file then holds them once
    holders: list[tuple[str, Segments]] = [("indices", b) for b in buckets] + [("base_indices", b) for b in bases]
    for key, holder in holders:
        if id(holder.indices) not in made:
            made[id(holder.indices)] = torch.cat([holder.positions(i) for i in range(len(holder.params))])
        for i, param in enumerate(holder.params):
            shown[param][key] = made[id(holder.indices)][holder.segment(i)]
    return shown


def _check(
    state_dict: dict[str, Any], param_groups: list[dict[str, Any]], buckets: list[Bucket]
) -> dict[Parameter, dict[str, Tensor]]:
    """The saved state of each parameter, once everything about it fits what is here."""
    saved_groups = state_dict["param_groups"]
    sizes = [len(g["params"]) for g in param_groups]
    saved_sizes = [len(g["params"]) for g in saved_groups]
    if saved_sizes != sizes:
        raise ValueError(f"the saved state has parameter groups of {saved_sizes} parameters, this optimizer of {sizes}")
    saved: dict[Parameter, dict[str, Tensor]] = {}
    names: dict[Parameter, str] = {}
    for group, saved_group in zip(param_groups, saved_groups, strict=True):
        if saved_group.get("param_names", group["param_names"]) != group["param_names"]:
            difference = _first_difference(saved_group["param_names"], group["param_names"])
            raise ValueError(f"the saved state has parameter {difference}")
        for name, param, key in zip(group["param_names"], group["params"], saved_group["params"], strict=True):
            names[param] = name
            if key in state_dict["state"]:
                saved[param] = state_dict["state"][key]

    active = {param: (bucket, i) for bucket in buckets for i, param in enumerate(bucket.params)}
    for param, name in names.items():
        has, had = param in active, "indices" in saved.get(param, {})
        if has != had:
            raise ValueError(
                f"{name!r} is {'' if has else 'not '}active here, but {'' if had else 'not '}in the saved state"
            )
    for param, (bucket, i) in active.items():
        here = {"indices": bucket.positions(i), **bucket.parameter_state(i)}
        there = {k: v for k, v in saved[param].items() if k not in _BASE}
        if there.keys() != here.keys():
            raise ValueError(f"{names[param]!r} was saved with {sorted(there)}, wanted {sorted(here)}")
        if not torch.equal(there["indices"].to(here["indices"].device), here["indices"]):
            raise ValueError(
                f"{names[param]!r} was saved under another mask: {there['indices'].numel()} active elements there, "
                f"{here['indices'].numel()} here, and not the same ones"
            )
        for key, value in there.items():
            if value.shape != here[key].shape or value.dtype != here[key].dtype:
                raise ValueError(
                    f"{names[param]!r}: {key} was saved as {value.dtype} {list(value.shape)}, "
                    f"wanted {here[key].dtype} {list(here[key].shape)}"
                )
    return saved


def _first_difference(saved: list[str], here: list[str]) -> str:
    return next(f"{a!r} where {b!r} is wanted" for a, b in zip(saved, here, strict=True) if a != b)


def _held_bases(
    saved: dict[Parameter, dict[str, Tensor]],
) -> dict[Parameter, tuple[Tensor, Tensor]]:
    """(indices, values) of the base weights saved for each parameter, checked."""
    held = {}
    for param, there in saved.items():
        if any(key not in there for key in _BASE):
            raise ValueError(
                "the state was saved without base weights; build this optimizer with keep_base_weights=False"
            )
        indices, values = there["base_indices"].to(param.device), there["base"].to(param.device)
        if values.dtype != param.dtype:
            raise ValueError(f"base weights were saved as {values.dtype}, the parameter is {param.dtype}")
        sound = indices.shape == values.shape and indices.dtype == index_dtype(param) and indices.dim() == 1
        if sound and indices.numel():
            sound = bool((indices[1:] > indices[:-1]).all() and indices[0] >= 0 and indices[-1] < param.numel())
        if not sound:
            raise ValueError(
                "base weights were saved with indices that are not theirs: not ascending positions of each"
            )
        held[param] = (indices, values)
    return held


def load(
    state_dict: dict[str, Any],
    param_groups: list[dict[str, Any]],
    buckets: list[Bucket],
    bases: list[BaseWeights],
    backend: str | None,
) -> list[BaseWeights]:
    """Check all, then copy states and group options in; returns the base weights as they were saved."""
    saved = _check(state_dict, param_groups, buckets)
    loaded = rebuild(buckets, _held_bases(saved), backend) if bases else []
    for bucket in buckets:
        for i, param in enumerate(bucket.params):
            for key, here in bucket.parameter_state(i).items():
                here.copy_(saved[param][key])
    for group, saved_group in zip(param_groups, state_dict["param_groups"], strict=True):
        options = {k: v for k, v in saved_group.items() if k not in ("params", "param_names")}
        group.update(copy.deepcopy(options))
    return loaded
