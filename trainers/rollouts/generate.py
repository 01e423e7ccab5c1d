"""The rollout engine `generate`, by transformers' `model.generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..data.order import chunks
from ..policy.models import causal_lm, running_eagerly
from .engine import Completions, Sampling, cut_at_eos, require_positions


class GenerateEngine:
    """transformers' `generate`, with all prompts of a call left-padded to the longest.

    Padding does not affect a row: it is masked, and positions count from the prompt's first token. `generate` computes
    such positions for every model whose forward takes position ids (such as GPT-2); others compute them from the
    attention mask (OPT) or have none.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one with LoRA-like adapters.
        pad_id: token id of the padding before shorter prompts and after finished rows; may be that of EOS.
        eos_ids: any of them ends a completion.
        max_rows: completions sampled at once, which limits the memory of the cache; None for all of a call. Samples
            depend on it.
        by_length: sample prompts of similar lengths together, where `max_rows` divides them, for less padding.
        synced: make as many forward passes on every rank as on the one with the longest completion.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        eos_ids: Sequence[int],
        max_rows: int | None = None,
        by_length: bool = False,
        synced: bool = False,
    ):
        self.model = causal_lm(model)
        self.pad_id = pad_id
        self.eos_ids = tuple(eos_ids)
        self.max_rows = max_rows
        self.by_length = by_length
        self.synced = synced

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Completions:
        """See `Engine.generate`. Reports no log-probabilities: transformers would keep those of all tokens.

        Raises:
            ConfigError: a prompt with its completion exceeds the model's positions.
        """
        if not prompts:
            return Completions([])
        require_positions(self.model, prompts, sampling)
        rows = [prompt for prompt in prompts for _ in range(n)]
        order = list(range(len(rows)))
        if self.by_length:
            order.sort(key=lambda row: len(rows[row]))
        completions: list[list[int]] = [[] for _ in rows]
        with generating(self.model, generation_config(sampling, self.pad_id, self.eos_ids)):
            for part in chunks(order, self.max_rows or len(rows)):
                for row, ids in zip(part, self._sample([rows[row] for row in part], sampling), strict=True):
                    completions[row] = ids
        return Completions(completions)

    def _sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """One completion of each prompt; within `generating` with these settings."""
        input_ids, attended = self.padded(prompts)
        generated = self.model.generate(
            input_ids=input_ids,
            attention_mask=attended,
            generation_config=self.model.generation_config,
            synced_gpus=self.synced,
        )
        return [cut_at_eos(row, self.eos_ids) for row in generated[:, input_ids.shape[1] :].tolist()]

    def padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """The prompts, left-padded to the longest, and the mask of their tokens: [R, T] int64 on the model's device."""
        width = max(map(len, prompts))
        padded = [[self.pad_id] * (width - len(ids)) + list(ids) for ids in prompts]
        attended = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        tables = (torch.tensor(table, dtype=torch.int64, device="cpu") for table in (padded, attended))
        input_ids, attention_mask = (table.to(self.model.device) for table in tables)
        return input_ids, attention_mask

    def close(self) -> None:
        """Do nothing: no resources are held."""


def generation_config(sampling: Sampling, pad_id: int, eos_ids: Sequence[int]) -> Any:
    """transformers' generation settings for one completion per row."""
    from transformers import GenerationConfig

    # Older versions sample from the 50 most likely tokens by default.
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
    """A context with these generation settings and eval mode, because activation checkpointing allows no cache.

    Compiled layers run eagerly, because the shape of the growing cache changes with every token.

    transformers takes settings that a caller does not give from the model's own, which may come from a file next to the
    weights: a temperature, penalties, forced or forbidden tokens. The mode of each module is restored on exit.
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
