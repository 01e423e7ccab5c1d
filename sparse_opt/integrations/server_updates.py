"""Weight updates for a vLLM server of TRL's GRPOTrainer (`vllm_mode="server"`): the values that have changed.

Written for TRL 1.16, whose constructor of GRPOTrainer makes a `VLLMGeneration` that joins a group of vLLM's NCCL
backend. A server has one backend of weight transfer, so the constructor is called with `use_vllm=False`, and afterwards
`connect` makes a `VLLMGeneration` that joins no group and sends messages of `sparse_opt.weight_sync`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from ..errors import ConfigError
from ..masks import MaskSet
from ..weight_sync import WeightSender
from .vllm import VLLMWeightSync


class SparseServerGeneration(VLLMGeneration):
    """TRL's generation on a server, with `VLLMWeightSync` as its `sync_weights`.

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
        self._sync: VLLMWeightSync | None = None
        super().__init__(model=model, mode="server", **options)

    def _init_vllm(self) -> None:
        if self.accelerator.is_main_process:
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = VLLMClient(base_url=url, connection_timeout=self.server_timeout)
            transfer = self.vllm_client.get_server_info()["weight_transfer_config"]
            backend = None if transfer is None else transfer["backend"]
            if backend != "sparse_opt":
                raise ConfigError(
                    f"vllm_weight_sync is 'sparse', and the vLLM server {url} has weight transfer backend {backend!r}, "
                    """expected 'sparse_opt': start it with --weight-transfer-config '{"backend": "sparse_opt"}'"""
                )
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Bring the server's weights to the model's, and discard its cached keys and values.

        The first call sends the mask and its active values, the later ones what has changed.

        Raises:
            WeightSyncError: the server cannot be reached, or its weights have another dtype or layout.
        """
        if not self.accelerator.is_main_process:
            return
        if self._sync is None:
            sync = VLLMWeightSync(WeightSender(self.model, self._mask), self.vllm_client.base_url)
            sync.connect()
            self._sync = sync  # kept once the mask has arrived
        else:
            self._sync.update()


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
