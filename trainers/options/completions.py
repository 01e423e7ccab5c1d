"""Options of loops that sample completions, and of those that train on them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from sparse_opt.config import option, require_count
from sparse_opt.errors import ConfigError

from .model import ModelOptions
from .training import ReferenceOptions


@dataclass(kw_only=True)
class CompletionOptions(ModelOptions):
    """How completions are sampled and rewarded."""

    n_generations: int = option(8, "completions per prompt", at_least=1, aliases=("num_generations", "oversample"))
    max_prompt_length: int = option(
        512, "longest prompt in tokens; longer ones are left out", at_least=1, aliases=("max_prompt_tokens",)
    )
    max_completion_length: int = option(256, "longest completion in tokens", at_least=1, aliases=("max_new_tokens",))
    temperature: float = option(1.0, "sampling temperature; 0 takes the most likely token", at_least=0)
    top_p: float = option(1.0, "sample from the most likely tokens of this total probability", above=0, at_most=1)
    top_k: int = option(0, "sample from this many of the most likely tokens; 0 from all", at_least=0)
    rollout_engine: Literal["generate", "continuous_batching", "vllm"] = option(
        "generate", "engine that samples", aliases=("engine",)
    )
    vllm_gpu_memory_utilization: float = option(0.3, "share of the GPU's memory that vLLM may use", above=0, at_most=1)
    vllm_enforce_eager: bool = option(
        False, "run vLLM without torch.compile and CUDA graphs: a faster start and slower sampling"
    )
    vllm_enable_prefix_caching: bool | None = option(
        None, "whether vLLM reuses keys and values of common beginnings of prompts; none is vLLM's default"
    )
    vllm_server_base_url: str | None = option(
        None,
        "URL of a vLLM server on this host to sample with, instead of vLLM in the same process, also with several "
        "processes; it needs VLLM_SERVER_DEV_MODE=1, --logprobs-mode processed_logprobs, and --worker-extension-cls "
        "or, for mode sparse, --weight-transfer-config, see docs/trainers.md",
        aliases=("rollout_server",),
    )
    reward_functions: list[str] = option([], "rewards by name or as module:function, several with commas")
    reward_weights: list[float] | None = option(None, "a weight for each reward function; none weighs all 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vllm_server_base_url is not None and self.rollout_engine != "vllm":
            raise ConfigError(
                f"option 'vllm_server_base_url' is {self.vllm_server_base_url}: rollout_engine is "
                f"{self.rollout_engine}, expected vllm"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_functions):
            raise ConfigError(
                f"option 'reward_weights' has {len(self.reward_weights)} values, reward_functions "
                f"{len(self.reward_functions)}"
            )


@dataclass(kw_only=True)
class RolloutOptions(CompletionOptions, ReferenceOptions):
    """Options of loops that train on sampled completions. Their batches count completions, not prompts, like TRL's."""

    batch_size: int = option(8, "completions per forward pass of training")
    share_prompts: bool = option(False, "engine generate: compute a prompt once for all of its completions")
    n_minibatches: int = option(1, "optimizer steps in one pass over a rollout", at_least=1)
    num_iterations: int = option(1, "passes over each rollout", at_least=1, aliases=("ppo_epochs",))
    min_completion_length: int = option(
        0,
        "shortest completion in tokens: EOS is not sampled before; log-probabilities are those of all tokens",
        at_least=0,
        aliases=("min_new_tokens",),
    )
    temperature: float = option(1.0, "sampling temperature, also of the log-probabilities", above=0)
    max_logprob_difference: float | None = option(
        None,
        "stop if the log-probabilities of engine vllm and the policy differ by more than this, as the mean absolute "
        "difference of a rollout's tokens; none for no limit",
        above=0,
    )
    vllm_importance_sampling_correction: bool = option(
        False, "multiply a token's policy loss by an importance weight, policy over engine vllm"
    )
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        option(
            "token_truncate",
            "weight each token or the whole completion; truncate weights outside the bounds to them, or mask them to 0",
        )
    )
    vllm_importance_sampling_clip_max: float | None = option(
        3.0, "upper bound of importance weights; none for no bound", above=0
    )
    vllm_importance_sampling_clip_min: float | None = option(
        None, "lower bound of importance weights; none for no bound", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_completion_length > self.max_completion_length:
            raise ConfigError(
                f"option 'min_completion_length' is {self.min_completion_length}: expected at most "
                f"max_completion_length {self.max_completion_length}"
            )
        if self.share_prompts and (self.rollout_engine != "generate" or not self.gather_for_generation):
            raise ConfigError(
                f"option 'share_prompts' is true with rollout_engine {self.rollout_engine} and gather_for_generation "
                f"{str(self.gather_for_generation).lower()}: expected generate and true"
            )
        if self.min_completion_length and self.rollout_engine == "continuous_batching":
            raise ConfigError(
                f"option 'min_completion_length' is {self.min_completion_length}: rollout_engine continuous_batching "
                "cannot suppress EOS; use generate or vllm"
            )
        for name in ("vllm_importance_sampling_correction", "max_logprob_difference"):
            if getattr(self, name) and self.rollout_engine != "vllm":
                raise ConfigError(
                    f"option '{name}' is {getattr(self, name)}: rollout_engine {self.rollout_engine} reports no "
                    "log-probabilities; use vllm"
                )
            if getattr(self, name) and (self.top_p < 1 or self.top_k > 0):
                raise ConfigError(
                    f"option '{name}' is {getattr(self, name)} with top_p {self.top_p} and top_k {self.top_k}: "
                    "expected 1 and 0, because the engine's probabilities are otherwise renormalised over fewer tokens"
                )
        for field in fields(self):
            of_correction = field.name.startswith(("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_"))
            if of_correction and not self.vllm_importance_sampling_correction:
                if (value := getattr(self, field.name)) != field.default:
                    raise ConfigError(
                        f"option '{field.name}' is {value}: it needs vllm_importance_sampling_correction true"
                    )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                f"option 'vllm_importance_sampling_clip_min' is {low}: expected less than "
                f"vllm_importance_sampling_clip_max {high}"
            )
        if self.vllm_importance_sampling_correction and low is None and high is None:
            if self.vllm_importance_sampling_mode.endswith("_truncate"):
                raise ConfigError(
                    f"option 'vllm_importance_sampling_mode' is {self.vllm_importance_sampling_mode}: expected "
                    "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min"
                )
        if self.dataloader_num_workers:
            raise ConfigError(
                f"option 'dataloader_num_workers' is {self.dataloader_num_workers}: batches of sampled completions "
                "cannot be made ahead of time; expected 0"
            )
        require_count("batch_size x gradient_accumulation_steps x n_minibatches", self.completions_per_step)
        if self.completions_per_step % self.n_generations:
            raise ConfigError(
                f"batch_size {self.batch_size} x gradient_accumulation_steps {self.gradient_accumulation_steps} x "
                f"n_minibatches {self.n_minibatches} = {self.completions_per_step} completions a step: expected a "
                f"multiple of n_generations {self.n_generations}"
            )

    @property
    def completions_per_step(self) -> int:
        """Number of completions per rollout."""
        return self.batch_size * self.gradient_accumulation_steps * self.n_minibatches

    @property
    def examples_per_step(self) -> int:
        """Number of prompts per rollout."""
        return self.completions_per_step // self.n_generations
