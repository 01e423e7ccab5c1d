"""Batches made by worker processes: those of a run without workers, in the same order, also after it resumes."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import pytest
import torch
from small_models import random_sequences
from stopping import assert_same_run, stop_and_resume

from sparse_opt.errors import ConfigError
from sparse_opt.trainers import dpo
from sparse_opt.trainers.data.encoding import TokenBatch, collate_examples
from sparse_opt.trainers.data.order import ShuffledOrder
from sparse_opt.trainers.data.prefetch import StepBatches
from sparse_opt.trainers.grpo import GRPOConfig


def step_batches(collate=None):
    collate = collate or partial(collate_examples, pad_id=0)
    data = [[sequence] for sequence in random_sequences(10, 50)]
    return StepBatches(data, ShuffledOrder(10, seed=1), 6, [slice(0, 4), slice(4, 6)], collate)


def test_workers_keep_the_order_of_the_steps():
    batches = step_batches()
    state = torch.get_rng_state()
    found = list(itertools.islice(batches.ahead(range(3, 40), 2, pin_memory=False), 12))
    assert torch.equal(torch.get_rng_state(), state)
    for step, of_step in enumerate(found, 3):
        expected = list(batches.batches(step))
        assert len(of_step) == len(expected) == 2
        for ours, theirs in zip(of_step, expected, strict=True):
            for field in dataclasses.fields(TokenBatch):
                one, other = getattr(ours, field.name), getattr(theirs, field.name)
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def broken(examples):
    raise ValueError("no such batch")


def test_an_error_of_a_worker_is_raised_here():
    with pytest.raises(ValueError, match="no such batch"):
        next(step_batches(broken).ahead(range(1, 3), 1, pin_memory=False))


def test_a_run_with_workers_is_the_run_without(monkeypatch, dpo_options, tmp_path):
    options = {"n_steps": 5, "save_steps": 2, "batch_size": 3, "gradient_accumulation_steps": 2}
    without = dpo.train(dpo_options(**options, output_dir=tmp_path / "without"))
    config = dpo_options(**options, dataloader_num_workers=1)
    assert_same_run(without, stop_and_resume(monkeypatch, dpo.train, config, 2))


def test_sampled_completions_cannot_be_made_ahead():
    with pytest.raises(ConfigError, match="'dataloader_num_workers' is 1: batches of sampled completions"):
        GRPOConfig(policy_name="m", dataset="d", dataloader_num_workers=1)


@pytest.mark.gpu
def test_batches_for_a_gpu_are_pinned():
    batches = step_batches()
    ((first, _),) = batches.ahead(range(1, 2), 1, pin_memory=True)
    assert first.input_ids.is_pinned() and first.completion_mask.is_pinned()
    expected = next(batches.batches(1))
    assert torch.equal(first.to(torch.device("cuda")).input_ids.cpu(), expected.input_ids)
