"""The models of the benchmarks: configurations, random weights in full or sharded by FSDP2, the loss of a pair; and
texts of random words, which are as many tokens."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sparse_opt.trainers.models import compile_layer

from .shapes import SHAPES

BETA = 0.1  # of the loss
STD = 0.02  # of the random weights
N_WORDS = 1000  # of the texts


def model_config(name: str, max_length: int, **options: Any) -> Any:
    """The transformers configuration of a shape; ``options`` are others of its class."""
    import transformers

    shape = SHAPES[name]
    if shape.family == "qwen3_moe":
        config: Any = transformers.Qwen3MoeConfig
        options |= {"moe_intermediate_size": shape.intermediate, "num_experts": shape.experts}
        options |= {"num_experts_per_tok": shape.experts_per_token, "norm_topk_prob": True}
    else:
        config = transformers.LlamaConfig if shape.family == "llama" else transformers.Qwen2Config
        options["intermediate_size"] = shape.intermediate
    if shape.family != "qwen2":  # whose heads divide the hidden size
        options["head_dim"] = shape.head_dim
    return config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        max_position_embeddings=max(2048, max_length),
        tie_word_embeddings=shape.tied,
        **options,
    )


def without_weights(config: Any) -> Any:
    """The causal language model of a configuration on the meta device: names and shapes, and no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a model's parameters, tied ones once."""
    return {name: tuple(p.shape) for name, p in without_weights(config).named_parameters()}


def masked_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Of the matrices and the stacks of experts' matrices, which random masks are drawn for, and not of vectors."""
    return {name: shape for name, shape in parameter_shapes(config).items() if len(shape) > 1}


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
    model: Any = without_weights(config)
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


@torch.no_grad()
def _fill(module: nn.Module, prefix: str, seeds: dict[str, int], device: torch.device) -> None:
    """Make the module's parameters that are on the meta device: biases of zeros, other vectors of ones, and matrices of
    random values."""
    found = [
        (owner, f"{path}.{name}" if path else name, parameter)
        for path, owner in module.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for owner, name, parameter in found:
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.ndim == 1:
            values.fill_(0 if name.endswith("bias") else 1)
        elif (full_name := f"{prefix}{name}") in seeds:  # a tied parameter has one name; its second is replaced
            values.normal_(0.0, STD, generator=torch.Generator(device).manual_seed(seeds[full_name]))
        setattr(owner, name.rpartition(".")[2], nn.Parameter(values))


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


def n_parameters(config: Any) -> int:
    """The number of parameters, tied ones counted once."""
    return sum(map(math.prod, parameter_shapes(config).values()))


# Texts of exact length


def words_config(shape: str, max_length: int) -> Any:
    """The configuration of a model of this shape for the tokens of `word_tokenizer`."""
    tokenizer = word_tokenizer()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return model_config(shape, max_length, bos_token_id=None, eos_token_id=eos, pad_token_id=pad)


def make_checkpoint(folder: Path, config: Any, *, seed: int, device: torch.device) -> None:
    """A model with random bf16 weights, and a tokenizer of one token a word, in Hugging Face format."""
    model: Any = make_model(config, device, seed)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the runs are other processes on the same GPU


def word_tokenizer() -> Any:
    """A tokenizer whose tokens are the words w0 ... w999, so that a text's length in tokens is known."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(N_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def preference_pairs(n: int, sequence_length: int, seed: int, n_prompt: int | None = None) -> list[dict[str, str]]:
    """Pairs of random words; prompt, completion and the closing EOS make ``sequence_length`` tokens.

    Args:
        n_prompt: tokens of the prompt; None is an eighth of the sequence.
    """
    generator = random.Random(seed)
    n_prompt = sequence_length // 8 if n_prompt is None else n_prompt
    n_completion = sequence_length - n_prompt - 1

    def words(count: int) -> str:
        return " ".join(f"w{generator.randrange(N_WORDS)}" for _ in range(count))

    return [
        {"prompt": words(n_prompt), "chosen": f" {words(n_completion)}", "rejected": f" {words(n_completion)}"}
        for _ in range(n)
    ]


def write_pairs(path: Path, pairs: list[dict[str, str]]) -> None:
    """One JSON object a line, as `trainers.batches` reads it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
