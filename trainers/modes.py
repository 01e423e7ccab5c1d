"""What each way of training changes, with its optimizer, clipping and reference: all weights, those of a mask, LoRA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparse_opt.errors import ConfigError, MaskError
from sparse_opt.masks import MaskSet
from sparse_opt.optim import SparseAdamW

from .models import add_lora, compile_layers

MAX_GRAD_NORM = 1.0
# A context in which the time of a section of a step, such as "backward", is measured.
Section = Callable[[str], AbstractContextManager[Any]]


def untimed(name: str) -> AbstractContextManager[Any]:
    """A `Section` that measures nothing."""
    return nullcontext()


@dataclass
class Trained:
    """The policy with the reference, clipping and optimizer of its mode."""

    policy: nn.Module
    reference: nn.Module
    reference_weights: Callable[[], AbstractContextManager[Any]]  # the reference's weights are in `reference` inside
    clip: Callable[[float], Tensor]  # to a maximum norm; returns the norm
    optimizer: torch.optim.Optimizer
    wrapper: Any = None  # PEFT's, which saves the adapters that it has put into the policy

    @property
    def saved(self) -> Any:
        """What to save: the policy, or its adapters."""
        return self.policy if self.wrapper is None else self.wrapper

    def compile(self) -> None:
        """`torch.compile` the layers of both models in place; copies of a compiled model are not compiled."""
        for model in {id(model): model for model in (self.policy, self.reference)}.values():
            compile_layers(model)

    def update(self, section: Section = untimed) -> Tensor:
        """Clip the gradients, step, and free them; returns the norm before clipping, on the device."""
        with section("clip"):
            norm = self.clip(MAX_GRAD_NORM)
        with section("step"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return norm.detach()


def sparse_training(policy: nn.Module, mask: MaskSet, learning_rate: float | Tensor, **options: Any) -> Trained:
    """SparseAdamW under a mask, with `options` of its own; the reference is `base_weights()`.

    Of a mask of whole tiles, only the active tiles of weight gradients are computed. With keep_base_weights=False the
    policy is the reference, until the first step.
    """
    sparse = SparseAdamW(policy, mask, lr=learning_rate, **options)
    reference_weights = sparse.base_weights if sparse.keep_base_weights else nullcontext
    return Trained(policy, policy, reference_weights, sparse.clip_grad_norm_, sparse)


def dense_training(policy: nn.Module, learning_rate: float, *, copied: bool = True, **options: Any) -> Trained:
    """All weights, by fused AdamW; the reference is a frozen copy, or until the first step the policy."""
    reference = copy.deepcopy(policy).requires_grad_(False) if copied else policy
    return _adamw_training(policy, reference, nullcontext, learning_rate, **options)


def adapter_training(adapted: Any, learning_rate: float) -> Trained:
    """The adapters in a PEFT wrapper, by fused AdamW; the policy is the model inside; without them the reference."""
    policy = adapted.get_base_model()
    return _adamw_training(policy, policy, adapted.disable_adapter, learning_rate, adapted)


def _adamw_training(
    policy: nn.Module,
    reference: nn.Module,
    reference_weights: Callable[[], AbstractContextManager[Any]],
    learning_rate: float,
    wrapper: Any = None,
    **options: Any,
) -> Trained:
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=learning_rate, fused=True, **options)
    return Trained(
        policy,
        reference,
        reference_weights,
        lambda max_norm: nn.utils.clip_grad_norm_(trained, max_norm, foreach=True),
        adamw,
        wrapper,
    )


def load_mask(model: nn.Module, file: str | None, density: float | None, pattern: str, seed: int) -> MaskSet | None:
    """The mask in a file, a random one if `density` is given, or None.

    Raises:
        ConfigError: the random mask is empty.
        MaskError: the file cannot be read, or is of another model.
    """
    if file is not None:
        return MaskSet.load(Path(file).expanduser(), model)
    if density is None:
        return None
    try:
        return MaskSet.random(model, density=density, pattern=pattern, seed=seed)
    except MaskError as error:
        raise ConfigError(str(error)) from error


def train_model(model: Any, options: Any, *, reference: bool) -> Trained:
    """Sparse training with `mask` or `density`, LoRA with `lora_rank`, else of all weights.

    Args:
        options: of a loop: `mask` and the others, `learning_rate`, `compile`, and the `seed` of mask and adapters.
        reference: whether the reference is used after the first step; if not, no copy of its weights is kept.

    Raises:
        ConfigError: more than one of the three is given, or the random mask is empty.
        MaskError: the mask cannot be read, or is another model's.
    """
    given = {name: getattr(options, name) for name in ("mask", "density", "lora_rank")}
    if sum(value is not None for value in given.values()) > 1:
        values = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise ConfigError(f"options {values}: give one of them")
    lr, mask = options.learning_rate, load_mask(model, options.mask, options.density, options.pattern, options.seed)
    if options.lora_rank is not None:
        torch.manual_seed(options.seed)
        trained = adapter_training(add_lora(model, options.lora_rank), lr)
    elif mask is not None:
        trained = sparse_training(model, mask, lr, keep_base_weights=reference)
    else:
        trained = dense_training(model, lr, copied=reference)
    if options.compile:
        trained.compile()
    return trained
