"""What runs when on a GPU: updates do not wait for the device, and their messages can be used on any stream."""

from __future__ import annotations

import threading

import pytest
import torch
from samples import change, clones, same_bits

from sparse_opt import MaskSet
from sparse_opt.weight_sync import WeightReceiver, WeightSender

pytestmark = pytest.mark.gpu


@pytest.fixture
def weights():
    return {name: torch.randn(2000, 1000, device="cuda", dtype=torch.bfloat16) for name in "abcd"}


def keep_busy() -> torch.cuda.Event:
    """Fill the current stream for some tenths of a second, and return an event behind that work."""
    torch.cuda._sleep(5 * 10**8)
    return torch.cuda.current_stream().record_event()


@pytest.mark.parametrize("encoding", ["auto", "values"])
def test_updates_do_not_wait(weights, encoding):
    mask = MaskSet.random(weights, density=0.1)
    sender, copy = WeightSender(weights, mask, encoding=encoding), clones(weights)
    receiver = WeightReceiver(copy)
    receiver.receive(sender.mask_message())
    change(weights, mask, 0.1, seed=0)
    receiver.receive(sender.update().wait())  # compiles the kernels
    change(weights, mask, 0.1, seed=1)
    torch.cuda.synchronize()
    expected = clones(weights)
    busy = keep_busy()
    pending = sender.update()
    for w in weights.values():
        w.add_(1)  # behind the gather on the same stream, so that the message does not have it
    assert not busy.query(), "update() has waited for the device"
    receiver.receive(pending.wait())
    assert same_bits(copy, expected)


def test_messages_of_other_threads_and_streams(weights):
    mask = MaskSet.random(weights, density=0.1)
    sender, copy = WeightSender(weights, mask), clones(weights)
    receiver = WeightReceiver(copy)
    receiver.receive(sender.mask_message())
    failed: list[BaseException] = []

    def receive(pending):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                receiver.receive(pending.wait())
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)

    for seed, share in enumerate((0.1, 1.0, 0.01, 0.9, 0.1)):
        change(weights, mask, share, seed)
        pending = sender.update()
        thread = threading.Thread(target=receive, args=(pending,))
        thread.start()
        scratch = [torch.full((mask.nnz,), 7, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        thread.join()
        del scratch
        assert not failed
    assert same_bits(copy, weights)
