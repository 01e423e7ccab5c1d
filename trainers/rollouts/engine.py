"""The interface of the engines (`Sampling`, `Engine`), and the `Rollout` that training uses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sparse_opt.errors import ConfigError, DataError, SparseOptError

from ..data.encoding import TokenBatch, TokenSequence, collate
from ..data.order import chunks
from ..policy.logprobs import token_logprobs
from ..policy.pretrained import max_positions
from ..ranks import ONE_RANK, Ranks
from .grouped import grouped_logprobs


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of completions. A model's own generation settings are not used.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: int  # including EOS
    temperature: float = 1.0  # the logits are divided by it; 0 selects the most likely token
    top_p: float = 1.0  # probability mass of the most likely tokens to sample from; 1 samples from all
    top_k: int = 0  # number of most likely tokens to sample from; 0 samples from all
    min_new_tokens: int = 0  # minimum number of tokens before EOS

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
    def greedy(self) -> bool:
        """Whether the most likely token is selected without sampling."""
        return self.temperature == 0

    @property
    def logprob_temperature(self) -> float:
        """The temperature of log-probabilities: that of sampling, or 1 for greedy decoding."""
        return 1.0 if self.greedy else self.temperature


@dataclass(frozen=True)
class Completions:
    """What an engine has sampled: one row per completion."""

    ids: list[list[int]]  # token ids
    # Log-probability of each of these tokens in the distribution that the engine sampled it from, which depends on
    # temperature, top_p and top_k; None if the engine does not report them.
    logprobs: list[list[float]] | None = None


class Engine(Protocol):
    """Samples completions from the current policy without changing it.

    Random numbers come from torch's global random state, or from a seed drawn from it, so seeding torch fixes them.
    """

    eos_ids: tuple[int, ...]  # the first of any of these ends a completion

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Completions:
        """`n` completions of each prompt, grouped by prompt: len(prompts) * n rows.

        A completion ends with its first EOS, which is included, or at `max_new_tokens`. With several ranks, each calls
        it with its own prompts, which may be none.
        """

    def close(self) -> None:
        """Release the engine's resources; it cannot be used afterwards."""


class ChunkedEngine:
    """An engine wrapper that samples about `completions` completions per call of the engine."""

    def __init__(self, engine: Engine, completions: int):
        self.eos_ids = engine.eos_ids
        self._engine, self._completions = engine, completions

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Completions:
        """See `Engine.generate`."""
        parts = chunks(prompts, max(1, self._completions // n))
        return concatenated([self._engine.generate(part, n, sampling) for part in parts])

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.close()


@dataclass(frozen=True)
class Rollout:
    """Sampled completions, grouped by prompt: R rows of prompt and completion, right-padded to T.

    The columns of [R, P] tensors are positions `batch.first_trained` to T - 1, as in `token_logprobs`.
    """

    batch: TokenBatch  # [R, T] prompts and completions; completion_mask holds the sampled tokens, EOS among them
    logprobs: Tensor  # [R, P] fp32, of the sampled tokens under the policy that sampled them; 0 elsewhere
    ended: Tensor  # [R] bool: the completion ends with EOS and was not truncated
    sequences: list[TokenSequence]  # the R rows' token ids, without padding
    # [R, P] fp32, of the sampled tokens as the engine reports them; 0 elsewhere. None if it does not report them.
    engine_logprobs: Tensor | None = None
    completions_per_row: int = 1  # in forward passes of `token_logprobs`: of one prompt, see `grouped`

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

    def token_logprobs(self, model: Any, temperature: float) -> Tensor:
        """Log-probabilities of the sampled tokens under a model, in one forward pass: [R, P] fp32, 0 elsewhere."""
        if self.completions_per_row == 1:
            return token_logprobs(model, self.batch, temperature)
        return grouped_logprobs(model, self.batch, self.sequences, self.completions_per_row, temperature)

    def select(self, rows: slice | Sequence[int]) -> Rollout:
        """These rows, trimmed to the longest of them, with columns from their first sampled token on."""
        index = range(len(self))[rows] if isinstance(rows, slice) else rows
        sequences = [self.sequences[row] for row in index]
        first, length = self._extent(index)
        batch = replace(
            self.batch,
            input_ids=self.batch.input_ids[rows][:, :length],
            attention_mask=self.batch.attention_mask[rows][:, :length],
            completion_mask=self.batch.completion_mask[rows][:, :length],
            first_trained=first,
            n_tokens=sum(len(sequence.ids) for sequence in sequences),
            n_trained=sum(sequence.n_trained for sequence in sequences),
        )
        engine_logprobs = None if self.engine_logprobs is None else self.cut(self.engine_logprobs, rows)
        return replace(
            self,
            batch=batch,
            logprobs=self.cut(self.logprobs, rows),
            ended=self.ended[rows],
            sequences=sequences,
            engine_logprobs=engine_logprobs,
        )

    def cut(self, values: Tensor, rows: slice | Sequence[int]) -> Tensor:
        """The part of a [R, P] tensor (advantages, values, reference log-probabilities) for `select(rows)`."""
        index = range(len(self))[rows] if isinstance(rows, slice) else rows
        first, length = self._extent(index)
        return values[rows][:, first - self.batch.first_trained : length - self.batch.first_trained]

    def _extent(self, index: Sequence[int]) -> tuple[int, int]:
        """The first sampled position and the length of these rows' batch; without rows it has no columns."""
        sequences, none = [self.sequences[row] for row in index], self.batch.first_trained
        return (
            min((sequence.prompt_length for sequence in sequences), default=none),
            max((len(sequence.ids) for sequence in sequences), default=none),
        )

    def minibatches(
        self, size: int, ranks: Ranks = ONE_RANK, rows_per_step: int | None = None
    ) -> Iterator[tuple[slice, Rollout]]:
        """Yield (rows, `select(rows)`) for consecutive parts of `size` rows; the last may be smaller.

        The ranks share all rows, or every `rows_per_step` rows.
        """
        steps = range(0, len(self), rows_per_step or len(self))
        for start in steps:
            for rows in ranks.passes(start, min(start + steps.step, len(self)), size):
                yield rows, self.select(rows)


@torch.no_grad()
def rollout(
    engine: Engine,
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    n_generations: int,
    sampling: Sampling,
    pad_id: int,
    rows_per_pass: int | None = None,
    rows_per_step: int | None = None,
    completions_per_row: int = 1,
    ranks: Ranks = ONE_RANK,
) -> Rollout:
    """Sample `n_generations` completions of each prompt, and compute their log-probabilities under the model.

    Log-probabilities are computed in separate forward passes, as in training, at the sampling temperature, because
    those of an engine come from other kernels, a cache or another dtype and differ. They refer to the whole
    distribution even if `top_p` or `top_k` restrict the sampled one, again as in training.

    Args:
        engine: samples from the weights that `model` has.
        model: the policy, a transformers causal language model or peft's wrapper of one.
        prompts, n_generations, sampling, pad_id: see `sample`.
        rows_per_pass: consecutive completions per forward pass, trimmed to their longest; None takes all. If training
            uses the same rows in one pass, its first log-probabilities are bit-identical to these.
        rows_per_step: consecutive completions that the ranks share, as in an optimizer step; None shares all.
        completions_per_row: see `Rollout.completions_per_row`.
        ranks: processes that share the work; all get the whole rollout.

    Raises:
        ConfigError: there are no prompts, a prompt is empty or too long for the model, or rows_per_pass is below 1.
        SparseOptError: the engine failed, or returned completions that do not match the request.
    """
    if rows_per_pass is not None and rows_per_pass < 1:
        raise ConfigError(f"rows_per_pass is {rows_per_pass}, expected at least 1")
    device = next(model.parameters()).device
    sampled = sample(
        engine, prompts, n_generations=n_generations, sampling=sampling, pad_id=pad_id, device=device, ranks=ranks
    )
    sampled = replace(sampled, completions_per_row=completions_per_row)
    for rows, part in sampled.minibatches(rows_per_pass or len(sampled), ranks, rows_per_step):
        sampled.cut(sampled.logprobs, rows).copy_(part.token_logprobs(model, sampling.logprob_temperature))
    ranks.sum(sampled.logprobs)
    return sampled


def sample(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    n_generations: int,
    sampling: Sampling,
    pad_id: int,
    device: torch.device,
    ranks: Ranks = ONE_RANK,
) -> Rollout:
    """`rollout` without the policy's log-probabilities, which are 0.

    Args:
        prompts: token ids; none empty.
        n_generations: completions per prompt.
        pad_id: token id of the padding; may be that of EOS.
        device: device of the tensors.
        ranks: processes that share the completions, and all get all of them.

    Raises:
        ConfigError: there are no prompts, or a prompt is empty or too long for the model.
        SparseOptError: the engine failed, or returned completions that do not match the request.
    """
    if not prompts or not all(map(len, prompts)):
        raise ConfigError(f"{len(prompts)} prompts, of lengths {[len(ids) for ids in prompts]}: expected none empty")
    if n_generations < 1:
        raise ConfigError(f"n_generations is {n_generations}, expected at least 1")
    repeated = [prompt for prompt in prompts for _ in range(n_generations)]
    if ranks.size == 1:
        completions = engine.generate(prompts, n_generations, sampling)
    else:
        share = ranks.share(0, len(repeated))
        own = engine.generate([repeated[row] for row in share], 1, sampling)
        completions = concatenated(ranks.gather(own))
    _check(completions, len(repeated), sampling.max_new_tokens)
    sequences = [
        TokenSequence([*prompt, *completion], len(prompt))
        for prompt, completion in zip(repeated, completions.ids, strict=True)
    ]
    is_ended = [completion[-1] in engine.eos_ids for completion in completions.ids]
    ended = torch.tensor(is_ended, dtype=torch.bool, device=device)
    batch = collate(sequences, pad_id)
    engine_logprobs = None
    if completions.logprobs is not None:
        engine_logprobs = _of_tokens(completions.logprobs, sequences, batch).to(device)
    batch = batch.to(device)
    logprobs = torch.zeros(
        batch.completion_mask[:, batch.first_trained :].shape, dtype=torch.float32, device=ended.device
    )
    return Rollout(batch, logprobs, ended, sequences, engine_logprobs)


def concatenated(parts: Sequence[Completions]) -> Completions:
    """The rows of several calls of an engine, in order; without log-probabilities unless all rows have them."""
    logprobs: list[list[float]] | None = []
    for part in parts:
        if part.ids:
            logprobs = None if logprobs is None or part.logprobs is None else logprobs + part.logprobs
    return Completions([ids for part in parts for ids in part.ids], logprobs)


def _of_tokens(values: Sequence[Sequence[float]], sequences: Sequence[TokenSequence], batch: TokenBatch) -> Tensor:
    """Values of the sampled tokens as a [R, P] fp32 tensor, 0 elsewhere."""
    first, width = batch.first_trained, batch.input_ids.shape[1]
    table = torch.zeros(len(sequences), width - first, dtype=torch.float32, device="cpu")
    for row, (sequence, own) in enumerate(zip(sequences, values, strict=True)):
        start = sequence.prompt_length - first
        table[row, start : start + len(own)] = torch.tensor(own, dtype=torch.float32, device="cpu")
    return table


def _check(completions: Completions, n: int, longest: int) -> None:
    ids, logprobs = completions.ids, completions.logprobs
    if len(ids) != n:
        raise SparseOptError(f"the rollout engine returned {len(ids)} completions, expected {n}")
    for row, completion in enumerate(ids):
        if not 1 <= len(completion) <= longest:
            raise SparseOptError(
                f"the rollout engine's completion {row} has {len(completion)} tokens, expected 1 to {longest}"
            )
    if logprobs is None:
        return
    if [len(row) for row in logprobs] != [len(row) for row in ids]:
        raise SparseOptError("the rollout engine's log-probabilities do not have the lengths of its completions")
    for row, of_row in enumerate(logprobs):
        for token, value in enumerate(of_row):
            if not math.isfinite(value):
                raise SparseOptError(
                    f"the rollout engine's log-probability of token {token} of completion {row} is {value}, expected "
                    "a finite number"
                )


def stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's EOS first, then those of the model's generation settings.

    Chat models end a turn with another token than a document, and list both in generation_config.json.

    Raises:
        ConfigError: there is none.
        DataError: the generation settings contain an invalid token id.
    """
    found = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    tokens = [] if own is None else own if isinstance(own, list | tuple) else [own]
    for token in tokens:
        if type(token) is not int or token < 0:
            raise DataError(
                f"eos_token_id of the generation settings of {type(model).__name__} is {own!r}: expected token ids"
            )
    found += tokens
    if not found:
        raise ConfigError(
            f"neither the tokenizer nor the generation settings of {type(model).__name__} name an EOS token, "
            "which a rollout needs"
        )
    return tuple(dict.fromkeys(found))


def cut_at_eos(ids: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """The ids up to and including the first EOS."""
    for end, token in enumerate(ids):
        if token in eos_ids:
            return list(ids[: end + 1])
    return list(ids)


def require_positions(model: Any, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Raise ConfigError if the longest prompt with its completion exceeds the model's positions."""
    limit = max_positions(model.config)
    longest = max(map(len, prompts))
    if limit is not None and longest + sampling.max_new_tokens > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and max_new_tokens {sampling.max_new_tokens} make "
            f"{longest + sampling.max_new_tokens}, more than the model's max_position_embeddings, {limit}"
        )
