"""Transfers optimizer state to another mask, and to a state_dict. `saved_state` handles loading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base_weights import BaseWeights
from .buckets import Bucket
from .segments import Segments


def carry(old_buckets: list[Bucket], new_buckets: list[Bucket]) -> None:
    """Copy the compact state of the elements that are in both masks, and the step counts of their parameters."""
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
    """Return the optimizer's state for saving, with the position of each element, for every pattern."""
    shown: defaultdict[Tensor, Any] = defaultdict(dict, {param: dict(values) for param, values in state.items()})
    made: dict[int, Tensor] = {}  # base weights may share their bucket's indices, which a file then stores once
    holders: list[tuple[str, Segments]] = [("indices", b) for b in buckets] + [("base_indices", b) for b in bases]
    for key, holder in holders:
        if id(holder.indices) not in made:
            made[id(holder.indices)] = torch.cat([holder.positions(i) for i in range(len(holder.params))])
        for i, param in enumerate(holder.params):
            shown[param][key] = made[id(holder.indices)][holder.segment(i)]
    return shown
