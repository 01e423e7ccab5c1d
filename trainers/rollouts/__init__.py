"""Rollouts: completions sampled from the policy during training, by one of three engines with one interface.

| engine | |
|---|---|
| `generate` | transformers' `model.generate`: runs everywhere; every prompt is padded to the longest |
| `continuous_batching` | transformers' `model.generate_batch`: the next row replaces a finished one |
| `vllm` | vLLM in the same process (extra `vllm`), updated with the policy's weights before each rollout |

With every engine, `rollout` recomputes the log-probabilities with the policy, as in training.
"""

from __future__ import annotations

from typing import Any

from sparse_opt.errors import ConfigError

from ..options import RolloutOptions
from ..policy.sharding import is_sharded
from .continuous_batching import ContinuousBatchingEngine
from .generate import GenerateEngine
from .sampling import Engine, InParts, Rollout, Sampling, rollout, sample, stop_ids
from .sharded import GatheredEngine, LayerwiseEngine
from .vllm import VLLMEngine

__all__ = [
    "ContinuousBatchingEngine",
    "Engine",
    "GenerateEngine",
    "InParts",
    "Rollout",
    "Sampling",
    "VLLMEngine",
    "configured_engine",
    "make_engine",
    "rollout",
    "sample",
    "stop_ids",
]


def make_engine(
    name: str,
    model: Any,
    tokenizer: Any,
    *,
    max_rows: int | None = None,
    max_length: int | None = None,
    vllm_gpu_memory_utilization: float = 0.3,
    at_once: int | None = None,
    gather: bool = True,
) -> Engine:
    """Make the engine of this name for a policy and its tokenizer.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one.
        tokenizer: provides EOS, and the padding that engine generate puts before prompts.
        max_rows: completions sampled at once, which limits the memory of keys and values; None samples all of a call.
        max_length: for engine vllm: tokens of the longest prompt with its completion; None for the model's limit.
        vllm_gpu_memory_utilization: for engine vllm: the share of the GPU's memory that it may use.
        at_once: completions sampled per call of the engine; None samples all of a call.
        gather: of a sharded model, gather all weights while the engine samples; else those of a layer at a time.

    Raises:
        ConfigError: the name is unknown, neither model nor tokenizer has an EOS token, or the engine cannot run here.
    """
    eos_ids = stop_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    if is_sharded(model) and not gather:
        if name != "generate":
            raise ConfigError(
                f"option 'gather_for_generation' is false with rollout_engine {name}: it makes another number of "
                "forward passes on each rank, and gathers of layers need the same; expected rollout_engine generate"
            )
        if at_once is not None:
            raise ConfigError(
                "option 'gather_for_generation' is false with generation_aggregation_steps, which divides the "
                "completions of each rank into other numbers of parts: expected one of the two"
            )
        return LayerwiseEngine(GenerateEngine(model, pad_id=pad_id, eos_ids=eos_ids, max_rows=max_rows, synced=True))
    if name in ("generate", "continuous_batching"):
        kind = GenerateEngine if name == "generate" else ContinuousBatchingEngine
        engine: Engine = kind(model, pad_id=pad_id, eos_ids=eos_ids, max_rows=max_rows)
        if at_once is not None:
            engine = InParts(engine, at_once)
        return GatheredEngine(engine, model) if is_sharded(model) else engine
    if name == "vllm":
        vllm = VLLMEngine(
            model,
            eos_ids=eos_ids,
            gpu_memory_utilization=vllm_gpu_memory_utilization,
            max_length=max_length,
            max_rows=max_rows,
        )
        return vllm if at_once is None else InParts(vllm, at_once)
    raise ConfigError(f"rollout_engine is {name!r}, expected generate, continuous_batching or vllm")


def configured_engine(config: RolloutOptions, model: Any, tokenizer: Any, *, at_once: int | None = None) -> Engine:
    """The engine of a loop's options, with capacity for its longest prompt and completion; see `make_engine`."""
    return make_engine(
        config.rollout_engine,
        model,
        tokenizer,
        max_length=config.max_prompt_length + config.max_completion_length,
        vllm_gpu_memory_utilization=config.vllm_gpu_memory_utilization,
        at_once=at_once,
        gather=config.gather_for_generation,
    )
