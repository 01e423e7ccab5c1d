"""Sampling of completions during training by transformers' `model.generate`, with a key-value cache.

`rollout` recomputes the log-probabilities of the samples with the policy, as in training. With `share_prompts` the keys
and values of a prompt are computed once and copied to its completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from sparse_opt.errors import ConfigError, DataError

from .batches import TokenBatch, TokenSequence, chunks, collate
from .logprobs import token_logprobs
from .models import causal_lm, has_compiled_layers
from .pretrained import max_positions
from .shared_prompts import branch_offsets, collate_shared_prompts


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of completions. A model's own generation settings are not used.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: int  # including EOS
    temperature: float = 1.0  # the logits are divided by it; 0 selects the most likely token
    min_new_tokens: int = 0  # minimum number of tokens before EOS
    top_p: float = 1.0  # probability mass of the most likely tokens to sample from; 1 samples from all
    top_k: int = 0  # number of most likely tokens to sample from; 0 samples from all

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {self.min_new_tokens}, expected 0 to max_new_tokens {self.max_new_tokens}"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}, expected at least 0 (0: the most likely token)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}, expected at least 0 (0: all tokens)")

    @property
    def logprob_temperature(self) -> float:
        """The temperature of log-probabilities: that of sampling, or 1 if the most likely token is selected."""
        return self.temperature or 1.0


# Completions


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    pad_id: int,
    eos_ids: Sequence[int],
    n: int = 1,
    share_prompts: bool = False,
) -> list[list[int]]:
    """`n` completions of each prompt, grouped by prompt, each up to its first EOS, which is included.

    All rows are one batch, with prompts left-padded to the longest. Padding does not affect a row: it is masked, and
    positions count from the prompt's first token. Random numbers come from torch's global random state.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one with LoRA-like adapters.
        prompts: token ids, none empty.
        pad_id: token id of the padding; may be that of EOS.
        eos_ids: any of them ends a completion.
        share_prompts: compute the keys and values of a prompt once for its `n` completions.

    Raises:
        ConfigError: there are no prompts, a prompt is empty, or one with its completion exceeds the model's positions.
    """
    from transformers import DynamicCache, GenerationConfig

    if not prompts or not all(map(len, prompts)):
        raise ConfigError(f"{len(prompts)} prompts, of lengths {[len(ids) for ids in prompts]}: expected none empty")
    model = causal_lm(model)
    width, limit = max(map(len, prompts)), max_positions(model.config)
    if limit is not None and width + sampling.max_new_tokens > limit:
        raise ConfigError(
            f"a prompt of {width} tokens and max_new_tokens {sampling.max_new_tokens} make "
            f"{width + sampling.max_new_tokens}, more than the model's max_position_embeddings, {limit}"
        )
    padded = [[pad_id] * (width - len(ids)) + list(ids) for ids in prompts]
    attended = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    input_ids, attention_mask = (
        torch.tensor(table, dtype=torch.int64, device="cpu").to(model.device) for table in (padded, attended)
    )
    # Older versions sample from the 50 most likely tokens by default.
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    config = GenerationConfig(
        do_sample=sampling.temperature > 0,
        **(drawn if sampling.temperature > 0 else {}),
        min_new_tokens=sampling.min_new_tokens,
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=pad_id,
        eos_token_id=list(eos_ids),
        use_cache=True,
    )
    with _generating(model, config):
        options = {}
        if share_prompts and width > 1:
            # The cache of all but the last token, which `generate` computes with the first new one.
            options["past_key_values"] = cache = DynamicCache(config=model.config)
            model(
                input_ids=input_ids[:, :-1],
                attention_mask=attention_mask[:, :-1],
                position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, :-1],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache.batch_repeat_interleave(n)
        found = model.generate(
            input_ids=input_ids.repeat_interleave(n, dim=0),
            attention_mask=attention_mask.repeat_interleave(n, dim=0),
            generation_config=config,
            **options,
        )
    rows: list[list[int]] = found[:, width:].tolist()
    ends = [next((end for end, token in enumerate(row, 1) if token in eos_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@contextmanager
def _generating(model: Any, config: Any) -> Iterator[None]:
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
        with torch.compiler.set_stance("force_eager") if has_compiled_layers(model) else nullcontext():
            yield
    finally:
        model.generation_config = before
        for module, mode in modes:
            module.training = mode


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's EOS first, then those of the model's generation settings.

    Chat models end a turn with another token than a document, and list both in generation_config.json.

    Raises:
        ConfigError: there is none.
        DataError: the generation settings contain an invalid token id.
    """
    own = model.generation_config.eos_token_id
    found = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    found = [token for token in found if token is not None]
    if not found:
        raise ConfigError(
            f"neither the tokenizer nor the generation settings of {type(model).__name__} name an EOS token, "
            "which a rollout needs"
        )
    if any(type(token) is not int or token < 0 for token in found):
        raise DataError(
            f"eos_token_id of the generation settings of {type(model).__name__} is {own!r}: expected token ids"
        )
    return tuple(dict.fromkeys(found))


# Rollouts


@dataclass(frozen=True)
class Rollout:
    """Sampled completions, grouped by prompt: R rows of prompt and completion, right-padded to T.

    The columns of [R, P] tensors are positions `batch.first_trained` to T - 1, as in `token_logprobs`.
    """

    batch: TokenBatch  # [R, T] prompts and completions; completion_mask holds the sampled tokens, EOS among them
    logprobs: Tensor  # [R, P] fp32, of the sampled tokens under the policy that sampled them; 0 elsewhere
    sequences: list[TokenSequence]  # the R rows' token ids, without padding
    completions_per_row: int = 1  # of one prompt, in forward passes of `token_logprobs`

    @property
    def mask(self) -> Tensor:
        """[R, P] bool, the sampled tokens."""
        return self.batch.completion_mask[:, self.batch.first_trained :]

    @property
    def completions(self) -> list[list[int]]:
        """The sampled token ids of each row, EOS among them."""
        return [sequence.ids[sequence.prompt_length :] for sequence in self.sequences]

    def __len__(self) -> int:
        return len(self.sequences)

    def token_logprobs(self, model: Any, temperature: float, rows_per_pass: int | None = None) -> Tensor:
        """Log-probabilities of the sampled tokens under a model: [R, P] fp32, 0 elsewhere.

        Args:
            rows_per_pass: consecutive completions of a forward pass, trimmed to their longest; None takes all.
        """
        if rows_per_pass is not None:
            logprobs = torch.zeros_like(self.mask, dtype=torch.float32)
            for rows, part in self.minibatches(rows_per_pass):
                self.cut(logprobs, rows).copy_(part.token_logprobs(model, temperature))
            return logprobs
        if self.completions_per_row == 1:
            return token_logprobs(model, self.batch, temperature)
        return _grouped_logprobs(model, self.batch, self.sequences, self.completions_per_row, temperature)

    def minibatches(self, size: int) -> Iterator[tuple[slice, Rollout]]:
        """Yield (rows, `select(rows)`) for consecutive parts of `size` rows; the last may be smaller."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield rows, self.select(rows)

    def select(self, rows: slice) -> Rollout:
        """These rows, trimmed to the longest of them, with columns from their first sampled token on."""
        sequences, (first, length) = self.sequences[rows], self._extent(rows)
        batch = replace(
            self.batch,
            input_ids=self.batch.input_ids[rows, :length],
            attention_mask=self.batch.attention_mask[rows, :length],
            completion_mask=self.batch.completion_mask[rows, :length],
            first_trained=first,
            n_tokens=sum(len(sequence.ids) for sequence in sequences),
            n_trained=sum(sequence.n_trained for sequence in sequences),
        )
        return replace(self, batch=batch, logprobs=self.cut(self.logprobs, rows), sequences=sequences)

    def cut(self, values: Tensor, rows: slice) -> Tensor:
        """The part of a [R, P] tensor (advantages, values, reference log-probabilities) for `select(rows)`."""
        first, length = self._extent(rows)
        return values[rows, first - self.batch.first_trained : length - self.batch.first_trained]

    def _extent(self, rows: slice) -> tuple[int, int]:
        """The first sampled position and the length of these rows' batch."""
        sequences = self.sequences[rows]
        first = min(sequence.prompt_length for sequence in sequences)
        return first, max(len(sequence.ids) for sequence in sequences)


@torch.no_grad()
def rollout(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    n_generations: int,
    pad_id: int,
    eos_ids: Sequence[int],
    rows_per_pass: int | None = None,
    share_prompts: bool = False,
    completions_per_row: int = 1,
) -> Rollout:
    """Sample `n_generations` completions of each prompt, and compute their log-probabilities under the model.

    Log-probabilities are computed in separate forward passes, as in training, at the sampling temperature, because
    those of sampling come from other kernels and a cache, and differ. They refer to the whole distribution even if
    `top_p` or `top_k` restrict the sampled one.

    Args:
        prompts, sampling, pad_id, eos_ids, share_prompts: see `generate`.
        rows_per_pass: see `Rollout.token_logprobs`. If training uses the same rows in one pass, its first
            log-probabilities are bit-identical to these.
        completions_per_row: see `Rollout`.

    Raises:
        ConfigError: see `generate`.
    """
    ends: dict[str, Any] = {"pad_id": pad_id, "eos_ids": eos_ids}
    sampled = sample(model, prompts, sampling, n_generations=n_generations, share_prompts=share_prompts, **ends)
    sampled = replace(sampled, completions_per_row=completions_per_row)
    return replace(sampled, logprobs=sampled.token_logprobs(model, sampling.logprob_temperature, rows_per_pass))


def sample(
    model: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, *, n_generations: int, pad_id: int, **options: Any
) -> Rollout:
    """`rollout` without log-probabilities, which are 0; the other options are those of `generate`."""
    completions = generate(model, prompts, sampling, pad_id=pad_id, n=n_generations, **options)
    sequences = [
        TokenSequence([*prompts[row // n_generations], *completion], len(prompts[row // n_generations]))
        for row, completion in enumerate(completions)
    ]
    batch = collate(sequences, pad_id).to(next(model.parameters()).device)
    none = torch.zeros_like(batch.completion_mask[:, batch.first_trained :], dtype=torch.float32)
    return Rollout(batch, none, sequences)


def _grouped_logprobs(
    model: Any, batch: TokenBatch, sequences: Sequence[TokenSequence], per_row: int, temperature: float
) -> Tensor:
    """`token_logprobs(model, batch, temperature)`, computed with up to `per_row` consecutive completions in a row.

    Args:
        batch: [R, T], the `sequences` in rows of their own.
    """
    groups = [
        list(part)
        for _, of_prompt in groupby(sequences, key=lambda sequence: sequence.ids[: sequence.prompt_length])
        for part in chunks(list(of_prompt), per_row)
    ]
    device = batch.input_ids.device
    rows = collate_shared_prompts(groups, pad_id=0).to(device)  # no token sees the padding
    values = token_logprobs(model, rows, temperature)  # [rows, W]

    # The position in `values` of each sequence's position 0, also where that is before the row's first column.
    offsets = [
        row * values.shape[1] + offset - rows.first_trained
        for row, group in enumerate(groups)
        for offset in branch_offsets(group)
    ]
    first, trained = batch.first_trained, batch.completion_mask[:, batch.first_trained :]
    positions = torch.arange(first, first + trained.shape[1], device=device)
    places = torch.tensor(offsets, dtype=torch.int64, device="cpu").to(device)[:, None] + positions
    return torch.where(trained, values.flatten()[torch.where(trained, places, 0)], 0.0)
