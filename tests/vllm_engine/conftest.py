"""Tests with a real vLLM for CPUs, which `make test-vllm` installs into an environment of its own.

The folder is not named vllm: the folder of all tests is on the import path, and `import vllm` would find it.
"""

import os
from collections.abc import Callable

import pytest
import torch

# vLLM reads them when it is imported, and when an engine starts.
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def worker(tmp_path) -> None:
    """The process groups of a worker that is alone, which end when an engine of this process is shut down."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm_lab import EXPERTS, engine_config, make_model, saved

    if torch.cuda.is_available():
        pytest.skip("models of vLLM without an engine are on the CPU: make test-vllm")
    if model_parallel_is_initialized():
        return
    name, overrides = EXPERTS["qwen3-moe"]  # for which vLLM makes all groups
    any_model = saved(tmp_path / "any", make_model(name, **overrides))
    with set_current_vllm_config(engine_config(any_model)):
        init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", 0, "gloo")
        initialize_model_parallel(1, 1)


@pytest.fixture
def vllm_model(worker, tmp_path) -> Callable[..., torch.nn.Module]:
    """`vllm_model(model, processed=True)`: the model in vLLM, as a worker has it; `processed` packs it for the CPU."""
    from vllm_lab import load_into_vllm, saved

    count = 0

    def make(model: torch.nn.Module, processed: bool = True) -> torch.nn.Module:
        nonlocal count
        count += 1
        return load_into_vllm(saved(tmp_path / str(count), model), processed)

    return make
