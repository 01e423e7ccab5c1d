"""Whole models and tensors on rank 0, gathered from the shards of `--parallel fsdp`, and the way back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparse_opt.optim.ranks.sharding import reshard

from .sharding import shard_of


class Outline:
    """A copy of a model without the values of its weights, made before the model is sharded.

    FSDP2 changes the classes of modules, and its modules cannot be copied; files are written from an ordinary model.
    """

    def __init__(self, model: nn.Module):
        memo: dict[int, Any] = {
            id(param): nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            for param in model.parameters()
        }
        self._model = copy.deepcopy(model, memo)

    def gather(self, model: nn.Module) -> Any:
        """The model of this outline with the weights of the sharded model, on the CPU of rank 0; None on other ranks.

        The weights are gathered one after the other. Those that the sharded model has frozen are frozen. All ranks must
        call it.
        """
        reshard(model)
        weights = {name: gather(param) for name, param in model.named_parameters()}
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        if dist.get_rank() != 0:
            return None
        memo: dict[int, Any] = {
            id(param): nn.Parameter(weights[name], requires_grad=name in trained)
            for name, param in self._model.named_parameters()
        }
        return copy.deepcopy(self._model, memo)


def gather(state: Any) -> Any:
    """A state of tensors, dicts, lists and tuples with whole tensors on the CPU of rank 0, in place of DTensors.

    On other ranks the DTensors become None. All ranks must call it with states of the same structure.
    """
    if isinstance(state, DTensor):
        whole = state.full_tensor().detach()
        return whole.cpu() if dist.get_rank() == 0 else None
    if isinstance(state, dict):
        return {key: gather(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(gather, state))
    return state


def scatter(whole: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shards of whole tensors that every rank has, where the tensor of the same name in `like` is sharded.

    A tensor of another shape is returned as it is.
    """
    return {
        name: shard_of(tensor, own)
        if isinstance(own := like.get(name), DTensor) and own.shape == tensor.shape
        else tensor
        for name, tensor in whole.items()
    }
