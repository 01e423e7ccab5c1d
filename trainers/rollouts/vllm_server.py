"""The rollout engine `vllm` with a vLLM server over HTTP instead of vLLM in the trainer's process.

The server runs on the trainer's host, or shares the folder of temporary files with it:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm \\
        --worker-extension-cls sparse_opt.trainers.rollouts.vllm_weights.ReloadExtension \\
        --weight-transfer-config '{"backend": "sparse_opt"}'

The last option is for a policy that trains under a mask: MODEL must then be the checkpoint that the run starts from,
and the server gets changed values only. Set `--max_logprob_difference` to stop a run whose server has another one.

Several processes use one server: rank 0 sends the weights, and then each rank sends its own prompts.

It has been run with vLLM 0.32 on a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.integrations.vllm.connections import request_json
from sparse_opt.masks import MaskSet
from sparse_opt.optim.ranks.sharding import reshard

from ..policy.models import causal_lm
from ..policy.sharding import is_sharded, unsharded_class
from ..policy.whole_model import gather
from ..ranks import ONE_RANK, Ranks, world_size
from .engine import Completions, Sampling, require_positions
from .vllm import require_updatable, require_vllm_temperature
from .vllm_weights import ReloadExtension, SparseUpdates, WeightSync, merged_weights, save_weights

# Requests in flight; the server puts them into batches itself.
_CONNECTIONS = 64
# What a request leaves out, the server takes from the checkpoint's generation_config.json.
_NO_OTHER_CHANGES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


class VLLMServerEngine:
    """A vLLM server with a copy of the policy's weights, which is updated before each call of `generate`.

    The module docstring has the server's command. Only models whose weights vLLM uses in the form of the checkpoint can
    be updated this way: no quantised models, no mixtures of experts.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one with LoRA-like adapters.
        eos_ids: any of them ends a completion.
        base_url: such as http://localhost:8000.
        mask: the mask of the run: only changed values under it are sent, to a server that has loaded the policy's
            checkpoint. None sends all weights each time.
        at_once: completions in flight at once on each rank; None for the requests of up to 64 prompts.
        ranks: the processes that train the policy. All must construct the engine and call `generate` together; a rank
            may have no prompts.

    Raises:
        ConfigError: no server with the needed settings and the policy's dtype responds there; there are more processes
            than `ranks`; the policy is a mixture of experts; or the policy is sharded and has adapters, and all
            weights would have to be sent.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        base_url: str,
        mask: MaskSet | None = None,
        at_once: int | None = None,
        ranks: Ranks = ONE_RANK,
    ):
        self.model = causal_lm(model)
        self.eos_ids = tuple(eos_ids)
        self._at_once, self._ranks = at_once, ranks
        require_updatable(self.model.config)
        if world_size() > ranks.size:
            raise ConfigError(
                f"rollout_engine vllm on a server: each of {world_size()} processes samples by itself, and would send "
                "its weights while others sample: expected one process, generate or continuous_batching"
            )
        if mask is None and is_sharded(model) and self.model is not model:
            raise ConfigError(
                "rollout_engine vllm cannot merge the adapters of a sharded policy: expected --parallel replicate, "
                "mode dense or sparse, or rollout_engine generate"
            )
        self._server = VLLMServer(base_url)
        dtype = str(self.model.dtype).removeprefix("torch.")
        if self._server.dtype != dtype:
            raise ConfigError(
                f"the vLLM server {base_url} has --dtype {self._server.dtype}, expected {dtype}, as the policy has"
            )
        self._weights: WeightSync
        if mask is None:
            expected = f"{ReloadExtension.__module__}.{ReloadExtension.__qualname__}"
            if self._server.worker_extension != expected:
                raise ConfigError(
                    f"the vLLM server {base_url} has --worker-extension-cls {self._server.worker_extension or None}, "
                    f"expected {expected}"
                )
            self._weights = FolderReload(self._server, self.model, ranks)
        else:
            if self._server.weight_transfer != "sparse_opt":
                raise ConfigError(
                    f"the vLLM server {base_url} has the weight-transfer backend {self._server.weight_transfer}, and "
                    'mode sparse needs --weight-transfer-config \'{"backend": "sparse_opt"}\''
                )
            self._weights = SparseUpdates(self._server.base_url, self.model, mask, ranks)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Completions:
        """See `Engine.generate`. Each prompt has a seed of its own, drawn from torch's global random state.

        The weights are sent when all ranks have called this; by then their previous calls have returned. No rank
        samples before the server has the new weights.

        Raises:
            ConfigError: vLLM does not support the temperature, or a prompt with its completion exceeds the positions of
                the model or of the server.
            SparseOptError: the server failed, with its message.
        """
        require_vllm_temperature(sampling)
        if prompts:
            self._require_positions(prompts, sampling)
        seeds = torch.randint(2**31, (len(prompts),), device="cpu").tolist()
        self._ranks.barrier()
        self._weights.synchronize()
        repeats, n_each = (n, 1) if sampling.greedy else (1, n)  # vLLM refuses greedy requests with n > 1
        requests = [
            {
                "model": self._server.model,
                "prompt": list(prompt),
                "n": n_each,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": seed,
                "max_tokens": sampling.max_new_tokens,
                "min_tokens": sampling.min_new_tokens,
                "stop_token_ids": list(self.eos_ids),
                "ignore_eos": True,  # only the ids above end a completion
                "logprobs": 0,  # of the sampled token alone
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                **_NO_OTHER_CHANGES,
            }
            for prompt, seed in zip(prompts, seeds, strict=True)
            for _ in range(repeats)
        ]
        connections = _CONNECTIONS if self._at_once is None else min(_CONNECTIONS, max(1, self._at_once // n_each))
        with ThreadPoolExecutor(connections) as pool:
            answers = list(pool.map(lambda request: self._server.post("/v1/completions", request), requests))
        choices = [choice for answer in answers for choice in sorted(answer["choices"], key=lambda c: c["index"])]
        return Completions(
            [choice["token_ids"] for choice in choices], [choice["logprobs"]["token_logprobs"] for choice in choices]
        )

    def _require_positions(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        require_positions(self.model, prompts, sampling)
        longest = max(map(len, prompts)) + sampling.max_new_tokens
        if longest > self._server.max_model_len:  # the server would silently sample fewer tokens
            raise ConfigError(
                f"the longest prompt with its completion has {longest} tokens, more than the vLLM server's "
                f"--max-model-len, {self._server.max_model_len}"
            )

    def close(self) -> None:
        """Remove the files of the weights. The server keeps running."""
        self._weights.close()


class FolderReload:
    """Writes all weights to a temporary folder, from which each worker of the server loads them.

    Rank 0 writes them. Those of a sharded policy are gathered one after the other on its CPU, which needs the memory.
    """

    needs_weights = False

    def __init__(self, server: VLLMServer, model: torch.nn.Module, ranks: Ranks):
        self._server, self._model, self._ranks = server, model, ranks
        self._folder = tempfile.TemporaryDirectory(prefix="sparse_opt_weights_")

    def synchronize(self) -> None:
        """See `WeightSync`.

        Raises:
            SparseOptError: some of vLLM's weights are not among the policy's, or the server failed.
        """
        weights: Iterable[tuple[str, Tensor]] = merged_weights(self._model)
        if is_sharded(self._model):
            reshard(self._model)
            weights = gather(dict(weights)).items()
        self._ranks.on_main(lambda: self._reload(weights))

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        file = Path(self._folder.name) / "model.safetensors"
        save_weights(weights, file)
        reload = {"method": "reload_policy", "args": [str(file)]}
        for missing in self._server.post("/collective_rpc", reload)["results"]:
            if missing:
                raise SparseOptError(
                    f"vLLM's {unsharded_class(self._model).__name__} has {len(missing)} weights that the policy does "
                    f"not give it, among them {min(missing)}"
                )
        if not self._server.post("/reset_prefix_cache?reset_external=true")["success"]:
            raise SparseOptError(f"the vLLM server {self._server.base_url} did not reset its prefix cache")

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


class VLLMServer:
    """A vLLM server with its development routes.

    Args:
        base_url: such as http://localhost:8000.
        timeout: seconds that one request may take.

    Raises:
        ConfigError: no server responds, or it lacks a needed setting, which the message names.
    """

    def __init__(self, base_url: str, *, timeout: float = 3600.0):
        self.base_url = base_url.rstrip("/")
        self._timeout = timeout
        try:
            self.model: str = self._get("/v1/models")["data"][0]["id"]
            info = self._get("/server_info?config_format=json")["vllm_config"]
            transfer = info["weight_transfer_config"]
            self.weight_transfer: str | None = None if transfer is None else transfer["backend"]
            self.worker_extension: str = info["parallel_config"]["worker_extension_cls"]
            self.max_model_len: int = info["model_config"]["max_model_len"]
            self.dtype: str = info["model_config"]["dtype"].removeprefix("torch.")
            mode = info["model_config"]["logprobs_mode"]
        except SparseOptError as error:
            raise ConfigError(f"rollout_engine vllm needs a server with VLLM_SERVER_DEV_MODE=1: {error}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{self.base_url} does not answer as a vLLM server does ({error!r}): expected vLLM 0.32 or later"
            ) from error
        if mode != "processed_logprobs":
            raise ConfigError(
                f"the vLLM server {self.base_url} has --logprobs-mode {mode}, expected processed_logprobs"
            )

    def post(self, route: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer to a POST request.

        Raises:
            SparseOptError: no answer, or an error, with the server's message.
        """
        return request_json(self.base_url + route, {} if body is None else body, timeout=self._timeout)

    def _get(self, route: str) -> Any:
        return request_json(self.base_url + route, method="GET", timeout=self._timeout)
