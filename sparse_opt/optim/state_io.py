"""State on its way to another mask, and out to a state_dict. `saved_state` has the way in."""

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
