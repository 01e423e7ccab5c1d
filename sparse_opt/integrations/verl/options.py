"""Builds the optimizer of a verl engine from verl's own configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

from ...errors import ConfigError
from ...masks import MaskSet, RandomMask
from ...optim import SparseAdamW, SparseLion, SparseOptimizer, SparseSGD

STRATEGY = "sparse_fsdp2"
_OPTIMIZERS: dict[str, type[SparseOptimizer]] = {"AdamW": SparseAdamW, "Lion": SparseLion, "SGD": SparseSGD}
_RANDOM_MASK = ("mask_density", "mask_pattern", "mask_seed", "mask_pool", "mask_routers")  # the fields of RandomMask
# Set by verl's other options, or by the engine.
_NOT_HERE = ("params", "mask", "lr", "weight_decay", "max_grad_norm", "model", "process_group", "amp_scaling")


@dataclass
class SparseFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDPEngineConfig with the strategy sparse_fsdp2, for trainers that read the strategy from the engine.

    verl's class accepts its own strategies only. verl's SFT trainer takes this one with
    `engine._target_=sparse_opt.integrations.verl.SparseFSDPEngineConfig`. The PPO trainer does not need it.
    """

    strategy: str = STRATEGY

    def __post_init__(self) -> None:
        set_strategy(self, "fsdp2")
        super().__post_init__()
        set_strategy(self, STRATEGY)


def set_strategy(config: FSDPEngineConfig, strategy: str) -> None:
    """Set the strategy of a config, whose fields are read-only; verl's FSDPActorConfig does the same."""
    object.__setattr__(config, "strategy", strategy)


def require_supported(config: FSDPEngineConfig) -> None:
    """Check the options of an engine that trains.

    Raises:
        ConfigError: an option is not supported with a sparse optimizer; the message says what to do.
    """
    for name in ("param_offload", "offload_policy"):
        if getattr(config, name):
            raise ConfigError(
                f"{name}=True is not supported with strategy {STRATEGY}: the optimizer needs the weights where they "
                f"are; set {name}=False"
            )
    if config.optimizer_offload:
        raise ConfigError(
            f"optimizer_offload=True is not supported with strategy {STRATEGY}, whose optimizer state is that of the "
            "active elements: set optimizer_offload=False"
        )
    if (config.mixed_precision or {}).get("param_dtype") in ("fp16", "float16"):
        raise ConfigError(
            f"mixed_precision.param_dtype=fp16 is not supported with strategy {STRATEGY}: verl's loss scaler cannot "
            "see compact gradients; use bf16 or fp32"
        )
    if getattr(config.qat, "enable", False):
        raise ConfigError(f"qat.enable=True is not supported with strategy {STRATEGY}")


def build_optimizer(model: nn.Module, config: FSDPOptimizerConfig) -> SparseOptimizer:
    """Build the optimizer of a model that is already sharded.

    Args:
        config: `optimizer` is AdamW, Lion or SGD, or their names in this package; lr, weight_decay and, for AdamW,
            betas are used as verl does. `override_optimizer_config` has `mask`, a file or the density of a random mask,
            or `mask_density` with `mask_pattern`, `mask_seed` and `mask_pool`, and the other options of the optimizer;
            dtypes are given by name, as in state_dtype: bfloat16.

    Raises:
        ConfigError: an option is unknown or missing.
        MaskError, ValueError: as the optimizer's constructor.
    """
    found = _OPTIMIZERS.get(config.optimizer.removeprefix("Sparse"))
    if found is None:
        raise ConfigError(f"optim.optimizer is {config.optimizer}, expected one of {', '.join(_OPTIMIZERS)}")
    given = dict(config.override_optimizer_config or {})
    mask = _mask(model, {name: given.pop(name) for name in ("mask", *_RANDOM_MASK) if name in given})
    names = [name for name in inspect.signature(found).parameters if name not in _NOT_HERE]
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(
            f"override_optimizer_config.{unknown[0]} is not an option: expected mask, {', '.join(_RANDOM_MASK)}, "
            f"{', '.join(names)}"
        )
    options = {name: _value(name, value) for name, value in given.items()}
    if found is SparseAdamW:
        options.setdefault("betas", tuple(config.betas))
    return found(model, mask, lr=config.lr, weight_decay=config.weight_decay, **options)


def _mask(model: nn.Module, given: Mapping[str, Any]) -> MaskSet | RandomMask:
    where = "override_optimizer_config."
    if ("mask" in given) == ("mask_density" in given):
        raise ConfigError(
            f"strategy {STRATEGY} needs either {where}mask, a file or a density, or {where}mask_density of a random "
            f"mask: add +actor_rollout_ref.actor.optim.{where}mask=FILE"
        )
    if "mask" in given:
        if extra := [name for name in _RANDOM_MASK if name in given]:
            raise ConfigError(f"{where}{extra[0]} has no effect with {where}mask")
        mask = given["mask"]
        return RandomMask(mask) if isinstance(mask, int | float) else MaskSet.load(mask, model)
    return RandomMask(**{name.removeprefix("mask_"): value for name, value in given.items()})


def _value(name: str, value: Any) -> Any:
    """A value of YAML as the optimizer takes it."""
    if name.endswith("_dtype"):
        dtype = getattr(torch, str(value).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"override_optimizer_config.{name} is {value!r}, expected a dtype as in bfloat16")
        return dtype
    return tuple(value) if name == "betas" else value
