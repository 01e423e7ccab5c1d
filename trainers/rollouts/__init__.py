"""Rollouts: completions sampled from the policy during training, by one of three engines with one interface.

| engine | |
|---|---|
| `generate` | transformers' `model.generate`: runs everywhere; every prompt is padded to the longest |
| `continuous_batching` | transformers' `model.generate_batch`: the next row replaces a finished one |
| `vllm` | vLLM in the same process (extra `vllm`) or on a server, given the policy's weights before each rollout |

With every engine, `rollout` recomputes the log-probabilities with the policy, as in training. vLLM also reports those
that it sampled with; `importance` compares the two and corrects for the difference.
"""

from __future__ import annotations

from typing import Any

from sparse_opt.errors import ConfigError
from sparse_opt.masks import MaskSet

from ..options import CompletionOptions, RolloutOptions
from ..policy.optimizers import load_mask
from ..policy.sharding import is_sharded
from ..ranks import ONE_RANK, Ranks
from .continuous_batching import ContinuousBatchingEngine
from .engine import ChunkedEngine, Completions, Engine, Rollout, Sampling, concatenated, rollout, sample, stop_ids
from .generate import GenerateEngine
from .sharded import GatheredEngine, LayerwiseEngine
from .shared_cache import SharedCacheEngine
from .vllm import VLLMEngine
from .vllm_server import VLLMServerEngine

__all__ = [
    "ChunkedEngine",
    "Completions",
    "ContinuousBatchingEngine",
    "Engine",
    "GenerateEngine",
    "Rollout",
    "Sampling",
    "SharedCacheEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "concatenated",
    "configured_engine",
    "make_engine",
    "rollout",
    "sample",
    "stop_ids",
    "vllm_settings",
]


def make_engine(
    name: str,
    model: Any,
    tokenizer: Any,
    *,
    max_rows: int | None = None,
    by_length: bool = False,
    share_prompts: bool = False,
    drop_ended: bool = False,
    max_length: int | None = None,
    vllm_gpu_memory_utilization: float = 0.3,
    vllm_enforce_eager: bool = False,
    vllm_enable_prefix_caching: bool | None = None,
    vllm_server_base_url: str | None = None,
    mask: MaskSet | None = None,
    at_once: int | None = None,
    gather: bool = True,
    ranks: Ranks = ONE_RANK,
) -> Engine:
    """Make the engine of this name for a policy and its tokenizer.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one.
        tokenizer: provides EOS, and the padding that engine generate puts before prompts.
        max_rows: completions sampled at once, which limits the memory of keys and values; None samples all of a call.
        by_length: for engine generate: sample prompts of similar lengths together, where max_rows divides them.
        share_prompts, drop_ended: for engine generate: compute equal prompts once, remove rows that have ended; see
            `SharedCacheEngine`.
        max_length: for engine vllm: tokens of the longest prompt with its completion; None for the model's limit.
        vllm_gpu_memory_utilization, vllm_enforce_eager, vllm_enable_prefix_caching: for engine vllm in this process,
            see `VLLMEngine`.
        vllm_server_base_url: for engine vllm: a server to use instead, see `VLLMServerEngine`; the other options of
            vLLM are then the server's own.
        mask: for engine vllm: the mask of the run; no weight outside it changes.
        at_once: completions sampled per call of the engine; None samples all of a call.
        gather: of a sharded model, gather all weights while the engine samples; else those of a layer at a time. A vLLM
            server needs neither.
        ranks: the processes that call the engine together; needed for a vLLM server.

    Raises:
        ConfigError: the name is unknown, neither model nor tokenizer has an EOS token, or the engine cannot run here.
    """
    eos_ids = stop_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    if name == "vllm" and vllm_server_base_url is not None:
        return VLLMServerEngine(
            model, eos_ids=eos_ids, base_url=vllm_server_base_url, mask=mask, at_once=at_once, ranks=ranks
        )
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
        common: dict[str, Any] = {"pad_id": pad_id, "eos_ids": eos_ids, "max_rows": max_rows}
        engine: Engine
        if name == "continuous_batching":
            engine = ContinuousBatchingEngine(model, **common)
        elif share_prompts or drop_ended:
            engine = SharedCacheEngine(
                model, **common, by_length=by_length, share_prompts=share_prompts, drop_ended=drop_ended
            )
        else:
            engine = GenerateEngine(model, **common, by_length=by_length)
        if at_once is not None:
            engine = ChunkedEngine(engine, at_once)
        return GatheredEngine(engine, model) if is_sharded(model) else engine
    if name == "vllm":
        vllm = VLLMEngine(
            model,
            eos_ids=eos_ids,
            gpu_memory_utilization=vllm_gpu_memory_utilization,
            max_length=max_length,
            max_rows=max_rows,
            enforce_eager=vllm_enforce_eager,
            enable_prefix_caching=vllm_enable_prefix_caching,
            mask=mask,
        )
        return vllm if at_once is None else ChunkedEngine(vllm, at_once)
    raise ConfigError(f"rollout_engine is {name!r}, expected generate, continuous_batching or vllm")


def configured_engine(config: RolloutOptions, model: Any, tokenizer: Any, *, at_once: int | None = None) -> Engine:
    """The engine of a loop's options, with capacity for its longest prompt and completion; see `make_engine`."""
    return make_engine(
        config.rollout_engine,
        model,
        tokenizer,
        share_prompts=config.share_prompts,
        max_length=config.max_prompt_length + config.max_completion_length,
        **vllm_settings(config),
        mask=load_mask(config, model) if config.rollout_engine == "vllm" and config.mode == "sparse" else None,
        at_once=at_once,
        gather=config.gather_for_generation,
        ranks=Ranks.of(config.parallel),
    )


def vllm_settings(config: CompletionOptions) -> dict[str, Any]:
    """The arguments of `make_engine` for engine vllm."""
    names = ("gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "server_base_url")
    return {f"vllm_{name}": getattr(config, f"vllm_{name}") for name in names}
