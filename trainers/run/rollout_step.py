"""Parts of a step that the loops with rollouts share: sampling, scoring, the reference, metrics, sample rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from sparse_opt.errors import DataError, SparseOptError

from ..data.encoding import TokenSequence
from ..data.prompts import PromptExample
from ..options import RolloutOptions
from ..policy.reference import Reference, rollout_logprobs
from ..rewards.functions import Rewards, Scores
from ..rollouts import Engine, Rollout, Sampling, rollout
from ..rollouts.importance import importance_weights, logprob_differences, require_agreement
from .training_run import TrainingRun


class Prompt(Protocol):
    """An example of a dataset of prompts."""

    @property
    def ids(self) -> list[int]:
        """The token ids from which the model continues."""


def sampling_of(config: RolloutOptions, temperature: float | None = None) -> Sampling:
    """The sampling parameters of a loop's options; `temperature` replaces the option's."""
    temperature = config.temperature if temperature is None else temperature
    length = config.max_completion_length
    return Sampling(length, temperature, config.top_p, config.top_k, config.min_completion_length)


def sample_rollout(
    run: TrainingRun,
    engine: Engine,
    prompts: Sequence[Prompt],
    n_generations: int,
    completions_per_row: int = 1,
) -> Rollout:
    """Sample `n_generations` completions of each prompt with their log-probabilities; timed as `rollout`."""
    config = run.config
    assert isinstance(config, RolloutOptions)
    with run.time("rollout"):
        return rollout(
            engine,
            run.model,
            [prompt.ids for prompt in prompts],
            n_generations=n_generations,
            sampling=sampling_of(config),
            pad_id=run.pad_id,
            rows_per_pass=config.batch_size,
            rows_per_step=config.batch_size * config.gradient_accumulation_steps,
            completions_per_row=completions_per_row,
            ranks=run.ranks,
        )


def engine_agreement(config: RolloutOptions, sampled: Rollout) -> dict[str, Tensor]:
    """`logprob_differences` of engine and policy, checked against `max_logprob_difference`.

    Returns:
        The statistics; none if the engine reports no log-probabilities.

    Raises:
        SparseOptError: the mean absolute difference exceeds `max_logprob_difference`.
    """
    if sampled.engine_logprobs is None:
        return {}
    statistics = logprob_differences(sampled.logprobs, sampled.engine_logprobs, sampled.mask)
    require_agreement(statistics, config.max_logprob_difference)
    return statistics


def rollout_weights(config: RolloutOptions, sampled: Rollout) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The importance weights [R, P] of a rollout with `vllm_importance_sampling_correction`, else None.

    Returns:
        The weights; and as importance_sampling_clipped the share of the sampled tokens whose weight was truncated or
        set to 0.

    Raises:
        SparseOptError: the engine reports no log-probabilities.
    """
    if not config.vllm_importance_sampling_correction:
        return None, {}
    if sampled.engine_logprobs is None:
        raise SparseOptError(
            "vllm_importance_sampling_correction needs an engine that returns log-probabilities (vllm)"
        )
    weights, clipped = importance_weights(
        sampled.logprobs,
        sampled.engine_logprobs,
        sampled.mask,
        mode=config.vllm_importance_sampling_mode,
        clip_max=config.vllm_importance_sampling_clip_max,
        clip_min=config.vllm_importance_sampling_clip_min,
    )
    return weights, {"importance_sampling_clipped": clipped.sum() / sampled.mask.sum()}


def score_completions(
    run: TrainingRun, rewards: Rewards, sequences: Sequence[TokenSequence], examples: Sequence[PromptExample]
) -> tuple[list[str], Scores]:
    """The texts of the completions, without EOS, and their rewards; the ranks share the calls of the functions.

    Args:
        sequences: R prompts with completions.
        examples: R, the example of each completion.

    Raises:
        DataError: a reward function does not fit the data, or no reward function applies to any completion.
    """
    completion_ids = [sequence.ids[sequence.prompt_length :] for sequence in sequences]
    texts = run.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    share = run.ranks.share(0, len(texts))
    rows = slice(share.start, share.stop)
    own = [rewards.score_examples(examples[rows], texts[rows], completion_ids[rows])] if share else []
    scores = Scores.concatenated(run.ranks.concatenated(own))
    if bool(scores.total.isnan().all()):
        raise DataError(
            f"no reward function ({', '.join(rewards.functions)}) applies to any of {len(texts)} completions, the "
            f"first of the prompt {examples[0].text!r}"
        )
    return texts, scores


def reference_logprobs(run: TrainingRun, reference: Reference | None, sampled: Rollout) -> Tensor | None:
    """`rollout_logprobs` under the reference, timed as `reference`; None without a reference."""
    config = run.config
    assert isinstance(config, RolloutOptions)
    if reference is None:
        return None
    with run.time("reference"):
        return rollout_logprobs(reference, sampled, config.temperature, config.batch_size, run.ranks)


def completion_metrics(sequences: Sequence[TokenSequence], ended: Tensor) -> dict[str, float | Tensor]:
    """Lengths in tokens, including EOS, and the share of completions truncated at the maximum length."""
    lengths = [len(sequence.ids) - sequence.prompt_length for sequence in sequences]
    return {
        "completion_length": sum(lengths) / len(lengths),
        "completion_length_min": float(min(lengths)),
        "completion_length_max": float(max(lengths)),
        "truncated": 1 - ended.float().mean(),
    }


def sample_rows(
    prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Tensor | Sequence[Any]]
) -> list[dict[str, Any]]:
    """Rows for samples.jsonl: each prompt with its completion and the values of the columns; None for NaN."""
    values = {name: column.tolist() if isinstance(column, Tensor) else column for name, column in columns.items()}
    return [
        {
            "prompt": prompt,
            "completion": completion,
            # NaN is the only value that differs from itself.
            **{name: None if column[row] != column[row] else column[row] for name, column in values.items()},
        }
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
