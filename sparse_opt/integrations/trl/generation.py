"""vLLM of TRL's GRPOTrainer: a colocated one or a server that gets the changed values of a mask, or shared weights.

Written for TRL 1.16, whose constructor of GRPOTrainer makes a `VLLMGeneration`, which writes all weights to vLLM before
each generation: to a server by a group of vLLM's NCCL backend, and a server has one backend of weight transfer. So the
constructor is called with `use_vllm=False`, and afterwards `connect` makes a `VLLMGeneration` that joins no group and
sends messages of `sparse_opt.weight_sync`. In the trainer's process `start` starts vLLM with options of `vllm.LLM` for
which TRL has no arguments. `send` then sends it messages, too, and `share` makes the trained parameters views of its
weights.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import ensure_master_addr_port

from ...errors import ConfigError
from ...masks import MaskSet
from ...weight_sync import WeightSender
from ..vllm import VLLMWeightSync, share_weights


@contextmanager
def without_vllm(args: Any) -> Iterator[None]:
    """A context around GRPOTrainer's constructor with these arguments, in which it neither starts vLLM nor connects."""
    generation_kwargs = args.generation_kwargs  # of vLLM; transformers' GenerationConfig has others
    args.use_vllm, args.generation_kwargs = False, None
    try:
        yield
    finally:
        args.use_vllm, args.generation_kwargs = True, generation_kwargs


def use_generation(trainer: Any, make: Callable[..., VLLMGeneration], **options: Any) -> None:
    """Set what GRPOTrainer's constructor sets with `use_vllm=True`, after a call `without_vllm`.

    Args:
        make: called with `options`, and with those that do not depend on the mode of vLLM.
    """
    args = trainer.args
    del trainer.generation_config, trainer.generation_kwargs  # of generation with transformers
    trainer.use_vllm = True
    trainer.vllm_generation = make(
        **options,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        logprobs=0,  # those of the generated tokens
        generation_kwargs=args.generation_kwargs,
    )
    trainer._last_loaded_step = -1


class MaskedUpdates:
    """Called in place of `VLLMGeneration.sync_weights`: sends the mask and its active values, then what has changed.

    Args:
        model: the trained model.
        mask: no weight outside of it changes.
        engine: a `vllm.LLM` or the address of a server, with weight transfer backend `sparse_opt`.
    """

    def __init__(self, model: nn.Module, mask: MaskSet, engine: Any) -> None:
        self._model, self._mask, self._engine = model, mask, engine
        self._sync: VLLMWeightSync | None = None

    def __call__(self) -> None:
        """Bring vLLM's weights to the model's, and discard its cached keys and values.

        Raises:
            WeightSyncError: vLLM cannot be reached or discard its cache, or its weights have another dtype or layout;
                names the weight. The next call sends the mask and all active values.
        """
        if self._sync is None:
            sync = VLLMWeightSync(WeightSender(self._model, self._mask), self._engine)
            sync.connect()
            self._sync = sync  # kept once the mask has arrived
        else:
            self._sync.update()


# A server


class SparseServerGeneration(VLLMGeneration):
    """TRL's generation on a server, with `MaskedUpdates` as its `sync_weights`.

    As in TRL, only the main process has a client of the server.

    Args:
        model: the trained model, the same on all processes.
        mask: no weight outside of it changes.
        options: those of `VLLMGeneration`; `mode` is "server".

    Raises:
        ConfigError: the server has another backend of weight transfer.
    """

    def __init__(self, model: nn.Module, mask: MaskSet, **options: Any) -> None:
        self._mask = mask
        super().__init__(model=model, mode="server", **options)

    def _init_vllm(self) -> None:
        if self.accelerator.is_main_process:
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = VLLMClient(base_url=url, connection_timeout=self.server_timeout)
            transfer = self.vllm_client.get_server_info()["weight_transfer_config"]
            backend = None if transfer is None else transfer["backend"]
            if backend != "sparse_opt":
                raise ConfigError(
                    f"vllm_weights is 'sparse', and the vLLM server {url} has weight transfer backend {backend!r}, "
                    """expected 'sparse_opt': start it with --weight-transfer-config '{"backend": "sparse_opt"}'"""
                )
            self._send = MaskedUpdates(self.model, self._mask, self.vllm_client.base_url)
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """As `MaskedUpdates`, in the main process."""
        if self.accelerator.is_main_process:
            self._send()


def connect(trainer: Any, mask: MaskSet) -> None:
    """Let a GRPOTrainer generate on a server, after a call `without_vllm` of its constructor.

    Raises:
        ConfigError: the server has another backend of weight transfer.
    """
    args = trainer.args
    use_generation(
        trainer,
        SparseServerGeneration,
        model=trainer.model,
        mask=mask,
        server_base_url=args.vllm_server_base_url,
        server_host=args.vllm_server_host,
        server_port=args.vllm_server_port,
        server_timeout=args.vllm_server_timeout,
    )
    if args.vllm_importance_sampling_correction and trainer.accelerator.is_main_process:
        found = trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
        if found != "processed_logprobs":
            warnings.warn(
                f"the vLLM server has --logprobs-mode {found}, expected processed_logprobs: importance sampling is "
                "biased; or set vllm_importance_sampling_correction=False",
                stacklevel=4,
            )


# In the trainer's process


class ColocatedGeneration(VLLMGeneration):
    """TRL's generation in mode "colocate", without tensor parallelism.

    Args:
        llm_options: of `vllm.LLM`, in addition to TRL's.
        options: those of `VLLMGeneration`.

    Raises:
        ConfigError: TRL sets an option of `llm_options` itself; names it.
    """

    def __init__(self, llm_options: Mapping[str, Any], **options: Any) -> None:
        self._llm_options = llm_options
        super().__init__(mode="colocate", **options)

    def _init_vllm(self) -> None:
        from vllm import LLM

        of_trl = {
            "model": self.model.name_or_path,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_length,
            "max_num_seqs": self.max_num_seqs,
            "enable_sleep_mode": self.enable_sleep_mode,
            "model_impl": self.model_impl,
            "distributed_executor_backend": "external_launcher",
            "seed": self.accelerator.process_index,
            "max_num_batched_tokens": 4096,
            "logprobs_mode": "processed_logprobs",
            "trust_remote_code": self.trust_remote_code,
        }
        for name in self._llm_options:
            if name in of_trl:
                raise ConfigError(
                    f"vllm_options has {name!r}, which TRL sets to {of_trl[name]!r}; some are arguments of GRPOConfig"
                )
        # The launcher that vLLM finds itself in.
        os.environ["RANK"] = str(self.accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(self.accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(self.accelerator.num_processes)
        ensure_master_addr_port()
        self.llm = LLM(**of_trl, **self._llm_options)
        self._llm_weights_sleeping = False
        self.accelerator.wait_for_everyone()


def start(trainer: Any, llm_options: Mapping[str, Any]) -> None:
    """Start vLLM for a GRPOTrainer after a call `without_vllm` of its constructor.

    Raises:
        ConfigError: TRL sets an option of `llm_options` itself; names it.
    """
    args = trainer.args
    use_generation(
        trainer,
        ColocatedGeneration,
        llm_options=llm_options,
        model=trainer.model,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length,
        max_num_seqs=args.per_device_train_batch_size * args.steps_per_generation,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        model_impl=args.vllm_model_impl,
        trust_remote_code=args.trust_remote_code,
    )


def send(trainer: Any, mask: MaskSet, llm_options: Mapping[str, Any]) -> None:
    """Start vLLM for a GRPOTrainer as `start` does, and send it the changed values of the mask.

    On a GPU TRL writes all weights once before: those outside of the mask may differ from the folder's that vLLM has
    loaded. On a CPU it cannot write the packed weights of vLLM.

    Raises:
        ConfigError: as `start`.
    """
    from vllm.config import WeightTransferConfig

    start(trainer, {"weight_transfer_config": WeightTransferConfig(backend="sparse_opt"), **llm_options})
    generation = trainer.vllm_generation
    write_all, updates = generation.sync_weights, MaskedUpdates(trainer.model, mask, generation.llm)

    def sync_weights() -> None:
        if next(trainer.model.parameters()).is_cuda:
            write_all()
        generation.sync_weights = updates
        updates()

    generation.sync_weights = sync_weights


def share(trainer: Any, llm_options: Mapping[str, Any]) -> None:
    """Start vLLM for a GRPOTrainer as `start` does, and let the trained model have its weights.

    With sleep mode, vLLM sleeps whenever TRL does not generate, and keeps the weights.

    Raises:
        ConfigError: as `start`.
        WeightSyncError: as `share_weights`.
    """
    trainer.model.to("cpu")  # a GPU then has one copy of the weights also while vLLM starts
    torch.cuda.empty_cache()
    start(trainer, llm_options)
    generation = trainer.vllm_generation
    shared = share_weights(trainer.model, generation.llm)

    def sync_weights() -> None:
        if generation._llm_weights_sleeping:  # for vLLM and TRL, although they are in memory
            generation.llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False
        shared.update()

    generation.sync_weights = sync_weights
    if generation.enable_sleep_mode:
        generation.llm.sleep(level=2)
        generation._llm_weights_sleeping = True
