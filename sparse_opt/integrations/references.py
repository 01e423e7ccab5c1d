"""DPO and GRPO of TRL, whose reference log-probabilities come from the policy at the weights it started from.

Read against TRL 1.16. Both trainers hold the reference in `ref_model` and call it as they call the policy. Here it is a
module without weights. The trainers' constructors would load a second model for it; they are called so that they don't:
DPO gets a `ref_model`, GRPO a beta of 0 until its constructor is done.
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
    """The trainer's policy as it was when the run started: no parameters, no dropout, no gradient."""

    def __init__(self, trainer: _Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    @property
    def config(self) -> Any:
        """The policy's."""
        return self._trainer.model.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's output for these arguments, under W0."""
        model = self._trainer.model
        with torch.no_grad(), self._trainer.base_weights(), _evaluating(model):
            return model(*args, **kwargs)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode inside, and as it was outside."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class SparseDPOTrainer(SparseTrainer):
    """Stands in front of TRL's DPOTrainer."""

    @contextmanager
    def _without_reference(self, bound: inspect.BoundArguments) -> Iterator[None]:
        given = named(bound)
        args = given.get("args")
        if given.get("ref_model") is not None:
            yield
            return
        _refuse_other_references(args, self.sparse_arguments)
        # With precompute_ref_log_probs the policy itself is asked, before it is trained, and none is loaded.
        if not getattr(args, "precompute_ref_log_probs", False):
            set_named(bound, "ref_model", BaseWeightsReference(self))
        yield
        # A new one: the constructor has put a fused head, and maybe autocast, around the first one's forward.
        self.ref_model = BaseWeightsReference(self)


class SparseGRPOTrainer(SparseTrainer):
    """Stands in front of TRL's GRPOTrainer."""

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
        if self.beta != 0.0:  # also where a subclass made the arguments itself, and TRL a reference
            _refuse_other_references(self.args, self.sparse_arguments)
            self.ref_model = BaseWeightsReference(self)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _resume(self, state: Any, batches: Any) -> None:
        """TRL saves neither its sampler, whose one generator goes on from epoch to epoch, nor completions in use."""
        args = self.args
        if args.ignore_data_skip:
            return
        streamed = not hasattr(batches.dataset, "__len__")  # then there is one epoch, and no sampler
        steps_per_epoch = state.max_steps if streamed else -(-len(batches) // args.gradient_accumulation_steps)
        epochs, step = divmod(state.global_step, steps_per_epoch)
        per_generation = self.num_iterations * args.steps_per_generation
        if step * args.gradient_accumulation_steps % per_generation:
            raise ConfigError(
                f"the checkpoint of step {state.global_step} lies between two generations, whose completions TRL does "
                f"not save: set save_steps so that an epoch's steps are saved at multiples of {per_generation} batches "
                f"({args.gradient_accumulation_steps} a step), or resume from such a one"
            )
        if args.shuffle_dataset and not streamed:
            generator = self._train_sampler.generator
            for _ in range(epochs):
                torch.randperm(self._train_sampler.num_samples, generator=generator, device=generator.device)


def _refuse_other_references(args: Any, options: SparseArguments) -> None:
    if not options.keep_base_weights:
        raise ConfigError("keep_base_weights=False leaves no reference: keep them, or pass DPO a ref_model of your own")
    if getattr(args, "sync_ref_model", False):
        raise ConfigError(
            "sync_ref_model=True moves the reference, and base weights stay as they are: set sync_ref_model=False, or "
            "pass DPO a ref_model of your own"
        )
