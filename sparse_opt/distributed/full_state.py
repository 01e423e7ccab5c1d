"""Gathers the state of a sharded model on rank 0."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..delta.state import FullState


def full_state(model: nn.Module) -> nn.Module | Mapping[str, Tensor]:
    """Gather the state of a model under `fully_shard` on rank 0, for a `DeltaLog`. All ranks must call it.

    Tensors are gathered one after the other, so that the other ranks never hold more than one full tensor.

    Returns:
        On rank 0 the full tensors on the CPU, under the names and in the order of `model.state_dict()`; tied tensors
        are one tensor. On the other ranks an empty state. The model itself if it is not sharded.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return model
    state = model.state_dict()
    first_names: dict[nn.Parameter, str] = {}
    firsts = {name: first_names.setdefault(parameter, name) for name, parameter in parameters.items()}
    gathered = FullState(state.keys() - parameters.keys())
    for name, tensor in state.items():
        first = firsts.get(name, name)
        if first == name:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            gathered[name] = full.cpu() if first == name else gathered[first]
    return gathered
