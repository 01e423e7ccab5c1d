"""The reference policy: the run's initial weights, in the cheapest form for its mode, or another model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparse_opt.optim import SparseOptimizer

from ..options import ReferenceOptions, TrainingOptions
from ..ranks import ONE_RANK, Ranks
from ..rollouts import Rollout
from .models import (
    compile_layers,
    disable_dropout,
    frozen_copy,
    load_for_training,
    load_policy,
    make_masks_skippable,
)
from .sharding import shard


class Reference(NamedTuple):
    """A module and the context that sets its weights: `with torch.no_grad(), reference.weights():`.

    `weights` is not wrapped in another context manager, because one that is interrupted while it exits `base_weights()`
    would not restore the policy.
    """

    model: nn.Module
    weights: Callable[[], AbstractContextManager[Any]]  # a context in which the module has the reference's weights


def make_reference(
    config: TrainingOptions,
    policy: Any,
    optimizer: Any,
    device: torch.device,
    *,
    offload: bool = False,
    sharded: bool = False,
) -> Reference:
    """The initial weights: swapped into the policy (mode sparse), the policy without its adapters (lora), or a frozen
    second model (dense); or the model `ref_name`, in the policy's dtype.

    Call this before the policy's weights change. With `offload`, a second model is on the CPU while it is not in use;
    with `sharded`, all ranks call this, and it is sharded.

    Raises:
        DataError: ref_name cannot be loaded.
    """
    other_name = config.ref_name if isinstance(config, ReferenceOptions) else None
    if other_name is None and isinstance(optimizer, SparseOptimizer):
        return Reference(policy, optimizer.base_weights)
    if other_name is None and config.mode == "lora":
        return Reference(policy, policy.disable_adapter)
    if other_name is not None:
        separate = load_frozen(other_name, config.dtype)
    elif sharded:  # and cannot be copied
        separate = load_policy(config, None).requires_grad_(False)
    else:
        separate = frozen_copy(policy)
    if config.compile:
        compile_layers(separate)
    return placed(separate, device, offload=offload, sharded=sharded)


def load_frozen(name: str, dtype: str) -> Any:
    """A model by hub name or folder, without gradients and dropout, on the CPU, in `dtype` (a key of `models.DTYPES`).

    Raises:
        DataError: it cannot be loaded.
    """
    model = load_for_training(name, dtype).requires_grad_(False)
    disable_dropout(model)
    make_masks_skippable(model)
    return model


def placed(model: nn.Module, device: torch.device, *, offload: bool, sharded: bool = False) -> Reference:
    """A separate model on the device, sharded or whole; with `offload` it is on the CPU while it is not in use."""
    if sharded:
        shard(model, device)
        return Reference(model, nullcontext)
    if offload:
        model.to("cpu")
        return Reference(model, lambda: on_device(model, device))
    return Reference(model.to(device), nullcontext)


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A context in which the model is on the device; outside it is on the CPU."""
    model.to(device)
    try:
        yield
    finally:
        model.to("cpu")


def rollout_logprobs(
    reference: Reference, sampled: Rollout, temperature: float, rows_per_pass: int, ranks: Ranks = ONE_RANK
) -> Tensor:
    """Log-probabilities of a rollout's sampled tokens under the reference: [R, P] fp32, 0 elsewhere.

    The ranks share the rows, and all get all log-probabilities.
    """
    logprobs = torch.zeros_like(sampled.logprobs)
    with torch.no_grad(), reference.weights():
        for rows, part in sampled.minibatches(rows_per_pass, ranks):
            sampled.cut(logprobs, rows).copy_(part.token_logprobs(reference.model, temperature))
    return ranks.sum(logprobs)
