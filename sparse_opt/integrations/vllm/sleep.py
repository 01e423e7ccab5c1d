"""Backend `sparse_opt` of vLLM's sleep mode: an engine that sleeps gives its key-value cache back, and nothing else.

vLLM's own backend also discards the weights or moves them to the host, which a trainer that shares them still uses, and
which CUDA graphs have the addresses of. The cache keeps its addresses too: its memory is released, and new memory is
mapped there when the engine wakes up. vLLM has then forgotten all that was cached.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from vllm.device_allocator import cumem, get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.platforms import current_platform

_CACHE = "kv_cache"  # vLLM's tag of its allocations


class CacheOnlySleep(SleepModeBackend):
    """What `LLM.sleep` of either level and `LLM.wake_up` do, if `ModelConfig.sleep_mode_backend` is sparse_opt."""

    def suspend(self, level: int = 1) -> None:
        """Release the memory of the key-value cache; the same for each level."""
        self._state = "SUSPENDED"
        torch.cuda.synchronize()
        for allocation in _caches(asleep=False):
            cumem.unmap_and_release(allocation.handle)
            allocation.is_asleep = True

    def discard(self, tags: tuple[str, ...]) -> None:
        """What `LLM.release_kv_cache_memory` does."""
        if tags != (_CACHE,):
            super().discard(tags)  # not supported
        self.suspend()

    def resume(self, tags: list[str] | None = None) -> None:
        """Map memory for the key-value cache, if it is among the tags.

        Raises:
            torch.OutOfMemoryError: the GPU has too little free memory. The engine still sleeps.
        """
        if tags is not None and _CACHE not in tags:
            return
        self._state = "RESUMING"
        gc.collect()
        torch.cuda.empty_cache()  # what a training step has freed
        caches = _caches(asleep=True)
        needed, free = sum(allocation.handle[1] for allocation in caches), torch.cuda.mem_get_info()[0]
        if needed > free:
            self._state = "SUSPENDED"
            raise torch.OutOfMemoryError(
                f"vLLM's key-value cache takes {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB of the GPU are "
                "free: free memory before vLLM wakes up, or start it with a lower gpu_memory_utilization"
            )
        for allocation in caches:
            cumem.create_and_map(allocation.handle)
            allocation.is_asleep = False
        self._state = "RUNNING"

    @classmethod
    def is_supported(cls) -> bool:
        """Whether vLLM has its allocator of CUDA memory."""
        return current_platform.is_cuda() and cumem.cumem_available

    @classmethod
    def preserves_communicators(cls) -> bool:
        """They are in other memory."""
        return True


def _caches(asleep: bool) -> list[Any]:
    allocations = get_mem_allocator_instance().pointer_to_data.values()
    return [data for data in allocations if data.tag == _CACHE and data.is_asleep == asleep]
