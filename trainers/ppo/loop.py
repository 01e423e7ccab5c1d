"""Proximal Policy Optimization (https://arxiv.org/abs/1707.06347) of a language model, as in TRL 0.8.6.

The critic is a value head on the policy's hidden states; `losses` has the arithmetic.

Not implemented, unlike in TRL 0.8.6: the other divergences (abs, mse, full), and skipping minibatches by their mean
ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_opt.config import option
from sparse_opt.errors import ConfigError, DataError

from ..data.loaders import LoadData, data_loader
from ..data.order import chunks
from ..data.prompts import PromptExample
from ..data.query_prompts import is_text_data, load_queries
from ..data.rows import load_records
from ..options import RolloutOptions
from ..policy.models import resolve_device
from ..policy.value_head import ValueHead, ValueHeadTrainer, logprobs_and_values
from ..rewards.classifier import RewardModel
from ..rewards.functions import Rewards, load_rewards
from ..rollouts import Engine, Rollout, configured_engine, sample
from ..run.rollout_step import (
    engine_agreement,
    reference_logprobs,
    rollout_weights,
    sample_rows,
    sampling_of,
    score_completions,
)
from ..run.training_run import TrainingRun
from .losses import (
    KLController,
    ScoreScaling,
    explained_variance,
    generalized_advantages,
    policy_loss,
    sequence_kl,
    token_rewards,
    value_loss,
    whiten,
)


@dataclass(kw_only=True)
class PPOConfig(RolloutOptions):
    """Train a causal language model on rewarded completions by PPO; defaults as in TRL 0.8.6's sentiment example."""

    learning_rate: float = option(1.41e-5, "peak learning rate")
    batch_size: int = option(32, "completions per forward pass of training")
    gradient_accumulation_steps: int = option(4, "forward passes per optimizer step")
    num_iterations: int = option(4, "passes over each rollout")
    n_generations: int = option(1, "completions per prompt")
    max_completion_length: int = option(32, "longest completion in tokens")

    gamma: float = option(1.0, "discount of later rewards, per token", at_least=0, at_most=1)
    gae_lambda: float = option(
        0.95, "lambda of generalised advantage estimation", at_least=0, at_most=1, aliases=("lam",)
    )
    clip_range: float = option(0.2, "how far a token's ratio may go from 1", above=0, aliases=("cliprange",))
    value_clip_range: float = option(
        0.2, "how far a value may go from that of the rollout", above=0, aliases=("cliprange_value",)
    )
    value_coefficient: float = option(0.1, "weight of the value loss", at_least=0, aliases=("vf_coef",))
    value_head_learning_rate: float | None = option(
        None, "peak learning rate of the value head, which follows the same schedule; none is learning_rate", at_least=0
    )
    kl_coefficient: float = option(
        0.2,
        "weight of a token's divergence from the reference in its reward, at the first step",
        at_least=0,
        aliases=("init_kl_coef",),
    )
    kl_target: float | None = option(
        6.0, "target divergence of a completion, for adapting the coefficient; none keeps the coefficient", above=0
    )
    kl_horizon: float = option(
        10000.0, "completions over which the coefficient is adapted", above=0, aliases=("horizon",)
    )
    use_score_scaling: bool = option(False, "divide scores by the standard deviation of all scores so far")
    use_score_norm: bool = option(False, "with use_score_scaling: first subtract the mean of all scores so far")
    batch_score_norm: bool = option(
        False, "subtract the mean of a rollout's scores and divide by their standard deviation; not use_score_scaling"
    )
    score_clip: float | None = option(
        None, "clip scores, after scaling, to this absolute value; none for no bound", above=0
    )
    whiten_rewards: bool = option(
        False, "divide the rewards of a rollout's tokens by their standard deviation, and keep their mean"
    )
    early_stop_kl: float | None = option(
        None,
        "end the passes over a rollout once the policy's divergence from it exceeds 1.5 times this per token",
        above=0,
    )

    reward_model: str | None = option(
        None,
        "sequence classifier whose logit is the reward, hub name or local folder; in place of reward_functions",
        aliases=("reward_model_name",),
    )
    reward_label: str = option("POSITIVE", "label of the reward model, by name or number")
    reward_label_against: str | None = option(
        None, "label of the reward model whose logit is subtracted from that of reward_label"
    )
    reward_of_completion: bool = option(
        False, "the reward model reads the completion alone; false: the prompt and the completion"
    )
    reward_model_dtype: Literal["bf16", "fp32"] = option("fp32", "dtype of the reward model")

    query_min_tokens: int = option(
        2, "for a dataset of texts: a prompt is at least this many of a text's first tokens", at_least=1
    )
    query_max_tokens: int = option(8, "for a dataset of texts: a prompt is at most this many of a text's first tokens")
    query_min_characters: int = option(200, "for a dataset of texts: use longer texts only", at_least=0)
    query_words: int | None = option(
        None, "for a dataset of texts: a prompt is this many of a text's first words, in place of tokens", at_least=1
    )
    query_prefix: str = option("", "with query_words: text in front of every prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_max_tokens < self.query_min_tokens:
            raise ConfigError(
                f"option 'query_max_tokens' is {self.query_max_tokens}: expected at least query_min_tokens "
                f"{self.query_min_tokens}"
            )
        if (self.reward_model is None) == (not self.reward_functions):
            raise ConfigError("expected a reward: --reward_model or --reward_functions, and not both")
        if self.query_prefix and self.query_words is None:
            raise ConfigError(f"option 'query_prefix' is {self.query_prefix!r}: expected query_words as well")
        if self.batch_score_norm and self.use_score_scaling:
            raise ConfigError("options 'batch_score_norm' and 'use_score_scaling' are true: expected one of them")
        if self.use_score_norm and not self.use_score_scaling:
            raise ConfigError("option 'use_score_norm' is true: expected use_score_scaling true as well")


@dataclass(frozen=True)
class Episodes:
    """A rollout with its values, advantages and returns, fixed while the policy trains on it: [R, P] fp32."""

    rollout: Rollout
    values: Tensor
    advantages: Tensor  # whitened
    returns: Tensor
    weights: Tensor | None = None  # see `rollout_weights`

    @property
    def explained_variance(self) -> Tensor:
        """`explained_variance` of the critic's values at rollout time."""
        return explained_variance(self.values, self.returns, self.rollout.mask)


class Scorer:
    """Loads the reward model or the reward functions, and scores completions with them."""

    def __init__(self, config: PPOConfig):
        self.of_completion = config.reward_of_completion
        self.model: RewardModel | None = None
        self.functions: Rewards | None = None
        if config.reward_model is None:
            self.functions = load_rewards(config.reward_functions, config.reward_weights)
            return
        self.model = RewardModel(
            config.reward_model,
            config.reward_label,
            against=config.reward_label_against,
            device=resolve_device(config.device),
            dtype=config.reward_model_dtype,
            rows_per_pass=config.batch_size,
        )

    def __call__(
        self, run: TrainingRun, rollout: Rollout, examples: Sequence[PromptExample]
    ) -> tuple[Tensor, dict[str, float]]:
        """The scores [R] fp32 on the run's device, and the mean of each reward function for the log.

        Args:
            examples: R, the example of each completion.
        """
        decode = run.tokenizer.batch_decode
        if self.model is not None:
            # Prompt and completion are decoded together: decoded alone, a completion can lose its leading space, and a
            # character whose bytes span both cannot be decoded.
            read = rollout.completions if self.of_completion else [sequence.ids for sequence in rollout.sequences]
            texts = decode(read, skip_special_tokens=True)
            rows = run.ranks.share(0, len(texts))
            whole = torch.zeros(len(texts), dtype=torch.float32, device=run.device)
            if rows:
                whole[rows.start : rows.stop] = self.model(texts[rows.start : rows.stop])
            return run.ranks.sum(whole), {}
        assert self.functions is not None
        _, scores = score_completions(run, self.functions, rollout.sequences, examples)
        unscored = scores.total.isnan().nonzero().flatten().tolist()
        if unscored:
            raise DataError(
                f"no reward function applies to {len(unscored)} of {len(scores.total)} completions, the first of the "
                f"prompt {examples[unscored[0]].text!r}; PPO needs a score for each"
            )
        return scores.total.to(run.device), {f"rewards/{name}": mean for name, mean in scores.means().items()}


def rollout_with_values(
    run: TrainingRun, engine: Engine, head: ValueHead, examples: Sequence[PromptExample], config: PPOConfig
) -> tuple[Rollout, Tensor]:
    """Sample `n_generations` completions of each example with their log-probabilities; and their values [R, P]."""
    rollout = sample(
        engine,
        [example.ids for example in examples],
        n_generations=config.n_generations,
        sampling=sampling_of(config),
        pad_id=run.pad_id,
        device=run.device,
        ranks=run.ranks,
    )
    values = torch.zeros_like(rollout.logprobs)
    for rows, part in rollout.minibatches(config.batch_size, run.ranks):
        found = logprobs_and_values(run.model, head, part.batch, config.temperature)
        for whole, piece in zip((rollout.logprobs, values), found, strict=True):
            rollout.cut(whole, rows).copy_(piece)
    run.ranks.sum(rollout.logprobs)
    return rollout, run.ranks.sum(values)


def update_on(run: TrainingRun, critic: ValueHeadTrainer, episodes: Episodes, config: PPOConfig) -> dict[str, Tensor]:
    """Make `num_iterations` passes over a rollout, each in a new order and of `n_minibatches` optimizer steps.

    Returns:
        Statistics averaged over the optimizer steps.
    """
    rollout = episodes.rollout
    statistics: list[Tensor] = []
    for _ in range(config.num_iterations):
        # Rank 0's, because the ranks have different random states.
        order = run.ranks.on_main(lambda: torch.randperm(len(rollout), device="cpu").tolist())
        for minibatch in chunks(order, len(rollout) // config.n_minibatches):
            statistics.append(_optimizer_step(run, critic, episodes, minibatch, config))
        moved = torch.stack(statistics[-config.n_minibatches :])[:, _STATISTICS.index("policy_kl")].mean()
        if config.early_stop_kl is not None and moved > 1.5 * config.early_stop_kl:
            break
    return dict(zip(_STATISTICS, torch.stack(statistics).mean(dim=0), strict=True)) | {
        "n_passes": torch.tensor(len(statistics) / config.n_minibatches, dtype=torch.float32, device="cpu")
    }


# Statistics of an optimizer step: losses; the divergence from the policy of the rollout by two estimates,
# mean((new - old)^2) / 2 and mean(old - new); and the shares of tokens whose gradient is clipped to 0.
_STATISTICS = ("loss", "policy_loss", "value_loss", "approx_kl", "policy_kl", "policy_clip_share", "value_clip_share")


def _optimizer_step(
    run: TrainingRun, critic: ValueHeadTrainer, episodes: Episodes, minibatch: Sequence[int], config: PPOConfig
) -> Tensor:
    """One optimizer step on these rows of the rollout, `batch_size` per forward pass: [len(_STATISTICS)]."""
    rollout = episodes.rollout
    n_tokens = sum(rollout.sequences[row].n_trained for row in minibatch)
    statistics = torch.zeros(len(_STATISTICS), dtype=torch.float32, device=run.device)
    with run.time("forward_backward"):
        for places, is_last in run.training_passes(len(minibatch)):
            rows = minibatch[places]
            part = rollout.select(rows)
            old_values, advantages, returns = (
                rollout.cut(tensor, rows) for tensor in (episodes.values, episodes.advantages, episodes.returns)
            )
            logprobs, values = logprobs_and_values(run.model, critic.head, part.batch, config.temperature)
            for_policy, policy_clipped = policy_loss(
                logprobs,
                part.logprobs,
                advantages,
                part.mask,
                clip=config.clip_range,
                n_tokens=n_tokens,
                importance_weights=None if episodes.weights is None else rollout.cut(episodes.weights, rows),
            )
            for_values, value_clipped = value_loss(
                values, old_values, returns, part.mask, clip=config.value_clip_range, n_tokens=n_tokens
            )
            loss = for_policy + config.value_coefficient * for_values
            run.backward(loss, is_last)
            moved = (logprobs - part.logprobs).detach()  # both are 0 outside the mask
            sums = torch.stack([moved.square().sum() / 2, -moved.sum(), policy_clipped.sum(), value_clipped.sum()])
            losses = torch.stack([loss, for_policy, for_values]).detach()
            statistics += torch.cat([losses, sums / n_tokens])
    with run.time("optimizer"):
        run.ranks.average_gradients(critic.head.parameters())
    run.update(critic.optimizer)
    return run.ranks.sum(statistics)


@torch.no_grad()
def evaluate(
    run: TrainingRun, engine: Engine, head: ValueHead, scorer: Scorer, config: PPOConfig
) -> dict[str, Tensor | float]:
    """Sample one completion of each evaluation prompt as in training: mean score, length, and share that ended."""
    data = run.eval_data or []
    scores, lengths, ended = [], 0, []
    for examples in chunks(data, config.completions_per_step):
        rollout, _ = rollout_with_values(run, engine, head, examples, replace(config, n_generations=1))
        scores.append(scorer(run, rollout, examples)[0])
        lengths += rollout.batch.n_trained
        ended.append(rollout.ended)
    return {
        "reward": torch.cat(scores).mean(),
        "completion_length": lengths / len(data),
        "ended": torch.cat(ended).float().mean(),
    }


def load_prompt_data(config: PPOConfig) -> LoadData:
    """A loader for datasets of texts, whose beginnings become the prompts, and for datasets with prompts."""

    def load(dataset: str, split: str, tokenizer: Any, subset_size: int | None, seed: int) -> tuple[list[Any], Any]:
        if not is_text_data(load_records(dataset, split).column_names):
            return data_loader("prompt", config)(dataset, split, tokenizer, subset_size, seed)
        return load_queries(
            dataset,
            split,
            tokenizer,
            subset_size,
            seed,
            min_tokens=config.query_min_tokens,
            max_tokens=config.query_max_tokens,
            min_characters=config.query_min_characters,
            n_words=config.query_words,
            prefix=config.query_prefix,
        )

    return load


def train(config: PPOConfig) -> dict[str, Any]:
    """Run PPO and return its summary; outputs and errors as in `dpo.train`.

    The value head is saved next to the final model, as `value_head.safetensors`.
    """
    scorer = Scorer(config)  # before the run writes files, so that a failed load leaves none
    run = TrainingRun(config, "ppo", load_prompt_data(config))
    reference = run.reference()
    critic = ValueHeadTrainer(
        ValueHead.of(run.model, config.seed),
        config,
        config.learning_rate if config.value_head_learning_rate is None else config.value_head_learning_rate,
    )
    controller = KLController(config.kl_coefficient, config.kl_target, config.kl_horizon)
    run.keep("value_head", critic)
    scaling = ScoreScaling(
        config.use_score_scaling, config.use_score_norm, config.score_clip, batch_norm=config.batch_score_norm
    )
    run.keep("kl_controller", controller)
    if config.use_score_scaling:
        run.keep("score_scaling", scaling)
    engine = configured_engine(config, run.model, run.tokenizer)
    with closing(engine), run:
        for step in run.steps(lambda: evaluate(run, engine, critic.head, scorer, config)):
            examples = [example for example in run.examples_of(step) for _ in range(config.n_generations)]
            with run.time("rollout"), torch.no_grad():
                rollout, values = rollout_with_values(run, engine, critic.head, run.examples_of(step), config)
            agreement = engine_agreement(config, rollout)
            with run.time("reward"):
                scores, by_function = scorer(run, rollout, examples)
            ref_logprobs = reference_logprobs(run, reference, rollout)
            assert ref_logprobs is not None

            logprobs, mask = rollout.logprobs, rollout.mask
            rewards = token_rewards(scaling(scores), logprobs, ref_logprobs, mask, controller.coefficient)
            if config.whiten_rewards:
                rewards = whiten(rewards, mask, shift_mean=False)
            advantages, returns = generalized_advantages(
                rewards, values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda
            )
            weights, corrected = rollout_weights(config, rollout)
            episodes = Episodes(rollout, values, whiten(advantages, mask), returns, weights)
            metrics = update_on(run, critic, episodes, config)

            kl = sequence_kl(logprobs, ref_logprobs, mask).mean()
            coefficient = controller.coefficient
            controller.update(kl.item(), len(rollout))
            critic.scheduler.step()
            if run.samples_due(step):
                decode = run.tokenizer.batch_decode
                prompts = decode([sequence.ids[: sequence.prompt_length] for sequence in rollout.sequences])
                run.log_samples(step, sample_rows(prompts, decode(rollout.completions), {"reward": scores}))
            run.log(
                step,
                n_tokens=rollout.batch.n_tokens,
                **metrics,
                **agreement,
                **corrected,
                **by_function,
                kl=kl,
                kl_coefficient=coefficient,
                entropy=-logprobs.sum() / rollout.batch.n_trained,
                explained_variance=episodes.explained_variance,
                reward=scores.mean(),
                reward_std=scores.std(correction=0),
                reward_after_kl=rewards.sum(dim=1).mean(),
                completion_length=rollout.batch.n_trained / len(rollout),
                ended=rollout.ended.float().mean(),
            )
        return run.finish(write_extra=critic.save)
