"""`GradientAveraging`: the backward passes of a run, whose gradients are averaged over its ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparse_opt.optim import SparseOptimizer

from ..ranks import Ranks


class GradientAveraging:
    """A SparseOptimizer averages compact gradients itself; those of other optimizers' weights are averaged by DDP or,
    of a sharded model, by FSDP2.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, optimizer: Any):
        self._ranks = ranks
        self._ddp: DistributedDataParallel | None = None
        if ranks.size > 1 and not ranks.sharded and not isinstance(optimizer, SparseOptimizer):
            weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._ddp = DistributedDataParallel(_Identity(weights), gradient_as_bucket_view=True)
        self._reducer = optimizer if self._ddp is None else self._ddp
        # Of a sharded model FSDP2 averages the gradients in every backward pass, so that none is ever held whole.
        self._averages_each = ranks.sharded and not isinstance(optimizer, SparseOptimizer)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Backpropagate this rank's part of a loss that is a sum over the ranks; see `TrainingRun.backward`."""
        if self._ranks.size == 1:
            loss.backward()
            return
        loss = loss * self._ranks.size  # the mean over the ranks is the sum of their parts
        with nullcontext() if is_last or self._averages_each else self._reducer.no_sync():
            (loss if self._ddp is None else self._ddp(loss)).backward()


class _Identity(nn.Module):
    """Holds weights for DDP, which averages their gradients in the backward pass of what its forward returns.

    DDP does not wrap the model, because log-probabilities are computed from parts of it.
    """

    def __init__(self, weights: list[nn.Parameter]):
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, loss: Tensor) -> Tensor:
        return loss
