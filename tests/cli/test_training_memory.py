"""The formulas of memory, against tensors that training really holds."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.cli.training_memory import SHAPES, Shape, advice, bytes_per_token, bytes_per_weight
from sparse_opt.trainers.batches import TokenSequence, collate
from sparse_opt.trainers.logprobs import completion_logprobs
from sparse_opt.trainers.models import make_masks_skippable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCH = collate([TokenSequence([i % 64 for i in range(start, 9 * start)], start) for start in (1, 2, 3)], pad_id=0)


def llama(n_layers, dtype):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(DTYPES[dtype]).train()
    make_masks_skippable(model)
    return model


def saved_bytes(model, batch):
    """Bytes that a forward pass keeps for its backward pass, without the weights."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # holding it, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = completion_logprobs(model, batch)
    assert logprobs.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_those_of_a_forward_pass(dtype, checkpointing):
    found = {}
    for n_layers in (2, 4):
        model = llama(n_layers, dtype)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        found[n_layers] = saved_bytes(model, BATCH) / BATCH.input_ids.numel()
    expected = {
        n_layers: bytes_per_token(Shape("", 0, n_layers, 64, 192), dtype, gradient_checkpointing=checkpointing)
        for n_layers in (2, 4)
    }
    # Per layer; the rest is the embedding's output and the last norm's.
    assert found[4] - found[2] == pytest.approx(expected[4] - expected[2], rel=0.05)


LEAN = {"state_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16, "offload_base_weights": True}


@pytest.mark.parametrize(
    ("dtype", "how", "options"),
    [
        ("bf16", {}, {"master_weights": True}),
        ("bf16", {"lean": True}, LEAN),
        ("fp32", {}, {}),
    ],
    ids=["bf16", "lean", "fp32"],
)
def test_bytes_per_weight_are_those_of_the_optimizer(dtype, how, options):
    model = llama(2, dtype)
    n = sum(parameter.numel() for parameter in model.parameters())
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.1, seed=0), **options)
    completion_logprobs(model, BATCH).sum().backward()
    optimizer.step()
    parts = optimizer.nbytes()
    if how:
        del parts["base"]  # in host memory
    held = sum(parts.values()) + sum(parameter.nbytes for parameter in model.parameters())
    expected = bytes_per_weight(dtype, "sparse", mask_density=0.1, **how)
    assert held / n == pytest.approx(expected, rel=0.02)  # the norms' weights are few


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_all_weights_are_those_of_adamw(dtype):
    model = llama(2, dtype)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    completion_logprobs(model, BATCH).sum().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    held = sum(tensor.nbytes for tensor in [*parameters, *moments, *(parameter.grad for parameter in parameters)])
    n = sum(parameter.numel() for parameter in parameters)
    assert held / n == bytes_per_weight(dtype, "dense", master_weights=False)


def test_advice_fits_and_prefers_all_weights():
    small, large = (advice(gib * 2**30, has_bf16=True) for gib in (8, 140))
    shapes = {shape.name: shape for shape in SHAPES}
    for rows, memory in ((small, 8 * 2**30), (large, 140 * 2**30)):
        for row in rows:
            used = shapes[row["model"]].n_weights * row["bytes_per_weight"]
            used += 1024 * row["batch_size"] * row["bytes_per_token"]
            assert row["batch_size"] == 0 or used <= 0.9 * memory
    assert [row["profile"] for row in small] == ["balanced", "aggressive", "aggressive", None, None]
    assert [row["profile"] for row in large] == ["balanced"] * 4 + ["aggressive"]
    assert large[0]["options"] == ["per_device_train_batch_size=32", "gradient_accumulation_steps=1"]
    (row, *_) = advice(16 * 2**30, has_bf16=False)
    assert row["profile"] == "conservative"
    assert "fp16=true" in advice(16 * 2**30, has_bf16=False)[2]["options"]
