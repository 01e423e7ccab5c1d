"""What rank 0 does for all ranks, such as writing a delta log: the state of a sharded model, errors on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..delta.state import FullState
from ..errors import DeltaLogError
from ..tensors import holds_base_weights

T = TypeVar("T")


def full_state(model: nn.Module) -> nn.Module | Mapping[str, Tensor]:
    """Gather the state of a model under `fully_shard` on rank 0, for a `DeltaLog`. All ranks must call it.

    Returns:
        On rank 0 the full tensors on the CPU, as in `model.state_dict()`; tied tensors are one tensor. On the other
        ranks an empty state. The model itself if it is not sharded.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return model
    state = model.state_dict()
    first_names: dict[nn.Parameter, str] = {}
    firsts = {name: first_names.setdefault(parameter, name) for name, parameter in parameters.items()}
    gathered = FullState(state.keys() - parameters.keys(), holds_base_weights(parameters.values()))
    for name, tensor in state.items():
        first = firsts.get(name, name)
        if first == name:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            gathered[name] = full.cpu() if first == name else gathered[first]
    return gathered


def on_rank_0(function: Callable[[], T], error_type: type[Exception] = DeltaLogError) -> T | None:
    """Call `function` on rank 0 and return its result there, None on the other ranks. All ranks must call this.

    Raises:
        error_type: on the other ranks, if `function` raised an error, which rank 0 raises itself.
    """
    result, failed = None, ["it was interrupted"]
    try:
        if dist.get_rank() == 0:
            result = function()
        failed = [""]
    except Exception as error:  # of any type: the other ranks must not wait for this one, which raises it
        failed = [str(error)]
        raise
    finally:
        dist.broadcast_object_list(failed, src=0)
        if dist.get_rank() != 0 and failed[0]:
            raise error_type(f"rank 0: {failed[0]}")
    return result
