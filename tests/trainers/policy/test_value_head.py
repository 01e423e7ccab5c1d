"""The value head compared with plain autograd: one forward pass for both, gradients into the trunk, and its state."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from small_models import EPS, assert_same_gradients, plain_logprobs, random_sequences, small
from transformers import GPT2Config, GPTJConfig, LlamaConfig

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.trainers.data.encoding import collate
from sparse_opt.trainers.policy.adapters import add_lora
from sparse_opt.trainers.policy.logprobs import token_logprobs
from sparse_opt.trainers.policy.value_head import VALUE_HEAD_FILE, ValueHead, ValueHeadTrainer, logprobs_and_values
from sparse_opt.trainers.ppo import PPOConfig

# Plain heads, tied and not; and one with a bias, whose logits are taken as the model gives them.
MODELS = {"llama": (LlamaConfig, {}), "gpt2": (GPT2Config, {}), "gptj": (GPTJConfig, {"rotary_dim": 8})}


def plain_values(model, head, batch):
    """What `logprobs_and_values` gives besides log-probabilities, from the model's own hidden states."""
    output = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, output_hidden_states=True)
    states = output.hidden_states[-1][:, batch.first_trained - 1 : -1]
    values = torch.nn.functional.linear(states.float(), head.summary.weight, head.summary.bias)[..., 0]
    return torch.where(batch.completion_mask[:, batch.first_trained :], values, 0.0)


def both_losses(logprobs, values):
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    return (logprobs * weights).sum() + (values * weights.flip(1)).square().sum()


@pytest.mark.parametrize("name", MODELS)
def test_one_pass_gives_what_two_would_and_their_gradients(name):
    config_class, changes = MODELS[name]
    model = small(config_class, **changes)
    batch = collate(random_sequences(5, 211), pad_id=0)
    head = ValueHead.of(model, seed=3)
    calls = []
    handle = model.base_model.register_forward_hook(lambda *_: calls.append(1))
    logprobs_and_values(model, head, batch, 0.7)  # the first pass of a model may find out how it makes its logits
    calls.clear()
    logprobs, values = logprobs_and_values(model, head, batch, 0.7)
    assert len(calls) == 1
    handle.remove()
    both_losses(logprobs, values).backward()
    ours = {key: p.grad.clone() for key, p in [*model.named_parameters(), *head.named_parameters()]}
    model.zero_grad(), head.zero_grad()
    expected, expected_values = plain_logprobs(model, batch, 0.7), plain_values(model, head, batch)
    both_losses(expected, expected_values).backward()
    theirs = {key: p.grad for key, p in [*model.named_parameters(), *head.named_parameters()]}

    assert torch.equal(logprobs, token_logprobs(model, batch, 0.7))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=30 * 8 * EPS[torch.float32])
    # 32 products of states of a few units, from states that another batch of positions rounds otherwise.
    torch.testing.assert_close(values, expected_values, rtol=0, atol=32 * 8 * EPS[torch.float32])
    assert (values[~batch.completion_mask[:, batch.first_trained :]] == 0).all()
    assert_same_gradients(ours, theirs)


def test_values_are_fp32_and_padding_does_not_reach_them():
    model = small(LlamaConfig).bfloat16()
    sequences = random_sequences(4, 211)
    head = ValueHead.of(model, seed=0)
    with torch.no_grad():
        (_, one), (_, other) = (logprobs_and_values(model, head, collate(sequences, pad_id=pad)) for pad in (0, 7))
    assert one.dtype == head.summary.weight.dtype == torch.float32
    assert torch.equal(one, other) and one.abs().sum() > 0


def test_the_value_loss_trains_a_sparse_trunk_inside_the_mask_alone():
    model = small(LlamaConfig)
    start = copy.deepcopy(model.state_dict())
    mask = MaskSet.random(model, density=0.1, seed=1)
    optimizer = SparseAdamW(model, mask, lr=1e-2)
    head = ValueHead.of(model, seed=0)
    _, values = logprobs_and_values(model, head, collate(random_sequences(4, 211), pad_id=0))
    values.square().sum().backward()
    optimizer.step()
    changed = 0
    for name, before in start.items():
        active = mask.bool(name) if name in mask else torch.zeros(before.shape, dtype=torch.bool)
        differs = model.state_dict()[name] != before
        assert not differs[~active].any(), name
        changed += int(differs.sum())
    assert changed > 0.5 * mask.nnz


def test_under_adapters_the_trunk_learns_by_them():
    model = add_lora(small(LlamaConfig), rank=2)
    head = ValueHead.of(model, seed=0)
    assert head.summary.weight.shape == (1, 32)
    _, values = logprobs_and_values(model, head, collate(random_sequences(4, 211), pad_id=0))
    values.square().sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    assert head.summary.weight.grad.abs().sum() > 0


@pytest.fixture
def config(tmp_path) -> PPOConfig:
    return PPOConfig(
        policy_name="-", dataset="-", reward_functions=["exact_match"], learning_rate=0.1, n_steps=4, max_grad_norm=None
    )


def one_update(trainer: ValueHeadTrainer, states: torch.Tensor) -> None:
    trainer.head(states).square().sum().backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.scheduler.step()


def test_the_heads_optimizer_is_adamw_on_the_runs_schedule_and_resumes_to_the_bit(config):
    torch.manual_seed(0)
    states = torch.randn(6, 8)
    trainer = ValueHeadTrainer(ValueHead(8, seed=1), config, 0.02)
    plain = copy.deepcopy(trainer.head)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.0)
    for step in range(2):
        one_update(trainer, states)
        optimizer.param_groups[0]["lr"] = 0.02 * (4 - step) / 4
        plain(states).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(trainer.head.summary.weight, plain.summary.weight, rtol=1e-5, atol=1e-7)

    resumed = ValueHeadTrainer(ValueHead(8, seed=9), config, 0.02)
    resumed.load_state_dict(copy.deepcopy(trainer.state_dict()))
    for either in (trainer, resumed):
        one_update(either, states)
        one_update(either, states)
    for one, other in zip(trainer.head.parameters(), resumed.head.parameters(), strict=True):
        assert torch.equal(one, other)


def test_seed_fixes_the_start_and_leaves_torchs_randomness_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    one, same, other = (ValueHead(8, seed=seed).summary.weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(torch.rand(3), expected)


def test_saved_under_trls_names(config, tmp_path):
    trainer = ValueHeadTrainer(ValueHead(8, seed=1), config, 0.02)
    path = trainer.save(tmp_path)
    assert path == tmp_path / VALUE_HEAD_FILE
    saved = load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
        "v_head.summary.weight": (1, 8),
        "v_head.summary.bias": (1,),
    }
    assert torch.equal(saved["v_head.summary.weight"], trainer.head.summary.weight)
