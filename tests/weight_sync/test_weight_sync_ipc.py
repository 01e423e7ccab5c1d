"""The transport by CUDA IPC: a receiver in another process copies from this one's GPU memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from samples import change, clones, make_weights, same_bits

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
        channel.begin_update()
        torch.cuda._sleep(2 * 10**9)  # the next training step, about a second
        busy = torch.cuda.current_stream().record_event()
        assert channel.finish_update() == VERSIONS + 1
        assert not busy.query(), "the update has waited for the training stream"
        channel.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    received = torch.load(tmp_path / "weights")
    assert received["versions"] == list(range(VERSIONS + 2))
    assert same_bits(clones({name: w.cpu() for name, w in weights.items()}), received["weights"])


if __name__ == "__main__":
    address, folder = sys.argv[1:]
    copy = make_weights("mixed", "cuda")
    receiver = CudaIpcReceiver(WeightReceiver(copy), address)
    versions = []
    while (version := receiver.receive()) is not None:
        versions.append(version)
    torch.save({"versions": versions, "weights": {n: w.cpu() for n, w in copy.items()}}, Path(folder) / "weights")
