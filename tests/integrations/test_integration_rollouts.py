"""GRPO's completions are sampled from the current weights, with every generator."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.generation import ContinuousBatchingConfig
from trl.generation.vllm_generation import VLLMGeneration


def digest(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


class Served(VLLMGeneration):
    """TRL's own way of sending weights to a vLLM server, with a second model in the server's place."""

    def __init__(self, trainer):
        self.model, self.accelerator = trainer.model, trainer.accelerator
        self.mode, self.enable_sleep_mode, self._weight_metadata = "server", False, None
        self._dist = trainer._dist
        self.vllm_client = self
        self.server = copy.deepcopy(trainer.model)
        self.sent = 0

    def update_named_params(self, metadata, params):
        with torch.no_grad():
            for (name, dtype, shape), (sent_name, param) in zip(metadata, params, strict=True):
                target = self.server.get_parameter(name)
                assert (name, shape, dtype) == (sent_name, list(target.shape), str(target.dtype).split(".")[1])
                target.copy_(param)
        self.sent += 1

    def reset_prefix_cache(self):
        return True

    def generate(self, prompts, images, num_generations, profiler=None):
        assert same(self.server.parameters(), self.model.parameters())
        ids = [self.server.generate(torch.tensor([p]), max_new_tokens=6, do_sample=True)[0, len(p) :] for p in prompts]
        return prompts, [i.tolist() for i in ids], [[[0.0]] * len(i) for i in ids], None


def test_vllm_is_sent_the_weights_of_each_step(lab, weights):
    trainer = lab(
        "GRPO",
        mask=lab.random_mask(0.1),
        beta=0.3,
        max_steps=4,
        vllm_importance_sampling_correction=False,
        warmup_steps=0,
    )
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = served = Served(trainer)
    trainer.train()
    assert served.sent == 4  # before each step
    assert not same(served.server.parameters(), lab.model().parameters())


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
