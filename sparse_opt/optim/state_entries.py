"""The optimizer's state as torch sees it, for another mask, and for a state_dict. `state_loading` checks one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base_weights import BaseWeights
from .buckets import Bucket
from .segments import LocalSegments


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
        total["indices"] += bucket.index_bytes + (bucket.unsharded.index_bytes if bucket.is_sharded else 0)
        total["grad"] += bucket.gradient.values.nbytes
        if bucket.is_sharded:
            total["grad"] += bucket.nnz * bucket.gradient.values.element_size()
    shared = {id(bucket.indices) for bucket in buckets}
    for base in bases:
        total["base"] += base.values.nbytes + (0 if id(base.indices) in shared else base.index_bytes)
    return total


def copy_common_state(old_buckets: list[Bucket], new_buckets: list[Bucket]) -> None:
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
