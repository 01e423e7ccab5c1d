"""transformers' Trainer with SparseAdamW: what a subclass overrides, and nothing else of it.

Read against transformers 5.23. The Trainer makes its optimizer in `create_optimizer`, clips in `_clip_grad_norm`, takes
the norm that it logs from `_get_grad_norm`, and reads `optimizer.pt` in `_load_optimizer_and_scheduler`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import ConfigError
from ..optim import SparseAdamW
from . import checks as refusals
from .arguments import Mask, SparseArguments, as_mask
from .callback import DeltaLogCallback

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # `sparse_trainer` puts the user's trainer behind this class


class SparseTrainer(_Trainer):
    """Stands in front of a Trainer class; `sparse_trainer` joins the two and says what they take."""

    optimizer: Any  # the Trainer's: `sparse_optimizer` as accelerate wraps it

    def __init__(self, *args: Any, mask: Mask, sparse: SparseArguments | None = None, **kwargs: Any) -> None:
        self.sparse_arguments = SparseArguments() if sparse is None else sparse
        self.sparse_optimizer: SparseAdamW | None = None
        self.sparse_mask = as_mask(mask)
        if not self.sparse_mask.nnz:
            raise ConfigError("the mask has no active element")
        bound = inspect.signature(super().__init__).bind(*args, **kwargs)
        refusals.of_call(bound)
        with self._without_reference(bound):
            super().__init__(*bound.args, **bound.kwargs)
        refusals.of_model(self.model)
        refusals.of_arguments(self.args, self.sparse_arguments, self.model)
        if self.model_init is None:
            self.sparse_mask = self.sparse_mask.resolve(self.model)
        self._sparse_callback = SparseCallback(self)
        self.add_callback(self._sparse_callback)

    @contextmanager
    def _without_reference(self, bound: inspect.BoundArguments) -> Iterator[None]:
        """Around the trainer's own constructor, which is about to be called with `bound`."""
        yield

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's, then refusals of what its accelerator would do to model and gradients."""
        super().create_accelerator_and_postprocess()
        refusals.of_accelerator(self.accelerator, self.args, self.sparse_arguments)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's. Once it is over, also by an exception, the model has no hooks and nothing frozen of ours."""
        if self.sparse_optimizer is not None:
            self.sparse_optimizer.attach()
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.sparse_optimizer is not None:
                self.sparse_optimizer.detach()
            self._sparse_callback.close()

    # The optimizer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """SparseAdamW over the Trainer's own two groups: what `get_decay_parameter_names` decays, and the rest."""
        if self.optimizer is None:
            if self.sparse_optimizer is not None:  # `model_init` has made another model
                self.sparse_optimizer.close()
            self.sparse_optimizer = self._make_optimizer(self.model if model is None else model)
            # The Trainer would prepare it next: with its state taken out and loaded again, for the device's sake.
            self.optimizer = self.accelerator.prepare(self.sparse_optimizer, device_placement=[False])
        return self.optimizer

    def _make_optimizer(self, model: torch.nn.Module) -> SparseAdamW:
        options, args = self.sparse_arguments, self.args
        decayed = set(self.get_decay_parameter_names(model))
        named = list(model.named_parameters())
        # Frozen parameters are in their group too, so that SparseAdamW can say which of them the mask wants to train.
        # `param_names` is for a group without parameters to take them from.
        groups: list[dict[str, Any]] = [
            {"params": [(n, p) for n, p in named if (n in decayed) == decays], "weight_decay": rate, "param_names": []}
            for decays, rate in ((True, args.weight_decay), (False, 0.0))
        ]
        return SparseAdamW(
            groups,
            self.sparse_mask.resolve(model),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            grads=options.grads,
            state_dtype=options.state_dtype,
            grad_dtype=options.grad_dtype,
            master_weights=options.master_weights,
            stochastic_rounding=options.stochastic_rounding,
            seed=args.seed if options.seed is None else options.seed,
            freeze_inactive=options.freeze_inactive,
            keep_base_weights=options.keep_base_weights,
            amp_scaling=options.amp_scaling,
            model=model,
            tile_backward=options.tile_backward,
            backend=options.backend,
        )

    def base_weights(self) -> AbstractContextManager[None]:
        """The model holds W0 inside, the weights that the run started from, and its own again outside, bit for bit.

        Before training it holds them anyway. See `SparseAdamW.base_weights`, also for how to use it.

        Raises:
            RuntimeError: `SparseArguments(keep_base_weights=False)`.
        """
        return nullcontext() if self.sparse_optimizer is None else self.sparse_optimizer.base_weights()

    # Clipping. The Trainer looks for gradients in the parameters, where compact ones are not, and dense ones are those
    # of inactive elements too.

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self._clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return self._clip(float("inf")) if grad_norm is None else grad_norm

    def _clip(self, max_norm: float) -> Tensor:
        assert self.sparse_optimizer is not None  # training has begun
        self.accelerator.unscale_gradients()
        return self.sparse_optimizer.clip_grad_norm_(max_norm)

    # Checkpoints

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The Trainer's, which would go on without a state where it finds none: with W0 the checkpoint's weights."""
        for name in ("optimizer.pt", "scheduler.pt"):
            if checkpoint is not None and not os.path.isfile(os.path.join(checkpoint, name)):
                raise FileNotFoundError(
                    f"{checkpoint} has no {name}, without which the run can't go on as it was: save checkpoints with "
                    "save_only_model=False, or begin a new run from its weights"
                )
        super()._load_optimizer_and_scheduler(checkpoint)

    def _resume(self, state: Any, batches: Any) -> None:
        """Called before a run goes on after `state.global_step`; `batches` is its data loader."""

    def _load_best_model(self) -> None:
        """The Trainer's, and the fp32 master weights follow the weights that it put into the model."""
        super()._load_best_model()
        assert self.sparse_optimizer is not None
        self.sparse_optimizer.refresh_master_weights()


class SparseDeltaLogCallback(DeltaLogCallback):
    """The log of `SparseArguments`. Its step 0 is W0, whether the run begins or is resumed."""

    def __init__(self, trainer: SparseTrainer) -> None:
        options = trainer.sparse_arguments
        if options.delta_log_dir is None:
            raise ConfigError("no delta_log_dir to log to")
        super().__init__(
            options.delta_log_dir,
            options.delta_log_steps,
            level=options.delta_log_level,
            keyframe_every=options.delta_log_keyframe_every,
            mask=trainer.sparse_mask,
            on_error=options.delta_log_on_error,
            metadata={"method": type(trainer).__name__},
        )
        self._trainer = trainer

    def _base_weights(self) -> AbstractContextManager[None]:
        return self._trainer.base_weights()

    def _require_base(self, step: int) -> None:
        """The base weights are at hand, also when the run is resumed."""

    def _check_base(self, model: nn.Module) -> None:
        self._require_same(0, model, "the weights that this run started from")


class SparseCallback(TrainerCallback):
    """Drops the gradients of a training loop that was left early, and keeps the delta log of `SparseArguments`."""

    def __init__(self, trainer: SparseTrainer) -> None:
        self._trainer = trainer
        wanted = trainer.sparse_arguments.delta_log_dir is not None
        self._log = SparseDeltaLogCallback(trainer) if wanted else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        assert trainer.sparse_optimizer is not None
        trainer.sparse_optimizer.zero_grad()  # the Trainer clears the model's `.grad`, where compact ones are not
        if state.global_step > 0:
            trainer._resume(state, kwargs["train_dataloader"])
        if self._log is not None:
            self._log.on_train_begin(args, state, control, **{**kwargs, "model": trainer.model})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log is not None:
            self._log.on_step_end(args, state, control, **{**kwargs, "model": self._trainer.model})

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log is not None:
            self._log.on_epoch_end(args, state, control, **{**kwargs, "model": self._trainer.model})

    def close(self) -> None:
        """Let go of the delta log, for others to append to."""
        if self._log is not None:
            self._log.close()
