"""Updates that a thread sends while training goes on."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
import torch
from samples import change, clones, make_weights, same_bits

from sparse_opt import MaskSet
from sparse_opt.errors import WeightSyncError
from sparse_opt.weight_sync import WeightReceiver, WeightSender
from sparse_opt.weight_sync.transports import ProcessGroupReceiver, ProcessGroupSender

PATIENCE = 20.0  # seconds that no test waits in full unless it fails


class Engine(threading.Thread):
    """Receives a version after each `release` of its gate, as an engine that generates in between."""

    def __init__(self, address: str, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(daemon=True)
        self.weights, self.gate = weights, threading.Semaphore(0)
        self.channel = ProcessGroupReceiver(WeightReceiver(weights), address, timeout=PATIENCE, name="engine")
        self.start()

    def run(self) -> None:
        version: int | None = 0
        with suppress(WeightSyncError):  # the channel was closed while the engine did not receive
            while version is not None and self.gate.acquire(timeout=PATIENCE):
                version = self.channel.receive(PATIENCE)


@pytest.fixture
def weights():
    return make_weights("mixed")


@pytest.fixture
def mask(weights):
    return MaskSet.random(weights, density=0.3)


@pytest.fixture
def channel(weights, mask):
    with closing(ProcessGroupSender(WeightSender(weights, mask), "127.0.0.1:0", timeout=1.0)) as channel:
        yield channel


@pytest.fixture
def engine(weights, channel):
    engine = Engine(channel.address, clones(weights))
    engine.gate.release()
    channel.wait_for_receivers(1, PATIENCE)
    yield engine
    engine.gate.release(10)


def test_training_goes_on_while_an_update_is_sent(weights, mask, channel, engine):
    before = clones(engine.weights)
    with ThreadPoolExecutor(1) as pool:
        for version in (1, 2):
            change(weights, mask, 0.2, seed=version)
            sent = clones(weights)
            sending = pool.submit(channel.send, channel.weights.update())
            change(weights, mask, 0.9, seed=10 + version)  # the next step, which the update must not have
            assert same_bits(engine.weights, before)
            engine.gate.release()
            sending.result(PATIENCE)
            assert channel.weights.version == version and same_bits(engine.weights, sent)
            before = sent


def test_the_error_of_a_thread_leaves_the_channel_usable(weights, mask, channel, engine):
    change(weights, mask, 0.2, seed=1)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(channel.send, channel.weights.update())  # the engine does not receive
        with pytest.raises(WeightSyncError, match="^version 1: engine has not replied within 1 s$"):
            sending.result(PATIENCE)
    engine.gate.release()
    assert channel.update(receivers=1) == 2 and same_bits(weights, engine.weights)


def test_an_update_that_is_made_already_can_be_sent(weights, mask, channel, engine):
    change(weights, mask, 0.2, seed=1)
    first, second = channel.weights.update(), channel.weights.update()
    with pytest.raises(WeightSyncError, match="^the update is version 1, expected .* version 2$"):
        channel.send(first)
    engine.gate.release()
    channel.send(second)  # by a state, as the engine has missed version 1
    assert engine.channel.weights.version == 2 and same_bits(weights, engine.weights)
