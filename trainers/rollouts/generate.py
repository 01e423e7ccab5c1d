"""Completions by transformers' `model.generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..policy.models import running_eagerly
from .sampling import Sampling, cut_at_eos, require_room


class GenerateEngine:
    """transformers' `generate`, with all prompts of a call padded on the left to the longest.

    Padding has no effect on a row: it is masked, and positions count from the prompt's first token. `generate` makes
    them so for every model whose forward takes position ids (as GPT-2's); those that take none make them from the
    attention mask (OPT), or know none.

    Args:
        model: a transformers causal language model, or peft's wrapper of one with LoRA-like adapters.
        pad_id: stands before shorter prompts and after ended rows; may be an EOS.
        eos_ids: any of them ends a completion.
        max_rows: completions sampled at once, which bounds the cache's memory; None for all of a call's. Draws depend
            on it.
    """

    def __init__(self, model: Any, *, pad_id: int, eos_ids: Sequence[int], max_rows: int | None = None):
        self.model = causal_lm(model)
        self.pad_id = pad_id
        self.eos_ids = tuple(eos_ids)
        self.max_rows = max_rows

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[list[int]]:
        """See `Engine.generate`.

        Raises:
            ConfigError: a prompt and its completion are longer than the model's positions reach.
        """
        require_room(self.model, prompts, sampling)
        rows = [prompt for prompt in prompts for _ in range(n)]
        size = self.max_rows or len(rows)
        completions = []
        with generating(self.model, generation_config(sampling, self.pad_id, self.eos_ids)):
            for start in range(0, len(rows), size):
                completions += self._sample(rows[start : start + size])
        return completions

    def _sample(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        padded = [[self.pad_id] * (width - len(ids)) + list(ids) for ids in prompts]
        attended = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        input_ids, attention_mask = (torch.tensor(t, dtype=torch.int64, device="cpu") for t in (padded, attended))
        device = self.model.device
        generated = self.model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=self.model.generation_config,
        )
        return [cut_at_eos(row, self.eos_ids) for row in generated[:, width:].tolist()]

    def close(self) -> None:
        """Nothing is held."""


def causal_lm(model: Any) -> Any:
    """The transformers model inside peft's wrapper, whose layers carry the adapters; any other model itself.

    peft's own `generate` leaves an attribute behind on the model it wraps.
    """
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def generation_config(sampling: Sampling, pad_id: int, eos_ids: Sequence[int]) -> Any:
    """transformers' settings for one completion a row."""
    from transformers import GenerationConfig

    # Older versions cut to the 50 likeliest unless told not to.
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return GenerationConfig(
        do_sample=not sampling.greedy,
        **({} if sampling.greedy else drawn),
        min_new_tokens=sampling.min_new_tokens,
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=pad_id,
        eos_token_id=list(eos_ids),
        use_cache=True,
    )


@contextmanager
def generating(model: Any, config: Any) -> Iterator[None]:
    """Inside, the model has these generation settings, and is in eval mode: activation checkpointing allows no cache.

    Compiled layers run eagerly inside: a cache that grows by a token has another shape at each.

    transformers fills what a caller leaves open from the model's own settings, which may come from a file beside the
    weights: a temperature, penalties, forced or forbidden tokens. Outside, each module has its own mode again.
    """
    modes = [(module, module.training) for module in model.modules()]
    before = model.generation_config
    model.generation_config = config
    try:
        model.eval()
        with running_eagerly(model):
            yield
    finally:
        model.generation_config = before
        for module, mode in modes:
            module.training = mode
