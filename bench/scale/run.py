"""One case of `sparse-opt bench scale`, in a process of its own: its model, and a lower bound of its memory.

The step is that of `sparse-opt bench baseline dpo`: the log-probabilities and the loss are the trainers', the logits
are computed in slices, and the reference is the base weights, the model without adapters, or a frozen copy.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from sparse_opt import MaskSet
from sparse_opt.trainers.console import StepTimer
from sparse_opt.trainers.dpo import reference_logprobs
from sparse_opt.trainers.models import add_lora, make_masks_skippable
from sparse_opt.trainers.modes import Trained, adapter_training, dense_training, sparse_training

from ..harness import job_main, limit_memory
from ..models import make_model, masked_shapes, model_config, n_parameters, parameter_shapes
from ..rows import clean
from ..training.baseline.inputs import random_pairs
from ..training.baseline.modes import held_bytes, n_tiled, n_trained
from ..training.baseline.peers import add_lora_to_quantized, quantize_linear_layers
from ..training.baseline.run import dpo_steps, take_steps

Method = Literal["dense", "lora", "lean"]
# Options of SparseAdamW. Weights are bf16 and rounded at random, without fp32 master weights.
LEAN: dict[str, Any] = {
    "stochastic_rounding": True,
    "grad_dtype": torch.bfloat16,
    "state_dtype": torch.bfloat16,
    "offload_base_weights": True,
}
N_WARMUP = 1  # steps that are not timed: the first loads kernels


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. Its values go through JSON.

    A limit keeps torch's allocator below as many GiB, as on a smaller GPU.
    """

    shape: str
    method: Method
    base: Literal["bf16", "nf4"]  # the weights of the decoder layers' matrices; methods lora and lean
    checkpointing: bool  # of activations
    compile: bool  # the layers, with torch.compile
    precomputed_reference: bool  # its log-probabilities are computed before the first step
    sequence_length: int
    density: float
    pattern: str
    lora_rank: int
    learning_rate: float
    n_steps: int
    seed: int
    device: str
    limit_gib: float | None

    def described(self) -> dict[str, Any]:
        """The case of the rows: what is not of the method is left out, and so is the number of steps."""
        own = {"lean": {"density", "pattern"}, "lora": {"lora_rank"}, "dense": set[str]()}
        others = {"density", "pattern", "lora_rank", "n_steps", "device"} - own[self.method]
        if self.base == "bf16":
            others.add("base")
        values = {name: value for name, value in asdict(self).items() if name not in others}
        return clean({"shape": values.pop("shape"), "parameters": n_parameters(self.config), **values})

    @functools.cached_property
    def config(self) -> Any:
        """The model's transformers configuration."""
        return model_config(self.shape, self.sequence_length)

    def least_bytes(self) -> int:
        """Bytes that a step holds at once for certain: weights, reference, gradients and moments, no activations.

        Offloaded base weights are among them, because they are on the GPU while the reference is computed. LoRA's
        adapters, the indices of whole tiles, and the rounding of the density to whole tiles are left out.
        """
        n = n_parameters(self.config)
        weights = sum(
            math.prod(shape) // 2
            if self.base == "nf4" and ".layers." in name and len(shape) == 2
            else 2 * math.prod(shape)
            for name, shape in parameter_shapes(self.config).items()
        )
        if self.method == "dense":
            return (8 if self.precomputed_reference else 10) * n  # weights, gradients, moments, reference, all bf16
        if self.method == "lora":
            return weights
        active = int(self.density * sum(map(math.prod, masked_shapes(self.config).values())))
        base = 0 if self.precomputed_reference else 2
        # base weights, or over NF4 the active weights; compact gradients, two moments
        return weights + active * (base + 2 + 4)


def run(case: Case) -> dict[str, Any]:
    """Build the model, take the steps, and return what was measured; `fits` is False if memory ran out."""
    device = torch.device(case.device)
    on_gpu = device.type == "cuda"
    if on_gpu and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if case.least_bytes() > limit_memory(device, case.limit_gib):  # it would run out of memory, but later
        return {"fits": False, "needs_more_than_bytes": case.least_bytes()}
    try:
        measured = _measure(case, device)
    except torch.OutOfMemoryError:
        reached = torch.cuda.max_memory_allocated(device) if on_gpu else 0
        return {"fits": False, "needs_more_than_bytes": max(reached, case.least_bytes())}
    return {"fits": True, **measured}


def _measure(case: Case, device: torch.device) -> dict[str, Any]:
    trained = make_training(case, device)
    on_gpu = device.type == "cuda"
    build_peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    length, vocab = case.sequence_length, case.config.vocab_size
    batches = [random_pairs(1, length, vocab, case.seed + i).to(device) for i in range(case.n_steps)]
    references = reference_logprobs(trained, batches) if case.precomputed_reference else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    timer = StepTimer(device)
    steps = take_steps(dpo_steps(trained, batches, timer.section, references), case.n_steps, timer, device)
    return {
        "n_trained": n_trained(trained),
        "n_tiled": n_tiled(trained),
        "bytes": held_bytes(trained),
        "build_peak_bytes": build_peak,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "steps": steps,
    }


def make_training(case: Case, device: torch.device) -> Trained:
    """The model with random weights, made layer by layer on the device, and what trains it."""
    torch.manual_seed(case.seed)
    policy: Any = make_model(
        case.config,
        device,
        case.seed,
        checkpointing=case.checkpointing,
        compiled=case.compile,
        prepare=quantize_linear_layers if case.base == "nf4" else None,
    )
    make_masks_skippable(policy)
    policy.train()  # transformers checkpoints activations only then
    if case.method == "dense":
        return dense_training(policy, case.learning_rate, copied=not case.precomputed_reference)
    if case.method == "lora":
        add = add_lora_to_quantized if case.base == "nf4" else add_lora
        return adapter_training(add(policy, case.lora_rank), case.learning_rate)
    mask = MaskSet.random(masked_shapes(case.config), density=case.density, pattern=case.pattern, seed=case.seed)
    options = LEAN
    if case.precomputed_reference:
        options = {**LEAN, "keep_base_weights": False, "offload_base_weights": False}
    return sparse_training(policy, mask, case.learning_rate, **options)


if __name__ == "__main__":
    sys.exit(job_main(lambda job: run(Case(**job))))
