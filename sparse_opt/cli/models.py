"""Models by hub name or local folder: their shapes alone, or all of them with the tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ..errors import DataError
from ..tensor_state import canonical_names, named_parameters_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def parameter_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a causal language model's floating-point parameters, tied ones once; reads no weights.

    Raises:
        DataError: no such model, or not a causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the model {name}: {_first_line(error)}") from error
    parameters = named_parameters_of(model)
    firsts = canonical_names(parameters)
    return {n: tuple(p.shape) for n, p in parameters.items() if firsts[n] == n and p.is_floating_point()}


def load_model(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """A causal language model on the CPU, in `dtype`, and its tokenizer.

    Raises:
        DataError: no such model, not a causal language model, damaged weights, or no tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"cannot load the model {name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
