"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Register the weight transfer engine `sparse_opt`, whose module is imported when vLLM creates the engine."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        "sparse_opt", "sparse_opt.integrations.vllm.engine", "SparseWeightTransferEngine"
    )
