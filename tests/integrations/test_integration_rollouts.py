"""GRPO's completions are sampled from the current weights, with every generator."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import ContinuousBatchingConfig


def digest(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_continuous_batching_generates_from_the_weights_of_each_step(lab, weights, dtype):
    page_size = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    trainer = lab(
        "GRPO",
        mask=lab.random_mask(0.1),
        model=lab.model(dtype),
        beta=0.3,
        max_steps=3,
        bf16=dtype == torch.bfloat16,
        warmup_steps=0,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={
            "num_blocks": 8,
            page_size: 32,
            "max_batch_tokens": 64,
            "max_requests_per_batch": 8,
        },
    )
    seen = []
    generate = trainer._generate_single_turn

    def watched(*args, **kwargs):
        seen.append(digest(trainer.model))
        return generate(*args, **kwargs)

    trainer._generate_single_turn = watched
    trainer.train()
    assert len(seen) == 3
    assert same(seen[0], lab.model(dtype).parameters())
    assert not same(seen[0], seen[1]) and not same(seen[1], seen[2])
    assert {p.dtype for p in trainer.model.parameters()} == {dtype}


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_generate_runs_with_the_weights_of_each_step(lab, beta):
    trainer = lab("GRPO", mask=lab.random_mask(0.1), beta=beta, max_steps=3, warmup_steps=0)
    seen, after = [], []
    generate, step = trainer._generate_single_turn, trainer.training_step

    def watched(*args, **kwargs):
        seen.append(digest(trainer.model))
        return generate(*args, **kwargs)

    def stepped(*args, **kwargs):
        loss = step(*args, **kwargs)
        after.append(digest(trainer.model))
        return loss

    trainer._generate_single_turn, trainer.training_step = watched, stepped
    trainer.train()
    # Two micro-batches a step: what the second one saw is what the step before it began with.
    assert same(seen[0], lab.model().parameters())
    assert same(seen[1], after[2]) and same(seen[2], after[4])
    assert not same(seen[1], seen[2])
