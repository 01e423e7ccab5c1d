"""The names of transports, by which an engine opens the receiver of a trainer's channel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
from samples import clones, make_weights

from sparse_opt import MaskSet
from sparse_opt.weight_sync import WeightReceiver, WeightSender
from sparse_opt.weight_sync.transports import (
    CudaIpcReceiver,
    CudaIpcSender,
    FolderReceiver,
    ProcessGroupReceiver,
    ProcessGroupSender,
    open_receiver,
)
from sparse_opt.weight_sync.transports.channel import SenderChannel

# Neither sender uses its GPU before the first message.
SENDERS: dict[str, Callable[[WeightSender], SenderChannel]] = {
    "gloo": lambda sender: ProcessGroupSender(sender, "127.0.0.1:0"),
    "nccl": lambda sender: ProcessGroupSender(sender, "127.0.0.1:0", backend="nccl", device="cuda:0"),
    "cuda_ipc": lambda sender: CudaIpcSender(sender, "127.0.0.1:0", device="cuda:0"),
}


@pytest.mark.parametrize("name", SENDERS)
def test_a_senders_name_opens_its_receiver(name):
    weights = make_weights()
    sender = WeightSender(weights, MaskSet.random(weights, density=0.1))
    with closing(SENDERS[name](sender)) as channel:
        assert channel.transport == name
        receiver = open_receiver(channel.transport, WeightReceiver(clones(weights)), channel.address, device="cuda:0")
        assert isinstance(receiver, CudaIpcReceiver if name == "cuda_ipc" else ProcessGroupReceiver)
        assert receiver.transport == name
        receiver.close()


def test_other_names(tmp_path) -> None:
    assert isinstance(open_receiver("folder", WeightReceiver({}), str(tmp_path)), FolderReceiver)
    with pytest.raises(ValueError, match="transport is 'pigeons', expected one of gloo, nccl, cuda_ipc, folder"):
        open_receiver("pigeons", WeightReceiver({}), "127.0.0.1:1")
