"""Small models of transformers, and the same models in vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from vllm import LLM
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from sparse_opt.masks.patterns import matrix_shape
from sparse_opt.weight_sync import Destination

SIZES = {
    "vocab_size": 100,  # vLLM pads it to 128
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # larger than usual, so that tokens depend on the weights
}

_FEW = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
# Mixtures of experts; the checkpoints of all but GPT-OSS have a tensor for each expert.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", {**_FEW, "num_experts": 4, "head_dim": 32, "moe_intermediate_size": 64}),
    "mixtral": ("Mixtral", {**_FEW, "num_local_experts": 4}),
    "gpt-oss": ("GptOss", {**_FEW, "num_local_experts": 4, "head_dim": 32, "intermediate_size": 128}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_FEW,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",  # which vLLM reads
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 64,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
}


def make_model(kind: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A small model of transformers in bfloat16 with random weights, biases included."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return model


def saved(folder: Path, model: nn.Module) -> Path:
    model.save_pretrained(folder)
    return folder


def engine_config(folder: Path) -> VllmConfig:
    arguments = EngineArgs(
        model=str(folder), enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, dtype="bfloat16"
    )
    return arguments.create_engine_config()


def load_into_vllm(folder: Path, processed: bool) -> nn.Module:
    """A model of vLLM from a checkpoint, without an engine around it. Its configuration is `model.lab_config`."""
    config = engine_config(folder)
    with set_current_vllm_config(config):
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        if processed:
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    model.lab_config = config
    return model


def block(weight: torch.Tensor, piece: Destination) -> torch.Tensor:
    """The rows and columns of a checkpoint's weight that are a slice of vLLM's."""
    return weight.detach().view(matrix_shape(weight.shape))[slice(*piece.rows), slice(*piece.columns)]


def write_slices(slices: dict[str, list[Destination]], source: nn.Module) -> None:
    for name, pieces in slices.items():
        for piece in pieces:
            piece.tensor.copy_(block(source.get_parameter(name), piece))


def plain_linear(layer: nn.Module, remove_weight: bool) -> None:
    """In place of vLLM's `dispatch_cpu_unquantized_gemm`: compute with `layer.weight`, as on GPUs, and pack nothing."""
    if layer.weight.ndim == 2:
        layer.cpu_linear = nn.functional.linear


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    """An engine in this process that takes weight updates, and is shut down afterwards."""
    llm = LLM(
        str(folder),
        enforce_eager=True,
        max_model_len=512,
        dtype="bfloat16",
        gpu_memory_utilization=0.2,  # tests may have several
        weight_transfer_config=WeightTransferConfig(backend="sparse_opt"),
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
