"""The cases of `sparse-opt bench scale`: model shapes, methods, and a lower bound of the memory of each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from ..shapes import (
    LLAMA_3_1_8B_SIZES,
    LLAMA_3_2_3B_SIZES,
    LLAMA_3_70B_SIZES,
    QWEN3_30B_A3B_SIZES,
    QWEN_2_5_14B_SIZES,
    QWEN_2_5_32B_SIZES,
    TINY_SIZES,
    llama_config,
    qwen2_config,
    qwen3_moe_config,
)
from ..training.baseline.inputs import without_weights

Method = Literal["dense", "lora", "lean"]


@dataclass(frozen=True)
class Shape:
    """A model's family and sizes; ``sizes`` as for `llama_matrices`."""

    family: Literal["llama", "qwen2", "qwen3_moe"]
    sizes: Mapping[str, int]
    tied: bool = False  # whether the output layer's weight is the embedding

    def config(self, max_length: int) -> Any:
        """The transformers configuration."""
        if self.family == "qwen2":
            return qwen2_config(self.sizes, max_length)
        if self.family == "qwen3_moe":
            return qwen3_moe_config(self.sizes, max_length)
        return llama_config(self.sizes, max_length, tie_word_embeddings=self.tied)


SHAPES = {
    "3b": Shape("llama", LLAMA_3_2_3B_SIZES, tied=True),
    "8b": Shape("llama", LLAMA_3_1_8B_SIZES),
    "14b": Shape("qwen2", QWEN_2_5_14B_SIZES),
    "32b": Shape("qwen2", QWEN_2_5_32B_SIZES),
    "qwen3_30b_a3b": Shape("qwen3_moe", QWEN3_30B_A3B_SIZES),
    "70b": Shape("llama", LLAMA_3_70B_SIZES),
    "tiny": Shape("llama", TINY_SIZES, tied=True),
    "tiny_qwen2": Shape("qwen2", TINY_SIZES),
}
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

    @property
    def name(self) -> str:
        extra = [
            *([] if self.base == "bf16" else ["NF4 base"]),
            *(["checkpointing"] if self.checkpointing else []),
            *(["compiled"] if self.compile else []),
            *(["precomputed reference"] if self.precomputed_reference else []),
            *([] if self.limit_gib is None else [f"limited to {self.limit_gib:g} GiB"]),
        ]
        return ", ".join([f"{self.shape} {self.method}, {self.sequence_length} tokens", *extra])

    def described(self) -> dict[str, Any]:
        """The case of the rows: what is not of the method is left out, and so is the number of steps."""
        own = {"lean": {"density", "pattern"}, "lora": {"lora_rank"}, "dense": set[str]()}
        others = {"density", "pattern", "lora_rank", "n_steps", "device"} - own[self.method]
        if self.base == "bf16":
            others.add("base")
        values = {name: value for name, value in asdict(self).items() if name not in others}
        return {"shape": values.pop("shape"), "parameters": n_parameters(self.shape), **values}

    def config(self) -> Any:
        """The model's transformers configuration."""
        return SHAPES[self.shape].config(self.sequence_length)

    def masked(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the matrices, and stacks of experts' matrices, that the mask is drawn for."""
        return {name: shape for name, shape in parameter_shapes(self.shape).items() if len(shape) > 1}

    def least_bytes(self) -> int:
        """Bytes that a step holds at once for certain: weights, reference, gradients and moments, no activations.

        Offloaded base weights are among them, because they are on the GPU while the reference is computed. LoRA's
        adapters, the indices of whole tiles, and the rounding of the density to whole tiles are left out.
        """
        n = sum(_numel(shape) for shape in parameter_shapes(self.shape).values())
        weights = sum(
            _numel(shape) // 2 if self.base == "nf4" and ".layers." in name and len(shape) == 2 else 2 * _numel(shape)
            for name, shape in parameter_shapes(self.shape).items()
        )
        if self.method == "dense":
            return (8 if self.precomputed_reference else 10) * n  # weights, gradients, moments, reference, all bf16
        if self.method == "lora":
            return weights
        active = int(self.density * sum(map(_numel, self.masked().values())))
        base = 0 if self.precomputed_reference else 2
        # base weights, or over NF4 the active weights; compact gradients, two moments
        return weights + active * (base + 2 + 4)


@functools.cache
def parameter_shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a model's parameters, tied ones once."""
    return {name: tuple(p.shape) for name, p in without_weights(SHAPES[shape].config(1)).named_parameters()}


def n_parameters(shape: str) -> int:
    """The number of parameters, tied ones counted once."""
    return sum(_numel(dims) for dims in parameter_shapes(shape).values())


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
