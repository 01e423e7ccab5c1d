"""Weight updates and deltas for vLLM: an engine of vLLM's weight transfer, and its clients.

In the trainer, with `llm` an `LLM` of this process or the address of a server:

    from sparse_opt.integrations.vllm import VLLMWeightSync
    from sparse_opt.weight_sync import WeightSender

    sync = VLLMWeightSync(WeightSender(optimizer), llm)
    sync.connect()
    for batch in batches:
        ...
        optimizer.step()
        sync.update()

vLLM is started with `weight_transfer_config=WeightTransferConfig(backend="sparse_opt")`, in an environment in which
this package is installed: it loads `plugin.register` as a plugin. This module does not import vLLM, and needs none.
"""

from __future__ import annotations

from .client import VLLMChannelSync, VLLMWeightSync
from .deltas import VLLMDeltas
from .shared import SharedWeights, share_weights

__all__ = ["SharedWeights", "VLLMChannelSync", "VLLMDeltas", "VLLMWeightSync", "share_weights"]
