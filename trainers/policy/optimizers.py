"""Set up the trained weights, the optimizer and the learning-rate schedule from a run's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.masks.parameters import is_mlp_parameter
from sparse_opt.optim import SparseAdamW, SparseSGD

from ..options import TrainingOptions
from .dense.adamw import DenseAdamW
from .dense.sgd import DenseSGD

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim.lr_scheduler import LambdaLR


def adapt(config: TrainingOptions, model: nn.Module) -> Any:
    """The model to train: with adapters initialised from the seed in mode lora, else unchanged.

    Raises:
        ConfigError: mode lora without PEFT installed, or the adapters cannot be added to the model's layers.
    """
    if config.mode != "lora":
        return model
    from .adapters import add_lora, add_shira, add_supertuning

    if config.adapter == "shira":
        return add_shira(model, config.lora_rank, config.seed)
    if config.adapter == "supertuning":
        return add_supertuning(model, config.lora_rank)
    torch.manual_seed(config.seed)
    return add_lora(model, config.lora_rank, config.lora_alpha)


def make_optimizer(
    config: TrainingOptions, model: nn.Module, process_group: ProcessGroup | None = None
) -> SparseAdamW | SparseSGD | DenseAdamW | DenseSGD:
    """The optimizer of the option `optim`: of the mask's elements in mode sparse, else of the trained weights.

    `mlp_only` selects the MLPs. The optimizers take the same options and have `grad_norm` and `nbytes()`. The sparse
    ones average their gradients over the process group; those of the others are averaged by DDP or FSDP2, see
    `GradientAveraging`.

    Raises:
        MaskError: the mask cannot be read or is another model's.
        ConfigError, DataError: `mlp_only` leaves nothing to train.
    """
    adamw: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    shared: dict[str, Any] = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        # fp32 weights are their own master copies, also under fp16 autocast.
        "master_weights": config.dtype == "bf16" and config.master_weights is not False and not config.lean,
    }
    if config.mode == "sparse":
        shared |= {
            "amp_scaling": config.dtype == "fp16",
            "model": model,
            "process_group": process_group,
            "backend": None if config.backend == "auto" else config.backend,
        }
        if config.lean:
            shared |= {"state_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16, "offload_base_weights": True}
            shared |= {"stochastic_rounding": True, "seed": config.seed}
        mask = load_mask(config, model)
        if config.optim == "sgd":
            return SparseSGD(model.named_parameters(), mask, **shared)
        return SparseAdamW(model.named_parameters(), mask, **adamw, **shared)
    if config.mlp_only:
        freeze_outside_mlps(model)
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    if config.optim == "sgd":
        return DenseSGD(trained, **shared)
    return DenseAdamW(trained, **adamw, **shared, fused=config.optim == "adamw_torch_fused")


def load_mask(config: TrainingOptions, model: nn.Module) -> MaskSet:
    """The mask from the file, checked against the model and restricted to MLP weights with `mlp_only`."""
    if config.mask is None:
        raise ConfigError("mode sparse needs a mask file: --mask FILE")
    mask = MaskSet.load(config.mask, model)
    if config.mlp_only:
        names = [name for name in mask.names if is_mlp_parameter(name)]
        mask = MaskSet(
            {name: mask[name] for name in names},
            {name: mask.shapes[name] for name in names},
            pattern=mask.pattern,
            metadata=mask.metadata,
        )
    if mask.nnz == 0:
        raise DataError(f"mask {config.mask} has no active element{' in MLP weights' if config.mlp_only else ''}")
    return mask


def freeze_outside_mlps(model: nn.Module) -> None:
    """`requires_grad_(False)` on every parameter outside the feed-forward blocks."""
    parameters = dict(model.named_parameters())
    if not any(map(is_mlp_parameter, parameters)):
        raise ConfigError(
            f"option 'mlp_only': no parameter of {type(model).__name__} has the name of a feed-forward block"
        )
    for name, parameter in parameters.items():
        parameter.requires_grad_(is_mlp_parameter(name))


def make_scheduler(config: TrainingOptions, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """transformers' schedule of this name, for curves comparable with its Trainer's. With warm-up, the first step has
    learning rate 0; linear and cosine reach 0 after step n_steps."""
    from transformers import get_scheduler

    name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
    scheduler: LambdaLR = get_scheduler(name, optimizer, config.warmup_steps, config.n_steps)
    return scheduler


def learning_rate(scheduler: LambdaLR) -> float:
    """The learning rate of the first parameter group in the coming step; the group's own may be a tensor on a GPU."""
    return float(scheduler.base_lrs[0] * scheduler.lr_lambdas[0](scheduler.last_epoch))
