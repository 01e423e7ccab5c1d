"""Load models by hub name or local folder: parameter shapes only, or the whole model with its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..tensors import canonical_names, named_parameters_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def parameter_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a causal language model's floating-point parameters, tied ones once. Weights are not read.

    Raises:
        DataError: the model does not exist or is not a causal language model.
    """
    from transformers import AutoModelForCausalLM

    from sparse_opt.trainers.policy.pretrained import load_config_from, reading

    config = load_config_from(name)
    with torch.device("meta"), reading(f"a causal language model from {name}"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = named_parameters_of(model)
    firsts = canonical_names(parameters)
    return {n: tuple(p.shape) for n, p in parameters.items() if firsts[n] == n and p.is_floating_point()}


def load_model(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """A causal language model on the CPU, in `dtype`, and its tokenizer.

    Raises:
        DataError: the model does not exist, is not a causal language model, has damaged or missing weights, or has no
            tokenizer.
    """
    from transformers import AutoModelForCausalLM

    from sparse_opt.trainers.policy.pretrained import load_pretrained, load_tokenizer_from

    model = load_pretrained(AutoModelForCausalLM, name, "a causal language model", dtype=dtype)
    return model, load_tokenizer_from(name)
