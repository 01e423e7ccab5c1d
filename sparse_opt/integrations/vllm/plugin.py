"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""

from __future__ import annotations

import functools


@functools.cache
def register() -> None:
    """Register `sparse_opt` as a backend of weight transfer and of sleep mode; their modules are imported when used."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        "sparse_opt", "sparse_opt.integrations.vllm.engine", "SparseWeightTransferEngine"
    )
    SleepModeBackendFactory.register_backend("sparse_opt", "sparse_opt.integrations.vllm.sleep", "CacheOnlySleep")
