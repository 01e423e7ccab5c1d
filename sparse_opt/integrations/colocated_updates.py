"""Weight updates for vLLM in the process of TRL's GRPOTrainer (`vllm_mode="colocate"`): the values that have changed.

Written for TRL 1.16, whose `VLLMGeneration.sync_weights` writes all weights to vLLM before each generation. This
replaces that method of one trainer's `vllm_generation`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import WeightSyncError
from ..masks import MaskSet
from ..weight_sync import WeightSender


class ColocatedUpdates:
    """Called in place of `VLLMGeneration.sync_weights`.

    The first call writes all weights as TRL does, if they are on a GPU, and sends the mask. On a CPU TRL's transfer
    cannot write the packed weights of vLLM, which has loaded them from the folder that the model names.

    Args:
        generation: a `trl.generation.vllm_generation.VLLMGeneration` in mode "colocate", which does not sleep.
        model: the trained model.
        mask: no weight outside of it changes.
    """

    def __init__(self, generation: Any, model: nn.Module, mask: MaskSet) -> None:
        self._llm = generation.llm
        self._write_all = generation.sync_weights
        self._model, self._mask = model, mask
        self._sender: WeightSender | None = None
        self._engine: Any = None
        self._has_failed = False

    def __call__(self) -> None:
        """Bring vLLM's weights to the model's, and discard its cached keys and values.

        Raises:
            WeightSyncError: vLLM's weights have another dtype or layout; names the weight. Or vLLM cannot discard its
                cached keys and values. The next call sends the mask and all active values.
        """
        sender = self._sender
        if sender is None:
            if next(self._model.parameters()).is_cuda:
                self._write_all()
            (self._engine,) = self._llm.collective_rpc(_make_engine)
            sender = WeightSender(self._model, self._mask)
            messages = [sender.mask_message(), sender.state_message()]
        else:
            update = sender.update().wait()
            messages = [sender.mask_message(), sender.state_message()] if self._has_failed else [update]
        self._has_failed = True
        for message in messages:
            self._llm.collective_rpc(_receive, args=(self._engine, message.to_bytes()))
        self._sender = sender  # kept once the mask has arrived
        if not self._llm.reset_prefix_cache(reset_connector=True):  # also blocks in other memory
            raise WeightSyncError("reset_prefix_cache of vLLM failed: blocks are still in use")
        self._has_failed = False


def _make_engine(worker: Any) -> Any:
    """The engine of backend `sparse_opt` for a worker of vLLM, which TRL starts without a backend."""
    from vllm.config import WeightTransferConfig

    from .vllm.engine import SparseWeightTransferEngine

    config = WeightTransferConfig(backend="sparse_opt")
    return SparseWeightTransferEngine(config, worker.vllm_config, worker.device, worker.get_model())


def _receive(worker: Any, engine: Any, message: bytes) -> None:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        engine.update_weights({"message": message})
