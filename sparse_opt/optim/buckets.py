"""Bucket: the parameters that one call of the step's op covers, and their compact state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops.checks import FLOAT_DTYPES
from .compact_weights import CompactWeights
from .gradients.gradient_buffer import GradientBuffer
from .segments import LocalSegments, Segments


@dataclass(eq=False)
class Bucket(LocalSegments):
    """The active parameters of one group, device, dtype and layout of indices, and their compact buffers.

    The step, the state and the base weights are those of the local shards; the gradient is that of the whole
    parameters. Without FSDP2 both are the same. Local slot s of shard i has slot s + first_slots[i] among the active
    elements of the parameter.
    """

    unsharded: Segments  # of the whole parameters
    first_slots: list[int]
    group: dict[str, Any]
    names: list[str]
    ordinal: int  # number of the bucket; gives each bucket its own random stream
    ops: Any  # one attribute per op, on the chosen backend
    lr: Tensor  # [1] fp32
    steps: Tensor  # [n] fp32
    state: dict[str, Tensor] = field(default_factory=dict)  # name -> [nnz]
    weights: CompactWeights | None = None  # None: the model's weights are read where they are
    filled_lr: float | None = None
    gradient: GradientBuffer = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._local_grad: Tensor | None = None

    @property
    def is_sharded(self) -> bool:
        return not self.shards[0].is_whole

    def nnz_of_param(self, i: int) -> int:
        """Return the number of active elements of the whole parameter i, on all ranks."""
        return self.unsharded.ends[i] - self.unsharded.starts[i]

    def local_grad(self) -> Tensor:
        """Return the compact gradient of the local shards: [nnz]. Call `gradient.finish` first."""
        if not self.is_sharded:
            return self.gradient.values
        values = self.gradient.values
        if self._local_grad is None:
            self._local_grad = values.new_empty(self.nnz)
            firsts = [start + slot for start, slot in zip(self.unsharded.starts, self.first_slots, strict=True)]
            counts = (end - start for start, end in zip(self.starts, self.ends, strict=True))
            self._local_parts = [values[first : first + n] for first, n in zip(firsts, counts, strict=True)]
        return torch.cat(self._local_parts, out=self._local_grad)

    def check_shards(self) -> None:
        """Raise a RuntimeError that names the first sharded parameter which the optimizer has lost track of."""
        for name, shard in zip(self.names, self.shards, strict=True) if self.is_sharded else ():
            if not shard.is_current():
                raise RuntimeError(f"the local shard of {name!r} was replaced after the optimizer was built")
            if shard.param.grad is not None:
                raise RuntimeError(f"{name!r} has a dense gradient, reduced by fully_shard, that no hook has seen")

    def check_params(self) -> None:
        """Raise a ValueError that names the first parameter which the ops cannot take."""
        for name, param, numel in zip(self.names, self.params, self.numels, strict=True):
            if param.numel() != numel:
                raise ValueError(f"{name!r} has {param.numel()} elements, but had {numel} when its mask was bound")
            if param.device != self.device:
                raise ValueError(f"{name!r} is on {param.device}, but was on {self.device} when its mask was bound")
            if param.dtype not in FLOAT_DTYPES:
                raise ValueError(f"{name!r} is {param.dtype}, expected bfloat16, float16 or float32")
            if param.dtype != self.params[0].dtype:
                raise ValueError(f"{name!r} is {param.dtype}, but {self.names[0]!r} is {self.params[0].dtype}")
            if not param.is_contiguous():
                raise ValueError(f"{name!r} has strides {param.stride()}, expected a contiguous parameter")

    def refresh_lr(self) -> Tensor:
        """Return the group's learning rate on the device; it is copied there only after a change."""
        lr = self.group["lr"]
        if isinstance(lr, Tensor):
            self.lr.copy_(lr, non_blocking=True)
            self.filled_lr = None
        elif lr != self.filled_lr:
            self.lr.fill_(lr)
            self.filled_lr = lr
        return self.lr

    def parameter_state(self, i: int) -> dict[str, Tensor]:
        """Return views of parameter i's part of the flat buffers, under the names of torch's optimizers."""
        views = {name: flat[self.segment(i)] for name, flat in self.state.items()}
        return {"step": self.steps[i], **views}
