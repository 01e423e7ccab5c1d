"""The modes of the end-to-end benchmark: what each trains, with which optimizer and reference.

Those of other packages: 8-bit AdamW and GaLore, full training with less memory; QLoRA and SHiRA, adapters.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparse_opt import MaskSet
from sparse_opt.optim import SparseOptimizer
from sparse_opt.trainers.models import add_lora, load_model, make_masks_skippable
from sparse_opt.trainers.modes import Trained, adapter_training, dense_training, sparse_training
from sparse_opt.trainers.pretrained import load_config_from

from ...models import make_model, parameter_shapes, words_config

Mode = Literal["dense", "adamw8bit", "galore", "sparse", "tiles", "attention", "experts", "lora", "qlora", "shira"]
# Modes of SparseAdamW, each with a mask of its own.
SPARSE_MODES = ("sparse", "tiles", "attention", "experts")
# Options of SparseAdamW with --lean. Weights are bf16 and rounded at random, without fp32 master weights.
LEAN: dict[str, Any] = {"stochastic_rounding": True, "state_dtype": torch.bfloat16, "offload_base_weights": True}

DPO_BETA = 0.1


def shared_name(mode: str) -> str:
    """The name in reports of a mode with shared prompts."""
    return f"{mode}, shared prompts"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one mode trains, and for how long. Paths are strings, so that it goes through JSON."""

    algorithm: Literal["dpo", "grpo", "trl"]  # trl is DPO in TRL's trainer
    mode: Mode
    model_name: str | None = None  # None: random weights in a shape
    shape: str = "3b"
    base: Literal["bf16", "nf4"] = "bf16"  # the matrices of the decoder layers
    dataset: str
    subset_size: int | None = None
    mask: str | None = None  # of SPARSE_MODES
    lean: bool = False  # of SPARSE_MODES: bf16 moments, base weights in host memory
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
    delta_log: str | None = None  # DPO: folder of a log of every step, compared with steps without
    limit_gib: float | None = None  # what torch's allocator may use, as on a smaller GPU
    device: str
    seed: int

    @property
    def quantized(self) -> bool:
        return self.base == "nf4" or self.mode == "qlora"

    @property
    def name(self) -> str:
        """The mode, and whether prompts are shared: each job of a benchmark has another name."""
        return shared_name(self.mode) if self.share_prompts else self.mode


def config_of(model_name: str | None, shape: str, sequence_length: int) -> Any:
    """The transformers configuration of a checkpoint, or of a shape."""
    return load_config_from(model_name) if model_name else words_config(shape, sequence_length)


def make_policy(job: Job, device: torch.device) -> Any:
    """The model of a checkpoint, or with random weights, which are made (and quantized) layer by layer."""
    checkpointing = job.gradient_checkpointing
    if job.model_name is not None:
        model = load_model(job.model_name, device, "bf16", gradient_checkpointing=checkpointing)
        if job.quantized:
            quantize_matrices(model, model.get_output_embeddings())
        return model
    config = config_of(None, job.shape, job.sequence_length)
    quantize = quantize_matrices if job.quantized else None
    model = make_model(config, device, job.seed, checkpointing=checkpointing, prepare=quantize)
    make_masks_skippable(model)
    return model.train()  # transformers checkpoints activations only then


def least_bytes(job: Job, mask: MaskSet | None) -> int:
    """Bytes that a step holds at once for certain: weights, reference, gradients and moments, no activations.

    Offloaded base weights are among them, because they are on the GPU while the reference is computed. Adapters,
    indices and the moments of other packages are left out.
    """
    shapes = parameter_shapes(config_of(job.model_name, job.shape, job.sequence_length))
    numel = sum(map(math.prod, shapes.values()))
    reference = 0 if job.precomputed_reference else 2
    if job.mode in ("dense", "adamw8bit", "galore"):
        return numel * (2 + 2 + (4 if job.mode == "dense" else 0) + reference)
    quantized = sum(math.prod(s) for n, s in shapes.items() if job.quantized and ".layers." in n and len(s) > 1)
    weights = 2 * numel - quantized * 3 // 2
    # Compact gradients, two moments, and the base weights, or over NF4 the active weights.
    return weights + (0 if mask is None else mask.nnz * (2 + (4 if job.lean else 8) + reference))


def prepare(job: Job, policy: nn.Module, mask: MaskSet | None = None) -> Trained:
    """The policy under the job's mode: each in the leanest form that its users have.

    - dense: bf16 weights and moments, fused AdamW, clipping by torch's foreach functions, and a frozen second model,
      unless the reference is precomputed.
    - adamw8bit: the same with bitsandbytes' 8-bit AdamW; galore: the same with GaLore's AdamW, of rank 128.
    - sparse: SparseAdamW with fp32 moments and compact gradients in bf16. There is one backward pass a step and the
      dense gradients are bf16 themselves, so nothing is rounded by it. The reference is `base_weights()`.
    - tiles: the same under a mask of whole tiles; only the active tiles of weight gradients are computed.
    - attention: the same under a mask of tiles of the attention matrices alone; experts: of these and of whole experts.
    - lora: bf16 adapters of the stated rank, fused AdamW on them, the adapters off for the reference.
    - qlora: the same on a base in NF4 with double quantization; the output layer, the embedding and norms are bf16.
    - shira: the same as lora with peft's SHiRA, whose bf16 values are at random positions of the weights.

    No mode has fp32 master weights. Other packages' optimizers have their own defaults of weight decay and epsilon.
    """
    if mask is not None:
        options = {**LEAN, "offload_base_weights": not job.precomputed_reference} if job.lean else {}
        options |= {"grad_dtype": torch.bfloat16, "keep_base_weights": not job.precomputed_reference}
        return sparse_training(policy, mask, job.learning_rate, **options)
    if job.mode in ("dense", "adamw8bit", "galore"):
        dense = dense_training(policy, job.learning_rate, copied=not job.precomputed_reference)
        if job.mode == "dense":
            return dense
        optimizer = adamw8bit if job.mode == "adamw8bit" else galore
        return replace(dense, optimizer=optimizer(policy, job.learning_rate))
    torch.manual_seed(job.seed)
    if job.mode == "shira":
        return adapter_training(add_shira(policy, job.shira_rank, job.seed), job.learning_rate)
    add = add_lora_to_quantized if job.quantized else add_lora
    return adapter_training(add(policy, job.lora_rank), job.learning_rate)


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


# Modes of other packages

# The packages of each mode, and the extra of this package that installs them.
_PACKAGES = {
    "adamw8bit": {"bitsandbytes": "peers"},
    "galore": {"galore_torch": "peers", "bitsandbytes": "peers"},  # galore_torch imports bitsandbytes
    "lora": {"peft": "bench"},
    "qlora": {"peft": "bench", "bitsandbytes": "peers"},
    "shira": {"peft": "bench"},
    "trl": {"trl": "integrations"},  # which is no mode, but an algorithm
}
# The example of GaLore's README (https://github.com/jiaweizzhao/GaLore). Its scripts pre-train 1 B weights with rank
# 512, and 7 B with rank 1024.
GALORE_RANK = 128
_GALORE = {"rank": GALORE_RANK, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}


def missing_package(modes: Sequence[str]) -> str:
    """The error of the first of these modes whose package is not installed; empty if there is none."""
    for mode in modes:
        for package, extra in _PACKAGES.get(mode, {}).items():
            if importlib.util.find_spec(package) is None:
                return f"{mode} needs {package}, which is not installed: pip install 'sparse-opt[{extra}]'"
    return ""


def adamw8bit(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW: two moments of 8 bits per weight, also of the embedding, and fp32 scales of their blocks."""
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=learning_rate)


def galore(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """GaLore's AdamW (https://arxiv.org/abs/2403.03507): moments of gradients that are projected to a low rank.

    As in its scripts, the gradients of the linear layers of attention and MLP are projected, with new projections every
    200 steps; the other weights have full moments. Moments and projections are bf16, as the gradients are.
    """
    from galore_torch import GaLoreAdamW

    layers = [module for name, module in model.named_modules() if "attn" in name or "mlp" in name]
    projected = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    ids = {id(weight) for weight in projected}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    groups = [{"params": others}, {"params": projected, **_GALORE}]
    return GaLoreAdamW(groups, lr=learning_rate, no_deprecation_warning=True)


def quantize_matrices(model: nn.Module, output: nn.Module | None = None) -> None:
    """Quantise the linear layers, except `output`, and stacks of experts by bitsandbytes: NF4, double quantization.

    They multiply in the dtype of the model. Other weights stay as they are: norms are not cast to fp32, as
    `peft.prepare_model_for_kbit_training` would do.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for parent in list(model.modules()):
        for name in [name for name, parameter in parent.named_parameters(recurse=False) if parameter.ndim == 3]:
            replace_parameter_4bit(parent, name, compress_statistics=True)
        for name, layer in parent.named_children():
            if not isinstance(layer, nn.Linear) or layer is output:
                continue
            weight = layer.weight
            quantized = Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=weight.dtype, device="meta"
            )
            quantized.bias = layer.bias
            quantized.weight = Params4bit(weight.data, requires_grad=False, quant_type="nf4", module=quantized)
            setattr(parent, name, quantized.to(weight.device))  # here it is quantized
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the bf16 weights are not part of the reserved memory that is measured


def add_lora_to_quantized(model: Any, rank: int) -> Any:
    """QLoRA (https://arxiv.org/abs/2305.14314): add bf16 adapters to a model that `quantize_matrices` has
    quantized."""
    dtype = model.dtype
    model.is_loaded_in_4bit = True  # where peft looks to choose its layer
    adapted = add_lora(model, rank)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def add_shira(model: Any, rank: int, seed: int) -> Any:
    """Sparse high-rank adapters (SHiRA, https://arxiv.org/abs/2406.13175) on the layers of `add_lora`.

    Each adapted weight of m x n has rank * (m + n) bf16 values at random positions, drawn by PEFT on the CPU with the
    same seed for every layer. They are added to `model` itself, and initially change nothing.

    Returns:
        The model in a PEFT wrapper, whose `disable_adapter()` restores the initial weights.
    """
    from peft import ShiraConfig, get_peft_model

    config = ShiraConfig(r=rank, target_modules="all-linear", random_seed=seed, task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)
