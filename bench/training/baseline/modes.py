"""The modes of the end-to-end benchmark: what each trains, with which optimizer and reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparse_opt import MaskSet
from sparse_opt.optim import SparseOptimizer
from sparse_opt.trainers.models import add_lora
from sparse_opt.trainers.modes import Trained, adapter_training, dense_training, sparse_training

from .peers import adamw8bit, add_qlora, add_shira, galore

Mode = Literal["dense", "adamw8bit", "galore", "sparse", "tiles", "lora", "qlora", "shira"]


def shared_name(mode: str) -> str:
    """The name in reports of a mode with shared prompts."""
    return f"{mode}, shared prompts"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one mode trains, and for how long. Paths are strings, so that it goes through JSON."""

    algorithm: Literal["dpo", "grpo", "trl"]  # trl is DPO in TRL's trainer
    mode: Mode
    model_name: str
    dataset: str
    subset_size: int | None = None
    mask: str
    sequence_length: int
    n_generations: int = 2
    max_new_tokens: int = 1
    n_steps: int
    n_warmup: int = 0
    batch_size: int
    learning_rate: float
    lora_rank: int = 1
    shira_rank: int = 1
    gradient_checkpointing: bool = False
    compile: bool = False  # the model's layers, with torch.compile
    share_prompts: bool = False  # a prompt is computed once for its completions, except while they are sampled
    precomputed_reference: bool = False  # DPO: the reference's log-probabilities are computed before the first step
    cuda_graphs: bool = False  # DPO: steps are replayed as CUDA graphs
    kernel_time: bool = False
    device: str
    seed: int

    @property
    def name(self) -> str:
        """The mode, and whether prompts are shared: each job of a benchmark has another name."""
        return shared_name(self.mode) if self.share_prompts else self.mode


def prepare(job: Job, policy: nn.Module) -> Trained:
    """The policy under the job's mode: each in the leanest form that its users have.

    - dense: bf16 weights and moments, fused AdamW, clipping by torch's foreach functions, and a frozen second model,
      unless the reference is precomputed.
    - adamw8bit: the same with bitsandbytes' 8-bit AdamW; galore: the same with GaLore's AdamW, of rank 128.
    - sparse: SparseAdamW with fp32 moments and compact gradients in bf16. There is one backward pass a step and the
      dense gradients are bf16 themselves, so nothing is rounded by it. The reference is `base_weights()`.
    - tiles: the same under a mask of whole tiles; only the active tiles of weight gradients are computed.
    - lora: bf16 adapters of the stated rank, fused AdamW on them, the adapters off for the reference.
    - qlora: the same on a base in NF4 with double quantization; the output layer, the embedding and norms are bf16.
    - shira: the same as lora with peft's SHiRA, whose bf16 values are at random positions of the weights.

    No mode has fp32 master weights. Other packages' optimizers have their own defaults of weight decay and epsilon.
    """
    if job.mode in ("sparse", "tiles"):
        mask = MaskSet.load(job.mask, policy)
        keep = not job.precomputed_reference
        return sparse_training(policy, mask, job.learning_rate, grad_dtype=torch.bfloat16, keep_base_weights=keep)
    if job.mode in ("dense", "adamw8bit", "galore"):
        dense = dense_training(policy, job.learning_rate, copied=not job.precomputed_reference)
        if job.mode == "dense":
            return dense
        optimizer = adamw8bit if job.mode == "adamw8bit" else galore
        return replace(dense, optimizer=optimizer(policy, job.learning_rate))
    torch.manual_seed(job.seed)
    if job.mode == "lora":
        adapted = add_lora(policy, job.lora_rank)
    elif job.mode == "qlora":
        adapted = add_qlora(policy, job.lora_rank)
    else:
        adapted = add_shira(policy, job.shira_rank, job.seed)
    return adapter_training(adapted, job.learning_rate)


def n_trained(trained: Trained) -> int:
    """Values that the optimizer may change: weights, or those of adapters."""
    if isinstance(trained.optimizer, SparseOptimizer):
        return trained.optimizer.mask.nnz
    return sum(parameter.numel() for parameter in trained.policy.parameters() if parameter.requires_grad)


def n_tiled(trained: Trained) -> int:
    """Parameters whose weight gradients are computed by tiles."""
    return len(trained.optimizer.tiled_parameters) if isinstance(trained.optimizer, SparseOptimizer) else 0


def held_bytes(trained: Trained) -> dict[str, int]:
    """Bytes held between steps, by what they are for."""
    policy, optimizer = trained.policy, trained.optimizer
    weights = {"weights": _nbytes(policy.parameters())}
    if isinstance(optimizer, SparseOptimizer):
        return weights | optimizer.nbytes()
    states = optimizer.state.values()
    return {
        **weights,
        "quantization": _nbytes(_quantization(policy)),
        "reference": 0 if trained.reference is policy else _nbytes(trained.reference.parameters()),
        "indices": _nbytes(_shira_indices(policy)),
        "state": _nbytes(v for state in states for name, v in state.items() if torch.is_tensor(v) and name != "step"),
        "projections": _nbytes(state["projector"].ortho_matrix for state in states if "projector" in state),
        "grad": _nbytes(p for p in policy.parameters() if p.requires_grad),  # a gradient has its weight's dtype
    }


def _shira_indices(model: nn.Module) -> list[Tensor]:
    """The row and column of each of SHiRA's values, which peft keeps next to the parameters; none without SHiRA."""
    return [indices for module in model.modules() for indices in getattr(module, "shira_indices", {}).values()]


def _quantization(model: nn.Module) -> list[Tensor]:
    """The scales of 4-bit weights, which are quantized themselves, and the scales of those."""
    states = [parameter.quant_state for parameter in model.parameters() if hasattr(parameter, "quant_state")]
    return [scales for state in states for scales in (state.absmax, state.state2.absmax)]


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
