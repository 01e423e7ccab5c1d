"""Packed rows: which sequences share a row, and that they train like separate ones."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from small_models import random_sequences, small
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
)

from sparse_opt.errors import ConfigError
from sparse_opt.trainers import sft
from sparse_opt.trainers.data.encoding import collate
from sparse_opt.trainers.data.packing import check_packing, collate_packed, pack
from sparse_opt.trainers.policy.adapters import add_lora
from sparse_opt.trainers.policy.logprobs import completion_logprobs, token_logprobs
from sparse_opt.trainers.policy.models import make_masks_skippable

EPS = 2**-23
MODELS = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "gpt2": (GPT2Config, {}),
    "mistral-window": (MistralConfig, {"sliding_window": 4}),
}


def lengths_of(n, capacity, seed):
    generator = random.Random(seed)
    return [generator.randint(1, capacity) for _ in range(n)]


# Rows


@pytest.mark.parametrize(("n", "capacity"), [(1, 8), (40, 8), (300, 64), (300, 7)])
def test_rows_hold_each_sequence_once_and_are_not_too_long(n, capacity):
    lengths = lengths_of(n, capacity, seed=n)
    rows = pack(lengths, capacity)
    assert sorted(itertools.chain(*rows)) == list(range(n))
    sums = [sum(lengths[index] for index in row) for row in rows]
    assert max(sums) <= capacity
    # Of two rows that are half empty, one would have gone into the other.
    assert sum(2 * total <= capacity for total in sums) <= 1


def test_best_fit():
    assert pack([4, 3, 7, 2, 5], 8) == [[2], [4, 1], [0, 3]]
    assert pack([5, 6, 2], 8) == [[1, 2], [0]]  # the row with the least space that it fits in
    assert pack([], 8) == []


@pytest.mark.parametrize("length", [0, 9])
def test_a_length_that_fits_no_row_is_refused(length):
    with pytest.raises(ValueError, match=f"sequence 1 has {length} tokens: expected 1 to 8"):
        pack([3, length], 8)


def test_rows_are_those_of_trl():
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    lengths = lengths_of(200, 32, seed=1)
    dataset = datasets.Dataset.from_dict({"input_ids": [[i] * length for i, length in enumerate(lengths)]})
    theirs = trl.pack_dataset(dataset, seq_length=32, strategy="bfd")["input_ids"]
    assert [[i for index in row for i in [index] * lengths[index]] for row in pack(lengths, 32)] == list(theirs)


# Training on them


def packed_and_alone(seed=0):
    sequences = random_sequences(14, 211, seed)
    sequences.append(dataclasses.replace(sequences[0], prompt_length=0))  # its first token has none before it
    rows = pack([len(sequence.ids) for sequence in sequences], 48)
    assert max(map(len, rows)) > 2
    return [[sequences[index] for index in row] for row in rows], sequences


def test_batch_of_packed_rows():
    rows, sequences = packed_and_alone()
    batch = collate_packed(rows, pad_id=0)
    assert batch.n_tokens == sum(len(sequence.ids) for sequence in sequences) == int(batch.attention_mask.sum())
    assert batch.n_trained == collate(sequences, 0).n_trained == int(batch.completion_mask.sum())
    assert batch.first_trained == int(batch.completion_mask.any(dim=0).nonzero()[0])
    assert not batch.completion_mask[batch.position_ids == 0].any()
    for i, row in enumerate(rows):
        end = 0
        for sequence in row:
            start, end = end, end + len(sequence.ids)
            assert batch.input_ids[i, start:end].tolist() == sequence.ids
            assert batch.position_ids[i, start:end].tolist() == list(range(end - start))
        assert not batch.attention_mask[i, end:].any()


def gradients(model, batch):
    model.zero_grad()
    loss = sft.sft_loss(completion_logprobs(model, batch), batch.n_trained)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_sequences_alone(name):
    config_class, changes = MODELS[name]
    model = small(config_class, **changes)
    # The loops load their models so; the others make their masks in every case.
    assert make_masks_skippable(model) == (name in ("llama", "qwen3"))
    check_packing(model)
    rows, sequences = packed_and_alone()
    loss, grads = gradients(model, collate_packed(rows, pad_id=0))
    their_loss, their_grads = gradients(model, collate(sequences, pad_id=0))
    # A mean of log-softmaxes of up to 10, of a few roundings each; gradients are sums over some 200 tokens, accumulated
    # in another order.
    assert loss == pytest.approx(their_loss, abs=10 * 8 * EPS)
    assert grads.keys() == their_grads.keys()
    for key, grad in their_grads.items():
        torch.testing.assert_close(grads[key], grad, rtol=0, atol=200 * EPS * grad.abs().max().item(), msg=key)


def test_no_token_sees_another_sequence():
    model = small(LlamaConfig)
    make_masks_skippable(model)
    rows, _ = packed_and_alone()
    batch = collate_packed(rows, pad_id=0)
    first = len(rows[0][0].ids)
    changed = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
    changed.input_ids[0, :first] = (changed.input_ids[0, :first] + 1) % 211
    with torch.no_grad():
        before, after = token_logprobs(model, batch), token_logprobs(model, changed)
    outside = torch.ones_like(before, dtype=torch.bool)
    outside[0, : first - batch.first_trained] = False
    assert torch.equal(before[outside], after[outside])
    assert not torch.equal(before, after)


# Models for which it would be wrong


def test_models_that_can():
    check_packing(add_lora(small(LlamaConfig), 2))
    check_packing(small(GPT2Config).to(torch.bfloat16))


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2),  # passes position ids over
        MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4),  # carries a state along
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_mixes_sequences_is_refused(config):
    with pytest.raises(ConfigError, match="'packing': in .*ForCausalLM a packed sequence depends on the one before"):
        check_packing(AutoModelForCausalLM.from_config(config))


def test_a_model_without_position_ids_is_refused(monkeypatch):
    model = small(LlamaConfig)
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda input_ids, attention_mask, use_cache: forward(input_ids, attention_mask)
    )
    with pytest.raises(ConfigError, match="'packing': LlamaForCausalLM takes no position ids; train it without"):
        check_packing(model)


def test_a_model_that_counts_positions_on_is_refused(monkeypatch):
    model = small(GPT2Config)
    make_embedding = model.transformer.wpe.forward
    monkeypatch.setattr(model.transformer.wpe, "forward", lambda ids: make_embedding(torch.arange(ids.shape[1])[None]))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel gives a packed sequence other logits than alone"):
        check_packing(model)
