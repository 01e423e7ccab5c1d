"""The modes of the end-to-end benchmark: what each trains, with which optimizer and reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.trainers.options import TrainingOptions
from sparse_opt.trainers.policy.adapters import add_lora, add_shira
from sparse_opt.trainers.policy.models import frozen_copy

Mode = Literal["dense", "sparse", "tiles", "lora", "shira"]
MAX_GRAD_NORM = 1.0


def shared_name(mode: str) -> str:
    """The name in reports of a mode with shared prompts."""
    return f"{mode}, shared prompts"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one mode trains, and for how long. Paths are strings, so that it goes through JSON."""

    algorithm: Literal["dpo", "grpo"]
    mode: Mode
    model_name: str
    checkpoint: str | None = None
    dataset: str
    subset_size: int | None = None
    mask: str
    sequence_length: int
    n_generations: int = 2
    max_new_tokens: int = 1
    n_steps: int
    n_warmup: int = 0
    steps_in_a_row: int = 1  # timed together, after the warm-up
    batch_size: int
    learning_rate: float
    lora_rank: int = 1
    shira_rank: int | None = None  # required by mode shira
    gradient_checkpointing: bool = False
    compile: bool = False  # the model's layers, with torch.compile
    share_prompts: bool = False  # a prompt is computed once for its completions, except while they are sampled
    precomputed_reference: bool = False  # DPO: the reference's log-probabilities are computed before the first step
    cuda_graphs: bool = False  # DPO: steps are replayed as CUDA graphs
    l2_fetch_granularity: int | None = None  # bytes; None leaves the device's default
    kernel_time: bool = False
    device: str
    seed: int

    @property
    def name(self) -> str:
        """The mode, and whether prompts are shared: each job of a benchmark has another name."""
        return shared_name(self.mode) if self.share_prompts else self.mode

    def options(self) -> TrainingOptions:
        """As the trainers' options, for what loads models and data."""
        return TrainingOptions(
            policy_name=self.model_name,
            checkpoint=None if self.checkpoint is None else Path(self.checkpoint),
            dataset=self.dataset,
            gradient_checkpointing=self.gradient_checkpointing,
        )


@dataclass
class Trained:
    """The policy with the reference, clipping and optimizer of its mode."""

    policy: nn.Module
    reference: nn.Module
    reference_weights: Callable[[], AbstractContextManager[Any]]  # the reference's weights are in `reference` inside
    clip: Callable[[], Tensor]  # returns the norm
    optimizer: torch.optim.Optimizer
    n_tiled: int  # parameters whose weight gradients are computed by tiles
    parts: Callable[[], dict[str, int]]  # bytes held between steps, by what they are for

    @property
    def n_trained(self) -> int:
        """Values that the optimizer may change: weights, or those of adapters."""
        if isinstance(self.optimizer, SparseAdamW):
            return self.optimizer.mask.nnz
        return sum(parameter.numel() for parameter in self.policy.parameters() if parameter.requires_grad)


def prepare(job: Job, policy: nn.Module) -> Trained:
    """The policy under the job's mode: each in the leanest form that its users have.

    - dense: bf16 weights and moments, fused AdamW, clipping by torch's foreach functions, and a frozen second model,
      unless the reference is precomputed.
    - sparse: SparseAdamW with fp32 moments and compact gradients in bf16. There is one backward pass a step and the
      dense gradients are bf16 themselves, so nothing is rounded by it. The reference is `base_weights()`.
    - tiles: the same under a mask of whole tiles; only the active tiles of weight gradients are computed.
    - lora: bf16 adapters of the stated rank, fused AdamW on them, the adapters off for the reference.
    - shira: the same with peft's SHiRA, whose bf16 values are at random positions of the weights.

    No mode has fp32 master weights.
    """
    if job.mode in ("sparse", "tiles"):
        mask = MaskSet.load(job.mask, policy)
        keep = not job.precomputed_reference
        return sparse_training(policy, mask, job.learning_rate, grad_dtype=torch.bfloat16, keep_base_weights=keep)
    if job.mode == "dense":
        return dense_training(policy, job.learning_rate, copied=not job.precomputed_reference)
    if job.mode == "lora":
        torch.manual_seed(job.seed)
        adapted = add_lora(policy, job.lora_rank)
    else:
        assert job.shira_rank is not None
        adapted = add_shira(policy, job.shira_rank, job.seed)
    return adapter_training(policy, adapted.disable_adapter, job.learning_rate)


def sparse_training(policy: nn.Module, mask: MaskSet, learning_rate: float | Tensor, **options: Any) -> Trained:
    """SparseAdamW under a mask, with `options` of its own; the reference is `base_weights()`.

    With keep_base_weights=False the policy is the reference, until the first step.
    """
    sparse = SparseAdamW(policy, mask, lr=learning_rate, **options)
    return Trained(
        policy,
        policy,
        sparse.base_weights if sparse.keep_base_weights else nullcontext,
        lambda: sparse.clip_grad_norm_(MAX_GRAD_NORM),
        sparse,
        len(sparse.tiled_parameters),
        lambda: {"weights": _nbytes(policy.parameters()), **sparse.nbytes()},
    )


def dense_training(policy: nn.Module, learning_rate: float, *, copied: bool = True) -> Trained:
    """Full fine-tuning with fused AdamW; the reference is a frozen copy, or until the first step the policy."""
    return _adamw_training(policy, frozen_copy(policy) if copied else policy, nullcontext, learning_rate)


def adapter_training(
    policy: nn.Module, reference_weights: Callable[[], AbstractContextManager[Any]], learning_rate: float
) -> Trained:
    """Fused AdamW on what requires a gradient; in `reference_weights()` the policy is its own reference."""
    return _adamw_training(policy, policy, reference_weights, learning_rate)


def _adamw_training(
    policy: nn.Module,
    reference: nn.Module,
    reference_weights: Callable[[], AbstractContextManager[Any]],
    learning_rate: float,
) -> Trained:
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=learning_rate, fused=True)

    def parts() -> dict[str, int]:
        moments = [value for state in adamw.state.values() for key, value in state.items() if key != "step"]
        return {
            "weights": _nbytes(policy.parameters()),
            "reference": 0 if reference is policy else _nbytes(reference.parameters()),
            "indices": _nbytes(_shira_indices(policy)),
            "state": _nbytes(moments),
            "grad": _nbytes(trained),  # a gradient has its weight's dtype
        }

    return Trained(
        policy,
        reference,
        reference_weights,
        lambda: nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM, foreach=True),
        adamw,
        0,
        parts,
    )


def _shira_indices(model: nn.Module) -> list[Tensor]:
    """The row and column of each of SHiRA's values, which peft keeps next to the parameters; none without SHiRA."""
    return [indices for module in model.modules() for indices in getattr(module, "shira_indices", {}).values()]


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
