"""Compact tensors of sharded parameters in a state_dict: DTensors that `torch.distributed.checkpoint` can reshard.

Each is saved as one 1-D tensor over the active elements of the whole parameter, in ascending order, whatever the number
of ranks; each rank holds those of its rows, any number. This module is imported only if parameters are sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# Not public, but torch has no other class for parts of different lengths, and torch.distributed.checkpoint supports it.
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from .sharding import Shard

_STEP = "step"  # a scalar, equal on all ranks
_POSITIONS = ("indices", "base_indices")


def as_dtensors(state: Mapping[Tensor, Mapping[str, Tensor]], shards: Sequence[Shard]) -> defaultdict[Tensor, Any]:
    """Return a state with the compact tensors of these sharded parameters as DTensors. All ranks must call it.

    The values are copies: `torch.distributed.checkpoint.load` writes into the tensors of a state_dict before
    `load_state_dict` can check that the saved state belongs to the optimizer's mask.
    """
    mesh, device = shards[0].mesh, shards[0].local.device
    assert mesh is not None  # the parameters are sharded
    counts = torch.zeros(len(shards), len(_POSITIONS), dtype=torch.int64, device="cpu")
    for i, shard in enumerate(shards):
        for j, name in enumerate(_POSITIONS):
            if name in state.get(shard.param, {}):
                counts[i, j] = state[shard.param][name].numel()
    counts = counts.to(device)
    gathered = [torch.empty_like(counts) for _ in range(mesh.size(mesh.ndim - 1))]
    dist.all_gather(gathered, counts, group=mesh.get_group(mesh.ndim - 1))
    of_ranks = torch.stack(gathered).cpu()
    firsts, numels = of_ranks[: shards[0].number].sum(0).tolist(), of_ranks.sum(0).tolist()
    sharded: defaultdict[Tensor, Any] = defaultdict(dict, {param: dict(values) for param, values in state.items()})
    for shard, first, numel in zip(shards, firsts, numels, strict=True):
        for name, value in state.get(shard.param, {}).items():
            if name != _STEP:
                i = _POSITIONS.index(_positions_of(name))
                sharded[shard.param][name] = _as_dtensor(value, shard.param, first[i], numel[i])
    return sharded


def _as_dtensor(part: Tensor, param: Any, first: int, numel: int) -> DTensor:
    # Checkpoints know a part by its offset, and keep one of several with the same: an empty one is put at the end.
    offset = (first if part.numel() else numel,)
    local: Any = LocalShardsWrapper([part.clone()], [offset])
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=torch.Size([numel]), stride=(1,)
    )


def _positions_of(name: str) -> str:
    """Return the name of the tensor with the positions of a compact tensor's elements."""
    return "base_indices" if name in ("base", "base_indices") else "indices"


def local_part(saved: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """Return this rank's part of the saved state of a sharded parameter.

    The saved tensors may be those of `as_dtensors`; or over all active elements, as one device saves them; or DTensors
    that torch's `set_optimizer_state_dict` makes from a full state dict, which are gathered: all ranks must call this.
    What does not fit the parameter is returned as it is.
    """
    parts, whole = dict(saved), {}
    for name, value in sorted(saved.items()):
        if isinstance(value, DTensor):
            local: Any = value.to_local()
            if isinstance(local, LocalShardsWrapper):
                parts[name] = local.local_shards()[0]
            else:
                whole[name] = value.full_tensor()
        elif isinstance(value, Tensor) and value.dim() == 1:
            whole[name] = value
    for name, value in whole.items():
        positions = whole.get(_positions_of(name))
        if positions is not None and positions.shape == value.shape:
            rows = [shard.first, shard.first + shard.local.numel()]
            ends = torch.tensor(rows, dtype=positions.dtype, device=positions.device)
            begin, end = torch.searchsorted(positions, ends).tolist()
            parts[name] = value[begin:end]
    return parts
