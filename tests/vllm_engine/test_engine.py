"""Sparse updates of real engines: a server over HTTP, and an LLM of this process. Each starts once, in half a minute.

Greedy tokens after updates are compared with those of an engine that has loaded the same weights from a checkpoint.
"""

import gc
import json
import logging
import time
import urllib.request
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm import LLM
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm_lab import engine, make_model
from vllm_server import Server
from vllm_updates import PROMPTS, DamagedSender, Trainer, save, tokens_of

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.vllm import VLLMChannelSync, VLLMWeightSync
from sparse_opt.weight_sync import WeightSender
from sparse_opt.weight_sync.transports import ProcessGroupSender

UPDATES = 20


class History:
    """The tokens that the server generated with the weights of each version, and the checkpoint of the last one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = ""  # of the server
        self.tokens: dict[int, list[list[int]]] = {}


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> History:
    """Twenty updates of a server, with all that can go wrong on the way."""
    folder = tmp_path_factory.mktemp("server")
    trainer = Trainer()
    server = Server(save(folder / "first", trainer.model), folder / "log")
    try:
        server.wait()
        found = History(folder / "last")
        found.tokens[0] = server.tokens()
        update_server(server, trainer, found)
    finally:
        server.stop()
    found.log = server.log.read_text()
    save(found.folder, trainer.model)
    return found


def update_server(server: Server, trainer: Trainer, found: History) -> None:
    sender = WeightSender(trainer.model, trainer.mask)
    sync = VLLMWeightSync(sender, server.address)
    assert sync.connect() == 0
    assert server.tokens() == found.tokens[0]
    for version in range(1, UPDATES + 1):
        trainer.step()
        if version == 8:  # refused: the server goes on with version 7, and the next update brings it to version 9
            with pytest.raises(WeightSyncError, match=r"update_weights answered 500: .*values sent have digest"):
                VLLMWeightSync(DamagedSender(sender), server.address).update()
            assert server.tokens() == found.tokens[7]
            continue
        if version == 12:  # an update while requests run
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(server.tokens, [PROMPTS[0]], new_tokens=400)
                assert sync.update() == version
            (tokens,) = running.result()
            assert len(tokens) == 400
        else:
            assert sync.update() == version
        if version in (1, 2, 7, 9, 12, UPDATES):
            found.tokens[version] = server.tokens()
            with urllib.request.urlopen(f"{server.address}/weight_info", timeout=30) as response:
                assert json.load(response) == {"weight_version": str(version)}


@pytest.fixture(scope="module")
def llm(history) -> Iterator[LLM]:
    with engine(history.folder, enable_prefix_caching=True) as llm:
        yield llm


def test_updates_change_tokens(history):
    # The same prompts with new weights have new tokens: the blocks of the prefix cache were dropped.
    versions = [history.tokens[v] for v in sorted(history.tokens)]
    assert all(a != b for i, a in enumerate(versions) for b in versions[:i])


def test_the_log_has_the_refusal_and_no_error_that_follows_from_it(history):
    assert history.log.count("Invocation of collective_rpc method failed") == 1
    assert "values sent have digest" in history.log and "without a matching" not in history.log


def test_an_updated_server_equals_a_fresh_engine(history, llm):
    assert llm.get_weight_version() == "default"
    assert tokens_of(llm) == history.tokens[UPDATES]


def test_an_engine_in_process_follows_the_server(history, llm):
    """An engine with the weights of version 20 gets the state of version 0, and the updates."""
    trainer = Trainer()
    sender = WeightSender(trainer.model, trainer.mask)
    sync = VLLMWeightSync(sender, [llm])
    assert sync.connect() == 0
    assert tokens_of(llm) == history.tokens[0]
    for version in range(1, UPDATES + 1):
        trainer.step()
        if version == 8:
            with pytest.raises(WeightSyncError, match="update_weights of the vLLM engine failed: .*digest"):
                VLLMWeightSync(DamagedSender(sender), llm).update()
            assert tokens_of(llm) == history.tokens[7]
            continue
        assert sync.update() == version
        if version in history.tokens:
            assert tokens_of(llm) == history.tokens[version]
            assert llm.get_weight_version() == str(version)


def test_updates_by_a_process_group(history, llm):
    trainer = Trainer()
    with closing(
        ProcessGroupSender(WeightSender(trainer.model, trainer.mask), "127.0.0.1:0", backend="gloo")
    ) as channel:
        sync = VLLMChannelSync(channel, llm)
        assert sync.connect() == 0
        assert tokens_of(llm) == history.tokens[0]
        for version in range(1, 8):
            trainer.step()
            assert sync.update(verify=version % 2 == 0) == version
            if version in history.tokens:
                assert tokens_of(llm) == history.tokens[version]
        assert llm.get_weight_version() == "7"
        begin = time.monotonic()
    assert time.monotonic() - begin < 20, "close waits for an idle engine"  # and not for the channel's timeout of 60 s
    with pytest.raises(Exception, match="transport is 'pigeons', expected one of bytes, gloo"):
        llm.init_weight_transfer_engine({"init_info": {"transport": "pigeons"}})


def test_vllm_follows_a_folder(history, llm, tmp_path):
    """Each step of the delta log is an update of vLLM without a message."""
    trainer = Trainer()
    log = DeltaLog.create(tmp_path / "log", trainer.model, mask=trainer.mask)
    llm.init_weight_transfer_engine({"init_info": {"transport": "folder", "address": str(tmp_path / "log")}})
    for version in (1, 2):
        trainer.step()
        log.append(version).wait()
        llm.start_weight_update()
        llm.update_weights({"update_info": {}})
        llm.finish_weight_update(str(version))
        llm.reset_prefix_cache()
        assert tokens_of(llm) == history.tokens[version]


def test_vllm_has_loaded_the_plugin_once(llm):
    (entry_point,) = entry_points(group="vllm.general_plugins", name="sparse_opt")
    register = entry_point.load()
    register()
    register()
    assert "sparse_opt" in WeightTransferEngineFactory._registry


def test_an_engine_that_has_ended_leaves_no_weights(tmp_path, monkeypatch, request):
    """In sleep mode vLLM refuses a second engine of a process while weights of the first are in its allocator."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    logging.disable()  # pytest keeps what vLLM logs: exceptions, with the frames of the engine's start
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    trainer = Trainer()
    with engine(save(tmp_path, trainer.model)) as llm:
        sender = WeightSender(trainer.model, trainer.mask)
        sync = VLLMWeightSync(sender, llm)
        sync.connect()
        trainer.step()
        assert sync.update() == 1
        trainer.step()
        with pytest.raises(WeightSyncError, match="digest"):
            VLLMWeightSync(DamagedSender(sender), llm).update()
        model = weakref.ref(llm.llm_engine.model_executor.driver_worker.get_model())
    gc.collect()
    assert model() is None, "after the shutdown"
    ended = weakref.ref(llm)
    del llm
    gc.collect()
    assert ended() is None
    with pytest.raises(WeightSyncError, match="the vLLM engine was deleted: keep the LLM"):
        sync.update()


def test_a_mask_of_other_weights_is_refused(history, llm):
    other = make_model("Llama", tie_word_embeddings=False, num_hidden_layers=3, max_position_embeddings=512)
    with pytest.raises(WeightSyncError, match="model.layers.2"):
        VLLMWeightSync(WeightSender(other, MaskSet.random(other, density=0.01)), llm).connect()
    trainer = Trainer()
    assert VLLMWeightSync(WeightSender(trainer.model, trainer.mask), llm).connect() == 0
    assert tokens_of(llm) == history.tokens[0]
