"""Updates that are sent while training goes on."""

import threading
from contextlib import closing, suppress
from unittest.mock import patch

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
    for version in (1, 2):
        change(weights, mask, 0.2, seed=version)
        sent = clones(weights)
        channel.begin_update()
        change(weights, mask, 0.9, seed=10 + version)  # the next step, which the update must not have
        assert channel.receivers == ("engine",) and same_bits(engine.weights, before)
        engine.gate.release()
        assert channel.finish_update() == version
        assert same_bits(engine.weights, sent)
        before = sent


def test_other_calls_wait_for_finish_update(weights, mask, channel, engine):
    with pytest.raises(WeightSyncError, match="^no update has begun: call begin_update"):
        channel.finish_update()
    change(weights, mask, 0.2, seed=1)
    channel.begin_update()
    for call in (channel.begin_update, channel.update, lambda: channel.wait_for_receivers(1)):
        with pytest.raises(WeightSyncError, match="^an update has begun: call finish_update"):
            call()
    assert channel.weights.version == 1
    engine.gate.release(2)
    assert channel.finish_update() == 1
    assert channel.update() == 2 and same_bits(weights, engine.weights)


def test_the_error_of_the_background_is_raised_by_finish_update_or_close(weights, mask, channel, engine):
    change(weights, mask, 0.2, seed=1)
    channel.begin_update()  # the engine does not receive
    with pytest.raises(WeightSyncError, match="^version 1: engine has not replied within 1 s$"):
        channel.finish_update()
    engine.gate.release()
    assert channel.update(receivers=1) == 2 and same_bits(weights, engine.weights)
    channel.begin_update()
    with pytest.raises(WeightSyncError, match="^version 3: engine has not replied within 1 s$"):
        channel.close()
    assert channel.address == ""


def test_close_finishes_an_update(channel, engine):
    channel.begin_update()
    engine.gate.release(2)
    channel.close()
    engine.join(PATIENCE)
    assert not engine.is_alive() and engine.channel.weights.version == 1


def test_an_update_that_is_made_already_can_be_sent(weights, mask, channel, engine):
    change(weights, mask, 0.2, seed=1)
    first, second = channel.weights.update(), channel.weights.update()
    with pytest.raises(WeightSyncError, match="^the update is version 1, expected .* version 2$"):
        channel.send(first)
    engine.gate.release()
    channel.send(second)  # by a state, as the engine has missed version 1
    assert engine.channel.weights.version == 2 and same_bits(weights, engine.weights)


def test_an_update_whose_wait_is_interrupted_can_be_finished(weights, mask, channel, engine):
    channel.begin_update()
    with patch.object(channel.weights, "on_rank_0", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        channel.finish_update()
    with pytest.raises(WeightSyncError, match="^an update has begun: call finish_update"):
        channel.begin_update()
    engine.gate.release()
    assert channel.finish_update() == 1
