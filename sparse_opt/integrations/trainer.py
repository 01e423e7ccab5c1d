"""The overridden methods of transformers' Trainer, with which it trains with SparseAdamW.

Written for transformers 5.23. The Trainer makes its optimizer in `create_optimizer`, clips in `_clip_grad_norm`, gets
the logged norm from `_get_grad_norm`, and reads `optimizer.pt` in `_load_optimizer_and_scheduler`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from .. import quantised_layers
from ..delta.sparse_delta import SparseDelta
from ..errors import ConfigError, DataError
from ..masks.mask_set import MaskSet, as_mask_set
from ..optim import SparseAdamW, save_merged
from ..optim.options import SharedOptions
from ..optim.quantised import load_plain_
from . import checks, rates
from .arguments import Mask, SparseArguments, read_mask
from .callback import DeltaLogCallback, on_process_0
from .checkpoints import VerifiedCheckpointCallback, complete
from .run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # `sparse_trainer` puts the user's trainer behind this class


class RunTrainer(_Trainer):
    """Mixin for a Trainer class whose runs lock their folder, and whose checkpoints have manifests.

    Besides, to resume after the last step trains no further one, and misses no tied weights.
    """

    _run = ""  # the name of the run that holds the folder

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's method with the folder locked; afterwards close the delta logs.

        Raises:
            ConfigError: another run is saving checkpoints to `output_dir`.
            DataError: the checkpoint is damaged or incomplete; or the newest one is of an earlier run in `output_dir`.
        """
        newest = resume_from_checkpoint is True
        checkpoint = resume_from_checkpoint or None
        if newest and os.path.isdir(self.args.output_dir):
            checkpoint = get_last_checkpoint(self.args.output_dir) or True
        folder, saves = RunFolder(self.args.output_dir), self.args.save_strategy != "no"

        path = None if checkpoint is True else checkpoint

        def begin() -> None:
            self._run = folder.begin(path, newest=newest, saves=saves)

        try:
            if checkpoint is not True:  # else the Trainer raises: there is none
                on_process_0(begin, DataError)
            return super().train(checkpoint, *args, **kwargs)
        finally:
            try:
                for log in self._delta_logs():
                    log.close()
            finally:
                folder.end()

    def _delta_logs(self) -> list[DeltaLogCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, DeltaLogCallback)]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Call the Trainer's method, then flush the delta logs, write the manifest, and remove old checkpoints."""
        args = self.args
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        folder = self._get_output_dir(trial=trial)
        checkpoint = Path(folder, f"checkpoint-{self.state.global_step}")
        saved_args = checkpoint / TRAINING_ARGS_NAME
        if limit is not None and args.should_save and saved_args.exists():
            torch.save(args, saved_args)  # with the limit
        for log in self._delta_logs():
            log.on_save(args, self.state, self.control)
        complete(checkpoint, self._run)
        if args.should_save:
            rotate_checkpoints(folder, limit, self.state.best_model_checkpoint, use_mtime=True)

    def _load_best_model(self) -> None:
        """Call the Trainer's method for an intact checkpoint."""
        best = self.state.best_model_checkpoint
        on_process_0(lambda: VerifiedCheckpointCallback.require_intact(best), DataError)
        super()._load_best_model()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Call the Trainer's method, except after the last step, when it would train one more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Call the Trainer's method without missing names of parameters that were loaded under another name."""
        params = dict(self.model.named_parameters(remove_duplicate=False))
        missing = set(load_result.missing_keys)
        loaded = {id(param) for name, param in params.items() if name not in missing}
        names = [name for name in load_result.missing_keys if id(params.get(name)) not in loaded]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=names))


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Context manager inside which the Trainer's constructor takes a quantised model that has no PEFT adapter."""
    if not getattr(model, "is_quantized", False):
        yield
        return
    quantised_layers.require_supported(model)
    model.is_quantized = False
    try:
        yield
    finally:
        model.is_quantized = True


class SparseTrainer(RunTrainer):
    """Mixin for a Trainer class, placed before it in the MRO by `sparse_trainer`, which documents the arguments."""

    vllm_generation: Any  # of GRPO with use_vllm
    optimizer: Any  # the Trainer's attribute: `sparse_optimizer` wrapped by accelerate

    def __init__(self, *args: Any, mask: Mask, sparse: SparseArguments | None = None, **kwargs: Any) -> None:
        self.sparse_arguments = SparseArguments() if sparse is None else sparse
        self.sparse_optimizer: SparseAdamW | None = None
        given_mask = read_mask(mask)
        if isinstance(given_mask, MaskSet) and not given_mask.nnz:
            raise ConfigError("the mask has no active element")
        bound = inspect.signature(super().__init__).bind(*args, **kwargs)
        checks.of_call(bound)
        given = checks.named(bound).get("args")
        if self.sparse_arguments.vllm_weights != "full":
            checks.of_vllm(given, self.sparse_arguments)
        model = checks.named(bound).get("model")
        if given is not None and isinstance(model, torch.nn.Module):
            checks.of_quantised(given, self.sparse_arguments, model)  # before the constructor starts an engine
        with self._without_reference(bound), self._without_vllm(given), without_adapters(model):
            super().__init__(*bound.args, **bound.kwargs)
        checks.of_model(self.model)
        self.sparse_mask = as_mask_set(given_mask, self.model)
        checks.of_arguments(self.args, self.sparse_arguments, self.model)
        checks.of_quantised(self.args, self.sparse_arguments, self.model)
        if self.model_init is None:
            self.sparse_mask = self.sparse_mask.resolve(self.model)
            checks.of_frozen_parameters(self.model, self.sparse_mask)
        rates.warn_of_rate(self.args, self.sparse_mask)
        if self.sparse_arguments.vllm_weights != "full":
            self._connect_vllm()
        self.add_callback(SparseCallback(self))
        options = self.sparse_arguments
        if options.delta_log_dir is not None:
            self.add_callback(
                DeltaLogCallback(
                    options.delta_log_dir,
                    options.delta_log_steps,
                    keyframe_every=options.delta_log_keyframe_every,
                    mask=self.sparse_mask,
                    metadata={"method": type(self).__name__},
                    trainer=self,
                )
            )

    @contextmanager
    def _without_reference(self, bound: inspect.BoundArguments) -> Iterator[None]:
        """A context around the call of the trainer's own constructor with `bound`."""
        yield

    def _without_vllm(self, args: Any) -> AbstractContextManager[None]:
        """A context around the same call, in which TRL uses no vLLM if `_connect_vllm` does it."""
        if self.sparse_arguments.vllm_weights == "full":
            return nullcontext()
        from .trl.generation import without_vllm

        return without_vllm(args)

    def _connect_vllm(self) -> None:
        from .trl import generation

        options = self.sparse_arguments
        if self.args.vllm_mode == "server":
            generation.connect(self, self.sparse_mask)
        elif options.vllm_weights == "shared":
            generation.share(self, options.vllm_options or {})
        else:
            generation.send(self, self.sparse_mask, options.vllm_options or {})

    def create_accelerator_and_postprocess(self) -> None:
        """Call the Trainer's method, and let the optimizer average compact gradients between processes.

        DistributedDataParallel averages dense gradients only. So the model is prepared as for evaluation, with mixed
        precision and torch.compile, but not wrapped; or sharded by FSDP2.
        """
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        checks.of_accelerator(accelerator, self.args, self.sparse_arguments)
        compact = self.sparse_arguments.grads == "compact"
        # Also with a single process of a launcher, whose model accelerate would wrap.
        kind = accelerator.distributed_type.value
        self._replicates = compact and kind != "NO" and not accelerator.is_fsdp2
        if self._replicates:
            accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's method; afterwards, also after an exception, remove the hooks and unfreeze parameters."""
        checks.of_callbacks(self.callback_handler.callbacks)
        try:
            if self.sparse_optimizer is not None:
                self.sparse_optimizer.attach()
            return super().train(*args, **kwargs)
        finally:
            if self.sparse_optimizer is not None:
                self.sparse_optimizer.detach()

    # The optimizer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make a SparseAdamW over the Trainer's two groups: parameters with weight decay, and the others."""
        if self.optimizer is None:
            if self.sparse_optimizer is not None:  # `model_init` has made another model
                self.sparse_optimizer.close()
            self.sparse_optimizer = self._make_optimizer(self.model if model is None else model)
            self.optimizer = self.sparse_optimizer
            if not self.accelerator.is_fsdp2:  # FSDP2 prepares it with the model
                # Prepared here, because the Trainer's own call would save and reload the state to place it on the
                # device.
                self.optimizer = self.accelerator.prepare(self.sparse_optimizer, device_placement=[False])
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's method; by now accelerate's FSDP2 has replaced the parameters by shards."""
        if self.accelerator.is_fsdp2:
            assert self.sparse_optimizer is not None  # made before
            self.sparse_optimizer.rebind(self.model)
        return super().create_scheduler(*args, **kwargs)

    def _make_optimizer(self, model: torch.nn.Module) -> SparseAdamW:
        options, args = self.sparse_arguments, self.args
        names = set(self.get_decay_parameter_names(model))
        decayed = {param for name, param in model.named_parameters() if name in names}
        named = list(quantised_layers.named_parameters(model))
        # Frozen parameters are included, so that SparseAdamW can name those that the mask covers. `param_names` is
        # needed by a group without parameters.
        groups: list[dict[str, Any]] = [
            {"params": [(n, p) for n, p in named if (p in decayed) == decays], "weight_decay": rate, "param_names": []}
            for decays, rate in ((True, args.weight_decay), (False, 0.0))
        ]
        shared = {name: getattr(options, name) for name in SharedOptions.__annotations__ if hasattr(options, name)}
        if options.seed is None:
            shared["seed"] = args.seed
        return SparseAdamW(
            groups,
            self.sparse_mask.resolve(model),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            model=model,
            process_group=dist.group.WORLD if self._replicates else False,  # with FSDP2 `rebind` sets it
            **shared,
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the Trainer's method; gradients are averaged between processes after a step's last micro-batch only."""
        assert self.sparse_optimizer is not None  # training has begun
        with nullcontext() if self.accelerator.sync_gradients else self.sparse_optimizer.no_sync():
            return super().training_step(*args, **kwargs)

    def base_weights(self) -> AbstractContextManager[None]:
        """A context in which the model holds W0, the weights at the start of the run; restores the bits on exit.

        Before training it has no effect. See `SparseAdamW.base_weights`.

        Raises:
            RuntimeError: `SparseArguments(keep_base_weights=False)`.
        """
        return nullcontext() if self.sparse_optimizer is None else self.sparse_optimizer.base_weights()

    # Clipping. The Trainer reads the gradients of the parameters, which hold no compact gradients, and whose dense
    # gradients include those of inactive elements.

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self._clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return self._clip(float("inf")) if grad_norm is None else grad_norm

    def _clip(self, max_norm: float) -> Tensor:
        assert self.sparse_optimizer is not None  # training has begun
        self.accelerator.unscale_gradients()
        return self.sparse_optimizer.clip_grad_norm_(max_norm)

    # Checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Call the Trainer's method, and with `save_delta` write the delta next to the weights or in place of them.

        Over a quantised base, the weights are the merged ones.
        """
        options, optimizer = self.sparse_arguments, self.sparse_optimizer
        merges = optimizer is not None and bool(optimizer.quantised_parameters)
        if optimizer is None or (options.save_weights and not merges):
            super()._save(output_dir, state_dict)
        if not (options.save_delta or merges) or optimizer is None or not self.args.should_save:
            return
        folder = output_dir or self.args.output_dir
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if options.save_delta:
            optimizer.delta().save_pretrained(folder)
        if merges := merges and options.save_weights:
            save_merged(model, folder)  # with the config of a model that is not quantised
        if merges or not options.save_weights:  # what the Trainer's method saves with the weights
            configs = () if merges else (model.config, getattr(model, "generation_config", None))
            for part in (*configs, self.processing_class):
                if part is not None:
                    part.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Call the Trainer's method, or apply the delta of a checkpoint that was saved in place of weights.

        Over a quantised base, the optimizer's state has the trained weights, and the checkpoint's weights are merged.
        """
        trained = self.model if model is None else model
        is_quantised = bool(quantised_layers.find(trained))
        if not self.sparse_arguments.save_weights:
            delta = SparseDelta.from_pretrained(resume_from_checkpoint)
            if not is_quantised:
                delta.apply_(trained)
                return
            with torch.no_grad():
                for _, weight, new in delta.pairs(trained):
                    if isinstance(weight, Tensor):
                        weight.copy_(new)
        elif is_quantised:
            load_plain_(trained, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Call the Trainer's method, and raise if the checkpoint has no optimizer or scheduler state.

        The Trainer would continue without a state, and W0 would be the weights of the checkpoint.
        """
        names = ("optimizer_0" if self.accelerator.is_fsdp2 else "optimizer.pt", "scheduler.pt")
        for name in names:
            if checkpoint is not None and not os.path.exists(os.path.join(checkpoint, name)):
                raise FileNotFoundError(
                    f"{checkpoint} has no {name}, which is needed to resume the run: save checkpoints with "
                    "save_only_model=False, or start a new run from its weights"
                )
        super()._load_optimizer_and_scheduler(checkpoint)

    def _resume(self, state: Any, batches: Any) -> None:
        """Called before a run resumes after `state.global_step`; `batches` is its data loader."""

    def _load_best_model(self) -> None:
        """Call the Trainer's method, then update the fp32 master weights from the loaded weights."""
        super()._load_best_model()
        assert self.sparse_optimizer is not None
        self.sparse_optimizer.refresh_master_weights()


class SparseCallback(TrainerCallback):
    """Drops the gradients of an interrupted training loop, and lets the trainer resume what the Trainer does not."""

    def __init__(self, trainer: SparseTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        assert trainer.sparse_optimizer is not None
        trainer.sparse_optimizer.zero_grad()  # the Trainer clears only `.grad`, which does not hold compact gradients
        if state.global_step > 0:
            trainer._resume(state, kwargs["train_dataloader"])
