"""Several deltas of one base in one engine: an LLM, and two tensor-parallel workers.

The tokens after each switch are those of an engine that was started with the checkpoint of the delta.
"""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from torch import nn
from vllm_lab import engine
from vllm_updates import Trainer, save, tokens_of

from sparse_opt import SparseDelta
from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.vllm import VLLMDeltas, VLLMWeightSync
from sparse_opt.weight_sync import WeightSender

Tokens = list[list[int]]


@pytest.fixture(scope="module")
def models() -> dict[str | None, nn.Module]:
    """The base; elements of all weights, by four steps of training; and tiles of two weights."""
    trainer = Trainer()
    found = {None: copy.deepcopy(trainer.model), "tiles": copy.deepcopy(trainer.model)}
    for _ in range(4):
        trainer.step()
    found["math"] = trainer.model
    with torch.no_grad():
        for layer in found["tiles"].model.layers:
            layer.self_attn.o_proj.weight[64:, :64] += 0.1
            layer.mlp.gate_proj.weight[:64, 64:] -= 0.1
    return found


@pytest.fixture(scope="module")
def checkpoints(models, tmp_path_factory) -> dict[str | None, Path]:
    return {name: save(tmp_path_factory.mktemp("checkpoint"), model) for name, model in models.items()}


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[str, Tokens]:
    found = {}
    for name in ("math", "tiles"):
        with engine(checkpoints[name]) as llm:
            found[name] = tokens_of(llm)
    assert found["math"] != found["tiles"]
    return found


@pytest.fixture
def deltas(models) -> dict[str, SparseDelta]:
    return {name: SparseDelta.from_models(models[None], models[name]) for name in ("math", "tiles")}


def test_requests_of_several_deltas_in_turn(models, checkpoints, expected, deltas, tmp_path):
    deltas["tiles"].save_pretrained(tmp_path / "tiles")
    with engine(checkpoints[None], enable_prefix_caching=True) as llm:
        served = VLLMDeltas(llm, {"math": deltas["math"], "tiles": tmp_path / "tiles"})
        of_base = tokens_of(llm)
        assert of_base not in expected.values()
        for name in ("math", "tiles", "math", None, "tiles", "tiles", None):
            served.switch(name)
            assert llm.get_weight_version() == (name or "default")
            assert tokens_of(llm) == expected.get(name, of_base)

        served.switch("tiles")
        with pytest.raises(WeightSyncError, match="there is no delta 'maths'; the nearest is 'math'"):
            served.switch("maths")
        sync = VLLMWeightSync(WeightSender(models[None], Trainer().mask), llm)
        with pytest.raises(WeightSyncError, match="delta 'tiles' is active: switch to the base before the updates"):
            sync.connect()
        assert tokens_of(llm) == expected["tiles"]
        served.switch(None)
        other = SparseDelta.from_models(models["math"], models["tiles"])
        with pytest.raises(WeightSyncError, match=r"\w+.weight has the digest .* the delta is for another"):
            served.register("other", other)
        served.remove("tiles")
        served.switch("math")
        assert tokens_of(llm) == expected["math"]


def test_workers_with_slices_of_the_weights(checkpoints, deltas, monkeypatch):
    def damage_second(worker):
        if worker.rank == 1:
            worker.weight_transfer_engine._deltas._deltas["tiles"].base += 1

    def mend_second(worker):
        if worker.rank == 1:
            worker.weight_transfer_engine._deltas._deltas["tiles"].base -= 1

    def sleep(worker):
        from sparse_opt.integrations.vllm import engine

        worker.vllm_config.model_config.enable_sleep_mode = True
        data = SimpleNamespace(tag="weights", is_asleep=True)
        engine.get_mem_allocator_instance = lambda: SimpleNamespace(pointer_to_data={0: data})

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # of the functions
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # otherwise each worker needs a NUMA node
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    found = {}
    with engine(checkpoints[None], **options) as llm:
        served = VLLMDeltas(llm, deltas)
        for name in ("tiles", "math"):
            served.switch(name)
            found[name] = tokens_of(llm)
        llm.collective_rpc(damage_second)
        with pytest.raises(WeightSyncError, match="other code has changed .*; all 2 workers have kept their weights"):
            served.switch("tiles")
        assert tokens_of(llm) == found["math"]
        llm.collective_rpc(mend_second)
        served.switch("tiles")
        assert tokens_of(llm) == found["tiles"]
        llm.collective_rpc(sleep)
        with pytest.raises(WeightSyncError, match="the engine sleeps: wake it up before"):
            served.switch("math")
        assert tokens_of(llm) == found["tiles"]
    for name in found:
        with engine(checkpoints[name], **options) as fresh:
            assert tokens_of(fresh) == found[name]
