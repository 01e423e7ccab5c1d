"""Sparse high-rank adapters (SHiRA, https://arxiv.org/abs/2406.13175): their rank for a density, and peft's layers."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from sparse_opt.errors import ConfigError


def shira_rank(model: Any, density: float) -> int:
    """The rank at which SHiRA's values are closest to this share of the weights that `add_shira` adapts.

    A rank of r means r * (m + n) values for each weight of m x n (PEFT's `ShiraConfig`), so most shares are only
    approximated. The model may be on the meta device.

    Raises:
        ConfigError: no rank is close enough, or SHiRA cannot adapt a layer of this kind.
    """
    shapes = _linear_shapes(model)
    per_rank, numel = sum(m + n for m, n in shapes), sum(m * n for m, n in shapes)
    rank = math.floor(density * numel / per_rank + 0.5)
    if rank < 1:
        raise ConfigError(
            f"SHiRA cannot have density {density:.3g}: on this model's linear layers its least, of rank 1, is "
            f"{per_rank / numel:.3g}"
        )
    highest = min(m * n // (m + n) for m, n in shapes)
    if rank > highest:
        raise ConfigError(
            f"SHiRA cannot have density {density:.3g}: it needs rank {rank}, and the smallest of this model's linear "
            f"layers allows {highest}"
        )
    return rank


def require_shira_rank(model: Any, rank: int) -> None:
    """Raise ConfigError if `add_shira` does not support this rank; the model may be on the meta device."""
    for m, n in _linear_shapes(model):
        if rank * (m + n) > m * n:
            raise ConfigError(f"SHiRA of rank {rank} needs {rank * (m + n)} values of a weight of {m} x {n} = {m * n}")


def _linear_shapes(model: Any) -> list[tuple[int, int]]:
    """(m, n) of each weight in PEFT's "all-linear": of every linear layer except the output layer."""
    from transformers.pytorch_utils import Conv1D

    shapes = []
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise ConfigError(f"SHiRA adapts torch.nn.Linear, and {name} is a {type(module).__name__}")
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            shapes.append((module.out_features, module.in_features))
    if not shapes:
        raise ConfigError(f"SHiRA adapts torch.nn.Linear, and {type(model).__name__} has none but its output layer")
    return shapes


def add_shira(model: Any, rank: int, seed: int) -> Any:
    """Sparse high-rank adapters on the layers of `trainers.models.add_lora`, the rest frozen.

    Each adapted weight of m x n has rank * (m + n) values at random positions, drawn by PEFT on the CPU with the same
    seed for every layer. They are added to `model` itself, have its dtype, and initially change nothing.

    Returns:
        The model in a PEFT wrapper, whose `disable_adapter()` restores the initial weights.

    Raises:
        ConfigError: SHiRA cannot adapt a layer of this kind, or a layer is too small for the rank.
    """
    from peft import ShiraConfig, get_peft_model

    require_shira_rank(model, rank)
    config = ShiraConfig(r=rank, target_modules="all-linear", random_seed=seed, task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)
