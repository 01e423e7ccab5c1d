"""Experts of transformers' mixtures of experts, whose weight gradients are computed by tiles."""

from __future__ import annotations

import copy

import pytest
import torch
from tiled_models import EPS32, assert_same_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_opt import MaskSet, SparseAdamW, SparseSGD

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.usefixtures("few_under_the_interpreter")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_experts_per_tok": 2,
}
KINDS = {  # the class of the configuration, and its sizes
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 6, "moe_intermediate_size": 96, "head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "intermediate_size": 64}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "intermediate_size": 64, "head_dim": 32}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "intermediate_size": 64,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
}


def make(kind, implementation="grouped_mm", device="cpu", dtype=torch.float32):
    name, sizes = KINDS[kind]
    config = getattr(transformers, name)(**COMMON | sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation=implementation, dtype=dtype
    )
    for param in model.parameters():  # some have no initialization of their own
        if param.dim() == 3:
            torch.nn.init.normal_(param, std=0.05)
    return model.to(device)


def pair(kind, implementation="grouped_mm", *, device="cpu", density=0.3, mask=None, pattern="tile64", **options):
    """A model with tiles, its optimizer, and a copy of it with dense gradients under the same mask, and its."""
    model = make(kind, implementation, device)
    twin = copy.deepcopy(model)
    mask = mask or MaskSet.random(model, density=density, pattern=pattern, seed=1)
    tiles = SparseSGD(model, mask, lr=1e-2, **options)
    dense = SparseSGD(twin, mask, lr=1e-2, tile_backward=False, **options)
    return model, tiles, twin, dense


def batch(device="cpu", seed=0):
    return torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(seed)).to(device)


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def experts_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_masked_dense_ones(kind, implementation, device):
    """Over two micro-batches, a step, and one more batch, with the implementation that the user chose before."""
    model, tiles, twin, dense = pair(kind, implementation, device=device)
    tiled = [name for name in tiles.tiled_parameters if ".experts." in name]
    assert len(tiled) == 2 * len(experts_of(model)) > 0
    assert (loss_of(model, batch(device)) - loss_of(twin, batch(device))).abs() <= 10 * EPS32
    for seed in range(2):
        for m in (model, twin):
            loss_of(m, batch(device, seed)).backward()
        assert_same_gradients(tiles, dense, rtol=2000 * EPS32)
    for optimizer in (tiles, dense):
        optimizer.step()
    for m in (model, twin):
        loss_of(m, batch(device, 2)).backward()
    assert_same_gradients(tiles, dense, rtol=4000 * EPS32)
