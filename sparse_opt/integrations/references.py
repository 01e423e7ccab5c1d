"""TRL's DPO and GRPO trainers without a reference model: the policy computes the reference at its base weights.

Written for TRL 1.16. Both trainers hold the reference in `ref_model` and call it like the policy; here it is a module
without weights. Their constructors would load a second model, which is prevented by passing a `ref_model` to DPO and a
beta of 0 to GRPO's constructor; beta is restored afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ConfigError
from .arguments import SparseArguments
from .checks import named, set_named
from .trainer import SparseTrainer

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class BaseWeightsReference(nn.Module):
    """The trainer's policy at the start of the run: no parameters, no dropout, no gradient."""

    def __init__(self, trainer: _Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    @property
    def config(self) -> Any:
        """The policy's configuration."""
        return self._trainer.model.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's output for these arguments, under W0."""
        model = self._trainer.model
        with torch.no_grad(), self._trainer.base_weights(), evaluating(model):
            return model(*args, **kwargs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context with every module in evaluation mode; modes are restored on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class SparseDPOTrainer(SparseTrainer):
    """Mixin for TRL's DPOTrainer, placed before it in the MRO by `sparse_trainer`."""

    @contextmanager
    def _without_reference(self, bound: inspect.BoundArguments) -> Iterator[None]:
        given = named(bound)
        args = given.get("args")
        if given.get("ref_model") is not None:
            yield
            return
        _refuse_other_references(args, self.sparse_arguments)
        # With precompute_ref_log_probs, TRL uses the untrained policy as the reference and loads no model.
        if not getattr(args, "precompute_ref_log_probs", False):
            set_named(bound, "ref_model", BaseWeightsReference(self))
        yield
        # Replace it, because the constructor wraps the forward of the first one in a fused head and possibly autocast.
        self.ref_model = BaseWeightsReference(self)


class SparseGRPOTrainer(SparseTrainer):
    """Mixin for TRL's GRPOTrainer, placed before it in the MRO by `sparse_trainer`."""

    @contextmanager
    def _without_reference(self, bound: inspect.BoundArguments) -> Iterator[None]:
        args = named(bound).get("args")
        if args is None or args.beta == 0.0:
            yield
        else:
            beta = args.beta
            _refuse_other_references(args, self.sparse_arguments)
            args.beta = 0.0
            try:
                yield
            finally:
                args.beta = beta
            self.beta = beta
        if self.beta != 0.0:  # also if a subclass made the arguments itself, so that TRL loaded a reference
            _refuse_other_references(self.args, self.sparse_arguments)
            self.ref_model = BaseWeightsReference(self)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _resume(self, state: Any, batches: Any) -> None:
        """Restore the state of TRL's sampler's generator, which TRL does not save.

        TRL does not save completions in use either, so a checkpoint between two generations is refused.
        """
        args = self.args
        if args.ignore_data_skip:
            return
        streamed = not hasattr(batches.dataset, "__len__")  # one epoch, without a sampler
        steps_per_epoch = state.max_steps if streamed else -(-len(batches) // args.gradient_accumulation_steps)
        epochs, step = divmod(state.global_step, steps_per_epoch)
        per_generation = self.num_iterations * args.steps_per_generation
        if step * args.gradient_accumulation_steps % per_generation:
            raise ConfigError(
                f"the checkpoint of step {state.global_step} is between two generations, and TRL does not save their "
                f"completions: set save_steps to save after a multiple of {per_generation} batches of an epoch "
                f"({args.gradient_accumulation_steps} per step), or resume from such a checkpoint"
            )
        if args.shuffle_dataset and not streamed:
            generator = self._train_sampler.generator
            for _ in range(epochs):
                torch.randperm(self._train_sampler.num_samples, generator=generator, device=generator.device)


def _refuse_other_references(args: Any, options: SparseArguments) -> None:
    if not options.keep_base_weights:
        raise ConfigError(
            "keep_base_weights is False, expected True: the base weights are the reference; or pass a ref_model to DPO"
        )
    if getattr(args, "sync_ref_model", False):
        raise ConfigError(
            "sync_ref_model=True updates the reference, but base weights are constant: set sync_ref_model=False, or "
            "pass a "
            "ref_model to DPO"
        )
