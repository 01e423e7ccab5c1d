"""Senders on several ranks, replicated and sharded: their messages are, byte for byte, those of one device."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from launch import device, ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from uneven import Uneven, content

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.errors import MaskError, WeightSyncError
from sparse_opt.weight_sync import (
    DistributedWeightSender,
    WeightReceiver,
    WeightSender,
    distributed,
)
from sparse_opt.weight_sync.transports import ProcessGroupReceiver, ProcessGroupSender

pytestmark = pytest.mark.dist


def whole_weights(pattern: str) -> tuple[Uneven, MaskSet]:
    torch.manual_seed(0)
    model = Uneven()
    if pattern == "one element":  # most ranks have none
        return model, MaskSet({"scale": torch.tensor([0])}, {"scale": (1,)})
    mask = MaskSet.random(model, density=0.4, pattern=pattern)
    indices = dict(mask.indices)
    if pattern == "element":
        indices["scale"] = torch.tensor([0])
        indices["hidden.bias"] = torch.tensor([], dtype=torch.int32)
        low = indices["embedding.weight"]
        indices["embedding.weight"] = low[low < 20 * 70]  # all in the first shard
    return model, MaskSet(indices, mask.shapes, pattern=pattern)


def changed(weight: Tensor, active: Tensor, share: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    moved = active & (torch.rand(weight.shape, generator=generator) < share)
    return torch.where(moved, weight + torch.randn(weight.shape, generator=generator).to(weight.dtype), weight)


def same_messages(rank: int, pattern: str, sharding: str) -> None:
    model, mask = whole_weights(pattern)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    one = WeightSender(whole, mask)
    model.to(device())
    if sharding != "replicate":
        sizes = (2, 1) if sharding == "hsdp" else (dist.get_world_size(),)
        mesh = init_device_mesh(device().type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        for part in (model.hidden, model.out, model):
            fully_shard(part, mesh=mesh)
    sender = DistributedWeightSender(model, mask)
    assert (sender.sender is None) == (rank > 0)
    if sender.sender is not None:
        assert content(sender.sender.mask_message().to_bytes()) == content(one.mask_message().to_bytes())
        assert content(sender.sender.state_message().to_bytes()) == content(one.state_message().to_bytes())
    for version, share in enumerate([0.02, 1.0, 0.0], start=1):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole[name].copy_(
                    changed(whole[name], mask.bool(name), share, version) if name in mask else whole[name]
                )
                if sharding == "replicate":
                    parameter.copy_(whole[name])
                else:
                    mesh = parameter.device_mesh
                    shards = whole[name].chunk(mesh.size(mesh.ndim - 1))
                    number = mesh.get_local_rank(mesh.ndim - 1)
                    if number < len(shards):  # chunk makes no empty ones
                        parameter.to_local().copy_(shards[number])
        message, expected = sender.update(), one.update()
        assert sender.version == version
        if rank == 0:
            assert message is not None and content(message.to_bytes()) == content(expected.to_bytes())
        else:
            assert message is None


@ranks(2)
def test_the_messages_of_two_ranks(rank):
    for pattern in ("element", "run16", "tile64"):
        same_messages(rank, pattern, "fsdp")
    same_messages(rank, "element", "hsdp")
    same_messages(rank, "element", "replicate")


@pytest.mark.parametrize("sharding", ["replicate", "fsdp"])
@ranks(2, nccl=False, timeout=60, collective_timeout=5)
def test_a_lost_rank_is_named(rank, sharding):
    """Rank 1 leaves after the first update."""
    model, mask = whole_weights("element")
    if sharding == "fsdp":
        fully_shard(model)
    sender = DistributedWeightSender(model, mask)
    sender.update()
    if rank == 0:
        lost = "rank 1 did not respond within 0.5 s"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "REPORT_SECONDS", 0.5)
            with pytest.raises(WeightSyncError, match=f"^rank 0 cannot send the weights, because a .* failed: {lost}"):
                sender.update()
        assert sender.version == 1
    dist.destroy_process_group()


@ranks(2, timeout=60, collective_timeout=20)
def test_an_error_of_rank_0_is_raised_on_both_ranks(rank):
    """An error on rank 0 alone is raised on both ranks, and the versions stay equal."""
    model, mask = whole_weights("element")
    model.to(device())
    other = MaskSet(mask.indices, {name: (*shape, 2) for name, shape in mask.shapes.items()})
    expected = (MaskError, "") if rank == 0 else (WeightSyncError, "^rank 0: ")
    with pytest.raises(expected[0], match=expected[1]):
        DistributedWeightSender(model, other if rank == 0 else mask)
    with pytest.raises(ValueError, match="^encoding is 'none'"):
        DistributedWeightSender(model, mask, encoding="none")  # type: ignore[arg-type]
    optimizer = SparseAdamW(model, mask, lr=0.1, process_group=False)
    sender = DistributedWeightSender(optimizer)
    holding = optimizer.base_weights() if rank == 0 else contextlib.nullcontext()
    with pytest.raises(WeightSyncError, match="^(rank 0: )?the model holds its base weights"), holding:
        sender.update()
    assert sender.version == 0
    message = sender.update()
    assert sender.version == 1 and (message is None) == (rank > 0)
    assert message is None or message.version == 1


@ranks(3, nccl=False)
def test_the_messages_of_three_ranks_and_their_errors(rank):
    same_messages(rank, "element", "fsdp")
    same_messages(rank, "tile64", "fsdp")
    same_messages(rank, "one element", "fsdp")
    an_optimizer_under_fsdp(rank)
    a_channel_of_all_ranks(rank)


def an_optimizer_under_fsdp(rank: int) -> None:
    """Trained, with sends between the steps; the receiver has the bits of the trained weights."""
    model, mask = whole_weights("element")
    copy = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    receiver = WeightReceiver(copy)
    for part in (model.hidden, model.out, model):
        fully_shard(part)
    optimizer = SparseAdamW(model, mask, lr=0.1)
    sender = DistributedWeightSender(optimizer)
    if sender.sender is not None:
        assert receiver.receive(sender.sender.mask_message()) == 0
    for version in range(1, 4):
        generator = torch.Generator().manual_seed(10 * version + rank)
        rows = torch.randint(130, (4, 3), generator=generator)
        model(rows).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        message = sender.update()  # the root's parameters are unsharded at this point
        if message is not None:
            assert receiver.receive(message.wait()) == version
    without_optimizer = DistributedWeightSender(model, mask)
    for of_base in (sender, without_optimizer):
        with pytest.raises(WeightSyncError, match="base weights"), optimizer.base_weights():
            of_base.update()
    for name, parameter in zip(copy, dict(model.named_parameters()).values(), strict=True):
        full = parameter.full_tensor()
        if rank == 0:
            assert torch.equal(full.view(-1).view(torch.uint8), copy[name].view(-1).view(torch.uint8)), name


def a_channel_of_all_ranks(rank: int) -> None:
    """Its errors are raised on every rank, and a receiver outside of the trainer's group gets the weights."""
    model, mask = whole_weights("element")
    copy = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for part in (model.hidden, model.out, model):
        fully_shard(part)
    channel = ProcessGroupSender(DistributedWeightSender(model, mask), "127.0.0.1:0", timeout=20)
    assert (channel.address == "") == (rank > 0)
    with pytest.raises(WeightSyncError, match="^version 0: 0 receivers" if rank == 0 else "^rank 0: version 0: 0"):
        channel.wait_for_receivers(1, timeout=0.1)
    versions = []

    def receive() -> None:
        receiver = ProcessGroupReceiver(WeightReceiver(copy), channel.address)
        while (version := receiver.receive(60)) is not None:
            versions.append(version)

    thread = threading.Thread(target=receive, daemon=True)
    if rank == 0:
        thread.start()
    channel.wait_for_receivers(1, timeout=60)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().neg_()
    assert channel.update() == 1
    update = channel.weights.update()
    sending = threading.Thread(target=channel.send, args=(update,))
    if rank == 0:
        sending.start()
    dist.all_reduce(torch.zeros(1))  # of training, while rank 0 sends
    if rank == 0:
        sending.join(60)
    assert channel.weights.version == 2
    channel.close()
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    if rank == 0:
        thread.join(60)
        assert versions == [0, 1, 2]
        for name, positions in mask.indices.items():
            at = positions.long()
            assert torch.equal(whole[name].view(-1)[at], copy[name].view(-1)[at]), name
