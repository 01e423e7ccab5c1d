"""Models with random weights, in full or sharded by FSDP2, and the loss on pairs of sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sparse_opt.trainers.models import compile_layer

from ..shapes import LLAMA_3_2_3B_SIZES, LLAMA_3_70B_SIZES, TINY_SIZES, llama_config

SHAPES = {"3b": LLAMA_3_2_3B_SIZES, "70b": LLAMA_3_70B_SIZES, "tiny": TINY_SIZES}
UNTIED = ("70b",)
BETA = 0.1  # of the loss
STD = 0.02  # of the random weights


def model_config(shape: str, sequence_length: int) -> Any:
    """The transformers configuration of a shape."""
    return llama_config(SHAPES[shape], sequence_length, tie_word_embeddings=shape not in UNTIED)


def masked_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the matrices, which random masks are drawn for; norm vectors stay as they are."""
    return {name: tuple(p.shape) for name, p in _without_weights(config).named_parameters() if p.ndim == 2}


def make_model(
    config: Any,
    device: torch.device,
    seed: int,
    *,
    mesh: DeviceMesh | None = None,
    checkpointing: bool = False,
    compiled: bool = False,
    prepare: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """A causal language model with random bf16 weights, the same for each seed, sharded by FSDP2 if a mesh is given.

    The unit of sharding, and of `torch.compile`, is a decoder layer. Weights are made layer by layer, so that the peak
    of memory is that of the sharded model and one layer in full.

    Args:
        prepare: called with each decoder layer once it has weights.
    """
    model: Any = _without_weights(config)
    if checkpointing:
        # transformers 5.23 renamed the method and warns under the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    seeds = {name: seed * 1_000_003 + i for i, (name, _) in enumerate(model.named_parameters())}
    for name, layer in model.model.layers.named_children():
        _fill(layer, f"model.layers.{name}.", seeds, device)
        if prepare is not None:
            prepare(layer)
        if compiled:
            compile_layer(layer)
        if mesh is not None:
            fully_shard(layer, mesh=mesh)
    _fill(model, "", seeds, device)
    with device:  # its buffers were on the meta device, too
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model if mesh is None else fully_shard(model, mesh=mesh)


def _without_weights(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


@torch.no_grad()
def _fill(module: nn.Module, prefix: str, seeds: dict[str, int], device: torch.device) -> None:
    """Make the module's parameters that are on the meta device: biases of zeros, other vectors of ones, and matrices of
    random values."""
    for owner, name, parameter in list(_meta_parameters(module)):
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.ndim == 1:
            values.fill_(0 if name.endswith("bias") else 1)
        elif (full_name := f"{prefix}{name}") in seeds:  # a tied parameter has one name; its second is replaced
            values.normal_(0.0, STD, generator=torch.Generator(device).manual_seed(seeds[full_name]))
        setattr(owner, name.rpartition(".")[2], nn.Parameter(values))


def _meta_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta:
                yield owner, f"{path}.{name}" if path else name, parameter


def pair(index: int, sequence_length: int, vocab: int, device: torch.device) -> Tensor:
    """Token ids of one pair, the chosen sequence and the rejected one: [2, T]; `index` is also the seed."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(vocab, (2, sequence_length), generator=generator).to(device)


def sequence_logprobs(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Sum of the log-probabilities of each sequence: [B] fp32."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return -losses.view(len(ids_BT), -1).sum(dim=1)


def pair_loss(model: nn.Module, ids_BT: Tensor, reference_B: Tensor | None) -> Tensor:
    """DPO's loss of one pair, without a reference if `reference_B` is None."""
    logprobs_B = sequence_logprobs(model, ids_BT)
    if reference_B is not None:
        logprobs_B = logprobs_B - reference_B
    chosen, rejected = logprobs_B
    return -F.logsigmoid(BETA * (chosen - rejected))


def n_bytes_of_weights(config: Any) -> int:
    """The bytes of the bf16 weights."""
    return 2 * sum(math.prod(p.shape) for p in _without_weights(config).parameters())
