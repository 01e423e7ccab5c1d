"""Checks that all ranks of a process group have the same parameters, mask and options, and the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ...delta.digest import StateDigest
from ...masks.mask_set import MaskSet
from .group import require_same
from .sharding import Shard

# The arguments of an optimizer that must be the same on all ranks.
_ARGUMENTS = (
    "max_grad_norm",
    "state_dtype",
    "grad_dtype",
    "master_weights",
    "stochastic_rounding",
    "freeze_inactive",
    "keep_base_weights",
    "amp_scaling",
    "tile_backward",
)


def require_same_setup(optimizer: torch.optim.Optimizer, mask: MaskSet, group: dist.ProcessGroup) -> None:
    """Raise a RuntimeError unless all ranks have the same optimizer, options, parameters and mask."""
    entries: list[tuple[str, object]] = [("the optimizer", type(optimizer).__name__)]
    entries += [(name, str(getattr(optimizer, name))) for name in _ARGUMENTS]
    entries += _options(optimizer)
    for options in optimizer.param_groups:
        for name, param in zip(options["param_names"], options["params"], strict=False):
            entries.append((f"parameter {name!r}", f"{param.dtype} {list(param.shape)}"))
    entries.append(("the mask", f"{mask.pattern} {mask.digest}"))
    require_same(entries, group, optimizer.param_groups[0]["params"][0].device)


def _options(optimizer: torch.optim.Optimizer) -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for i, options in enumerate(optimizer.param_groups):
        for name in optimizer.defaults:
            value = options[name]
            entries.append((f"{name} of parameter group {i}", value.item() if isinstance(value, Tensor) else value))
    return entries


def require_same_weights(
    shards: Mapping[Parameter, Shard], named: Mapping[str, Parameter], group: dist.ProcessGroup
) -> None:
    """Raise a RuntimeError unless the ranks that store the same part of a weight have the same bits."""
    of_name = {name: shards[param] for name, param in named.items()}
    tensors = [(f"parameter {name!r}", shard.local.detach(), shard.number) for name, shard in of_name.items()]
    _require_same_bits(tensors, group, tensors[0][1].device)


def require_same_state(
    optimizer: torch.optim.Optimizer,
    n_steps: int,
    shards: Mapping[Parameter, Shard],
    named: Mapping[str, Parameter],
    group: dist.ProcessGroup,
) -> None:
    """Raise a RuntimeError unless all ranks have the same options, optimizer state and base weights, bit for bit.

    Args:
        n_steps: made on this rank. It is compared, because ranks with different shards have different states.
    """
    device = optimizer.param_groups[0]["params"][0].device
    require_same([*_options(optimizer), ("the number of steps", n_steps)], group, device)
    tensors = [
        (f"{key} of {name!r}", value, shards[param].number)
        for name, param in named.items()
        for key, value in optimizer.state.get(param, {}).items()
    ]
    _require_same_bits(tensors, group, device)


def _require_same_bits(
    tensors: Sequence[tuple[str, Tensor, int]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Compare (name, tensor, number of its shard); ranks with the same number must have the same bits."""
    digests = StateDigest.start([tensor for _, tensor, _ in tensors]).result()
    entries = [(name, f"digest {digest}") for (name, _, _), digest in zip(tensors, digests, strict=True)]
    require_same(entries, group, device, parts=[number for _, _, number in tensors])
