"""Tiny mixtures of experts of the families that transformers fuses, made from configurations with a seed."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

VOCABULARY = 64
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Five experts, which two ranks share unevenly, and a number of rows that is no multiple of a tile in GPT-OSS.
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3MoeConfig, {"num_experts": 5, "head_dim": 32, "moe_intermediate_size": 64}),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "intermediate_size": 64}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 5, "head_dim": 32, "intermediate_size": 80}),
    "deepseek": (
        DeepseekV3Config,
        {
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,  # layer 0 has no experts
            "intermediate_size": 64,
            "moe_intermediate_size": 64,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
}


def moe_model(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The same weights for every call; routers send tokens to all experts. `options` change the configuration."""
    config_class, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**{**_SHARED, **sizes, **options}), dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith((".gate.weight", ".router.weight")):
            torch.nn.init.normal_(parameter)
    return model


def tokens_of(step: int, n: int = 24) -> torch.Tensor:
    """[1, n] token ids."""
    return torch.randint(2, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(step))
