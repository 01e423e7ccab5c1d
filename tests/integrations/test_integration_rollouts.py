"""GRPO's completions are sampled from the current weights, with every generator."""

import pytest
import torch
from transformers.generation import ContinuousBatchingConfig


def weights_at(trainer, method: str) -> list[list[torch.Tensor]]:
    """Of each call of the method, the weights when it begins."""
    seen, called = [], getattr(trainer, method)

    def watched(*args, **kwargs):
        seen.append([p.detach().clone() for p in trainer.model.parameters()])
        return called(*args, **kwargs)

    setattr(trainer, method, watched)
    return seen


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
    seen = weights_at(trainer, "_generate_single_turn")
    trainer.train()
    assert len(seen) == 3
    assert same(seen[0], lab.model(dtype).parameters())
    assert not same(seen[0], seen[1]) and not same(seen[1], seen[2])
    assert {p.dtype for p in trainer.model.parameters()} == {dtype}


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_generate_runs_with_the_weights_of_each_step(lab, beta):
    trainer = lab("GRPO", mask=lab.random_mask(0.1), beta=beta, max_steps=3, warmup_steps=0)
    seen, before = weights_at(trainer, "_generate_single_turn"), weights_at(trainer, "training_step")
    trainer.train()
    # Two micro-batches a step, and the first of each begins with the weights of the step before it.
    assert same(seen[0], lab.model().parameters())
    assert same(seen[1], before[2]) and same(seen[2], before[4])
    assert not same(seen[1], seen[2])
