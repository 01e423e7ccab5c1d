"""`GraphedSteps`: optimizer steps as CUDA graphs, for the option `cuda_graphs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_opt.errors import ConfigError
from sparse_opt.optim import GraphedStep, SparseOptimizer

from .batches import TokenBatch
from .models import attends_without_masks
from .shared_prompts import SeparateRows

# The work of an optimizer step: from the batches of its forward passes and further tensors, all on the device, to
# results by name.
WholeStep = Callable[[Sequence[TokenBatch], Sequence[Tensor]], dict[str, Tensor]]


def require_graphs(model: Any, optimizer: Any, device: torch.device) -> None:
    """Raise ConfigError if steps of this run cannot be replayed as CUDA graphs."""
    why = ""
    if device.type != "cuda":
        why = f"the device is {device}: expected a GPU"
    elif not isinstance(optimizer, SparseOptimizer):
        why = f"the optimizer is {type(optimizer).__name__}: expected a mask, whose optimizer can be captured"
    elif optimizer.backend == "reference":
        why = "backend reference reads step counts on the host: expected cuda or triton"
    elif not attends_without_masks(model):
        why = (
            f"transformers makes attention masks for models of type {model.config.model_type} here, and decides on the "
            "host whether one is needed, so that replays could differ from other steps"
        )
    if why:
        raise ConfigError(f"option 'cuda_graphs' is true, and {why}")


class GraphedSteps:
    """Calls a `WholeStep` through `GraphedStep`.

    With shared prompts, the batches' layout must be `SeparateRows`, which has no numbers on the host. In the batches
    that the function receives, `n_tokens` and `n_trained` are 0: a replay would repeat those of the capture.
    """

    def __init__(self, function: WholeStep, optimizer: Any):
        self._function, self._optimizer = function, optimizer
        self._step: GraphedStep | None = None
        self._n_batches = self._n_parts = 0  # a step's forward passes, and the tensors of one

    def __call__(self, batches: Sequence[TokenBatch], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Take a step. The results are overwritten by the next call for batches of the same shapes."""
        if self._step is None:
            for group in self._optimizer.param_groups:  # a graph reads rates from the GPU
                device = group["params"][0].device
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
            self._step = GraphedStep(self._captured, self._optimizer)
            self._n_batches, self._n_parts = len(batches), len(_tensors(batches[0]))
        if len(batches) != self._n_batches:
            raise ValueError(f"a step has {len(batches)} forward passes after steps of {self._n_batches}")
        return dict(self._step(*(part for batch in batches for part in _tensors(batch)), *tensors))

    def _captured(self, *inputs: Tensor) -> dict[str, Tensor]:
        end = self._n_parts * self._n_batches
        batches = [_batch(*inputs[i : i + self._n_parts]) for i in range(0, end, self._n_parts)]
        return self._function(batches, inputs[end:])


def _tensors(batch: TokenBatch) -> tuple[Tensor, ...]:
    """What a graph depends on; `first_trained` follows from the shapes."""
    parts = batch.input_ids, batch.attention_mask, batch.completion_mask[:, batch.first_trained :]
    if batch.branches is None:
        return parts
    assert batch.position_ids is not None
    assert isinstance(batch.branch_layout, SeparateRows), "pieces of rows have numbers on the host"
    return *parts, batch.position_ids, batch.branches, *batch.branch_layout


def _batch(
    input_ids: Tensor,
    attention_mask: Tensor,
    trained: Tensor,
    position_ids: Tensor | None = None,
    branches: Tensor | None = None,
    *layout: Tensor,
) -> TokenBatch:
    """The batch of `_tensors`."""
    first_trained = input_ids.shape[1] - trained.shape[1]
    return TokenBatch(
        input_ids,
        attention_mask,
        F.pad(trained, (first_trained, 0)),
        first_trained,
        n_tokens=0,
        n_trained=0,
        position_ids=position_ids,
        branches=branches,
        branch_layout=SeparateRows(*layout) if layout else None,
    )
