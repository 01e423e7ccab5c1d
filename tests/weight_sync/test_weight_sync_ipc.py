"""On a GPU: a receiver in another process copies by CUDA IPC, and updates do not wait for the device."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from samples import change, clones, make_weights, same_bits, send_aside

from sparse_opt import MaskSet
from sparse_opt.errors import WeightSyncError
from sparse_opt.weight_sync import WeightReceiver, WeightSender
from sparse_opt.weight_sync.transports import CudaIpcReceiver, CudaIpcSender, cuda_ipc

VERSIONS = 4


def test_a_gpu_that_this_process_does_not_see_is_named():
    with pytest.raises(WeightSyncError, match="on GPU 0000, which this process does not see"):
        cuda_ipc._opened({"device": "0000"})


@pytest.mark.gpu
def test_a_receiver_in_another_process_has_the_senders_bits(tmp_path):
    weights = make_weights("mixed", "cuda")
    mask = MaskSet.random(weights, density=0.3)
    channel = CudaIpcSender(WeightSender(weights, mask), "127.0.0.1:0")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    process = subprocess.Popen([sys.executable, __file__, channel.address, str(tmp_path)], env=environment)
    try:
        channel.wait_for_receivers(1, 60)
        for version in range(1, VERSIONS + 1):
            change(weights, mask, 1.0 if version == 3 else 0.1, seed=version)  # in between, a larger buffer is needed
            assert channel.update() == version
        sent = send_aside(channel)
        torch.cuda._sleep(2 * 10**9)  # the next training step, about a second
        busy = torch.cuda.current_stream().record_event()
        sent.join(60)
        assert not busy.query(), "the update has waited for the training stream"
        channel.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    received = torch.load(tmp_path / "weights")
    assert received["versions"] == list(range(VERSIONS + 2))
    assert same_bits(clones({name: w.cpu() for name, w in weights.items()}), received["weights"])


@pytest.fixture
def weights():
    return {name: torch.randn(2000, 1000, device="cuda", dtype=torch.bfloat16) for name in "abcd"}


def keep_busy() -> torch.cuda.Event:
    """Fill the current stream for some tenths of a second, and return an event behind that work."""
    torch.cuda._sleep(5 * 10**8)
    return torch.cuda.current_stream().record_event()


@pytest.mark.gpu
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


@pytest.mark.gpu
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


if __name__ == "__main__":
    address, folder = sys.argv[1:]
    copy = make_weights("mixed", "cuda")
    receiver = CudaIpcReceiver(WeightReceiver(copy), address)
    versions = []
    while (version := receiver.receive()) is not None:
        versions.append(version)
    torch.save({"versions": versions, "weights": {n: w.cpu() for n, w in copy.items()}}, Path(folder) / "weights")
