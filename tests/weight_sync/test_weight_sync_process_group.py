"""The transport by a process group (gloo): several receivers, late, lost, refusing and restarted ones, lost senders."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch
from followers import PATIENCE, Follower, followed_by, sending, started, weights_and_mask, with_other_values
from samples import bits, change, clones, make_weights, same_bits, send_aside

from sparse_opt import MaskSet
from sparse_opt.errors import WeightSyncError
from sparse_opt.weight_sync import Destination, PendingMessage, WeightReceiver, WeightSender
from sparse_opt.weight_sync.transports import (
    CudaIpcReceiver,
    CudaIpcSender,
    FolderReceiver,
    ProcessGroupReceiver,
    ProcessGroupSender,
    open_receiver,
    process_group,
)
from sparse_opt.weight_sync.transports.channel import SenderChannel
from sparse_opt.weight_sync.transports.control import ControlClient


def test_two_receivers_and_a_late_one_have_the_senders_bits():
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask)) as channel:
        first = Follower(channel.address, clones(weights), "first")
        other = Follower(channel.address, with_other_values(weights, mask), "other weights")
        channel.wait_for_receivers(2, PATIENCE)
        assert sorted(channel.receivers) == ["first", "other weights"]
        assert same_bits(weights, first.weights) and same_bits(weights, other.weights)
        for version, share in enumerate([0.01, 1.0, 0.0, 0.2], start=1):
            if version == 3:
                late = Follower(channel.address, with_other_values(weights, mask), "late")
            change(weights, mask, share, seed=version)
            assert channel.update() == version
            assert same_bits(weights, first.weights) and same_bits(weights, other.weights)
            assert version < 3 or same_bits(weights, late.weights)
    assert first.ended() and other.ended() and late.ended()
    assert (first.versions, other.versions, late.versions) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [3, 4])
    assert first.errors == other.errors == late.errors == []


def test_a_receiver_that_missed_versions_gets_a_state():
    with followed_by("follower") as (weights, mask, channel, (follower,)):
        change(weights, mask, 0.1, seed=1)
        channel.weights.update()  # an update that nobody receives
        change(weights, mask, 0.1, seed=2)
        assert channel.update() == 2
        assert same_bits(weights, follower.weights)
    assert follower.ended() and follower.versions == [0, 2] and not follower.errors


def test_a_receiver_that_changes_to_another_sender_gets_its_weights():
    """The second sender, as of a restarted trainer, has the same mask and number of the version, but other weights."""
    weights, mask = weights_and_mask()
    copy = clones(weights)
    receiver = WeightReceiver(copy)
    for seed in (1, 2):
        with sending(WeightSender(weights, mask)) as channel:
            follower = Follower(channel.address, copy, "follower", receiver=receiver)
            change(weights, mask, 0.1, seed=seed)
            assert channel.update() == 1
            channel.wait_for_receivers(1, PATIENCE)
            assert same_bits(weights, copy)
        assert follower.ended() and follower.versions == [1] and not follower.errors


def test_a_refusal_is_raised_on_both_ends_and_followed_by_a_state():
    with followed_by("good", "changed") as (weights, mask, channel, (good, changed)):
        for name, tensor in with_other_values(weights, mask).items():  # by others: the next bitmap does not fit
            changed.weights[name].copy_(tensor)
        before = clones(changed.weights)
        change(weights, mask, 0.05, seed=1)
        with pytest.raises(WeightSyncError, match="^version 1: changed refused it: .*digest"):
            channel.update()
        assert same_bits(weights, good.weights) and same_bits(before, changed.weights)
        change(weights, mask, 0.05, seed=2)
        assert channel.update() == 2
        assert same_bits(weights, good.weights) and same_bits(weights, changed.weights)
    assert good.ended() and changed.ended()
    assert (good.versions, changed.versions) == ([0, 1, 2], [0, 2])
    assert len(changed.errors) == 1 and "digest" in changed.errors[0]


def test_verify_names_the_receivers_whose_weights_were_changed():
    weights, mask = weights_and_mask()
    copies = {name: clones(weights) for name in ("one", "other")}
    with sending(WeightSender(weights, mask)) as channel:
        followers = [Follower(channel.address, copy, name) for name, copy in copies.items()]
        channel.wait_for_receivers(2, PATIENCE)
        change(weights, mask, 0.1, seed=1)
        assert channel.update(verify=True) == 1
        for version, (name, copy) in zip((2, 4), copies.items(), strict=True):
            bits(copy["z"])[mask.indices["z"][-1].long()] ^= 1
            with pytest.raises(WeightSyncError, match=f"^version {version}: {name}: the active weights have") as raised:
                channel.update(verify=True)
            assert not any(n in str(raised.value).split(": ")[1:2] for n in copies if n != name)
            assert channel.update(verify=True) == version + 1  # the receiver gets a state: the element has not changed
        assert all(same_bits(weights, copy) for copy in copies.values())
    assert all(follower.ended() and follower.versions == [*range(6)] for follower in followers)


def test_verify_refuses_receivers_of_parts():
    """They have the version, and the next round sends them an update, not a state."""
    weights, mask = weights_and_mask()
    copies = [clones(weights) for _ in range(2)]
    with sending(WeightSender(weights, mask)) as channel:
        part = WeightReceiver(copies[1], destinations={"z": [Destination(copies[1]["z"][:100], rows=(0, 100))]})
        followers = [
            Follower(channel.address, copies[0], "whole"),
            Follower(channel.address, copies[1], "rank 0", receiver=part),
        ]
        channel.wait_for_receivers(2, PATIENCE)
        change(weights, mask, 0.1, seed=1)
        with pytest.raises(WeightSyncError, match="^version 1: rank 0: the weights cannot be verified: .* only parts"):
            channel.update(verify=True)
        change(weights, mask, 0.1, seed=2)
        with patch.object(WeightSender, "state_message", side_effect=AssertionError("a state")):
            assert channel.update() == 2
        assert same_bits(weights, copies[0])
        assert torch.equal(bits(copies[1]["z"][:100]), bits(weights["z"][:100]))
    assert all(follower.ended() and follower.versions == [0, 1, 2] for follower in followers)


@pytest.mark.parametrize("what", ["the sender's broadcast", "the receiver's broadcast", "the receiver's memory"])
def test_a_transfer_that_fails_is_repeated(what):
    broadcast, failed = process_group.BroadcastGroup.broadcast, list[bool]()

    def fail_once(group: Any, tensors: Any) -> None:
        is_sender = threading.current_thread() is threading.main_thread()
        if is_sender == (what == "the sender's broadcast") and not failed:
            failed.append(True)
            raise RuntimeError("no connection")
        broadcast(group, tensors)

    with followed_by("follower", timeout=3.0) as (weights, mask, channel, (follower,)):
        for version in (1, 2):
            change(weights, mask, 0.1, seed=version)
            if version == 2:
                assert channel.update() == 2
            elif what == "the receiver's memory":
                results = [RuntimeError("out of memory"), DEFAULT]
                with patch.object(process_group, "tensors_of", wraps=process_group.tensors_of, side_effect=results):
                    assert channel.update() == 1
            else:
                with patch.object(process_group.BroadcastGroup, "broadcast", fail_once):
                    assert channel.update() == 1
                assert failed
            assert same_bits(weights, follower.weights)
    assert follower.ended() and not follower.errors


INTERRUPTED = {
    "asked": (WeightSender, "update"),
    "collect": (ProcessGroupSender, "_collect"),
    "wait": (PendingMessage, "wait"),
    "posted": (ProcessGroupSender, "_transfer"),
}


@pytest.mark.parametrize("where", INTERRUPTED)
@pytest.mark.parametrize("n_receivers", [1, 2])
def test_the_next_update_is_right_after_a_round_that_was_interrupted(where, n_receivers):
    names = [str(i) for i in range(n_receivers)]
    with followed_by(*names, timeout=5.0) as (weights, mask, channel, followers):
        change(weights, mask, 0.1, seed=1)
        channel.update()
        change(weights, mask, 0.1, seed=2)
        with patch.object(*INTERRUPTED[where], side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            channel.update()
        change(weights, mask, 0.1, seed=3)
        began = time.monotonic()
        last = channel.update()
        assert channel.update() == last + 1
        assert time.monotonic() - began < 4.0, "a receiver has waited for its timeout"
        assert all(same_bits(weights, follower.weights) for follower in followers)
        assert len(channel.receivers) == n_receivers
    assert all(follower.ended() and not follower.errors for follower in followers)


def test_updates_that_are_awaited_before_they_are_sent():
    """By two channels of one sender, and as bytes."""
    weights, mask = weights_and_mask()
    sender = WeightSender(weights, mask)
    with sending(sender, timeout=5.0) as first, sending(sender, timeout=5.0) as second:
        followers = [Follower(channel.address, clones(weights), "follower") for channel in (first, second)]
        for channel in (first, second):
            channel.wait_for_receivers(1, PATIENCE)
        for version in (1, 2):
            change(weights, mask, 0.1, seed=version)
            update = sender.update()
            update.to_bytes()
            first.send(update)
            second.send(update)
            assert all(same_bits(weights, follower.weights) for follower in followers)
    assert all(follower.ended() and follower.versions == [0, 1, 2] for follower in followers)


def test_a_receiver_by_another_transport_is_named():
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask), timeout=2.0) as channel:
        other = CudaIpcReceiver(WeightReceiver(clones(weights)), channel.address, name="other")
        problem = "it receives by cuda_ipc, the sender sends by gloo"

        def receive() -> None:
            with pytest.raises(WeightSyncError, match=f"^other: {problem}$"):
                other.receive(PATIENCE)
            ended.set()

        ended = threading.Event()
        started(receive)
        with pytest.raises(WeightSyncError, match=f"^version 0: other refused it: {problem}$"):
            channel.wait_for_receivers(1, PATIENCE)
        assert ended.wait(PATIENCE)


def test_a_receiver_lost_during_a_transfer_is_named_and_the_others_get_the_message():
    with followed_by("good", timeout=1.5) as (weights, mask, channel, (good,)):
        change(weights, mask, 0.1, seed=1)

        def reply_once() -> None:
            """Say that the weights are at version 0, and never join the broadcast."""
            client = ControlClient(channel.address, PATIENCE, "half-dead")
            assert client.next(PATIENCE)["do"] == "status"
            client.reply({"mask": mask.digest, "version": 0, "state": False})

        started(reply_once)
        while len(channel.receivers) < 2:
            time.sleep(0.01)
        with pytest.raises(WeightSyncError, match="^version 1: half-dead has not replied within 1.5 s$"):
            channel.update()
        assert same_bits(weights, good.weights)
        change(weights, mask, 0.1, seed=2)
        assert channel.update() == 2
        assert channel.receivers == ("good",) and same_bits(weights, good.weights)
    assert good.ended() and good.versions == [0, 1, 2] and not good.errors


def test_a_receiver_that_closes_has_left_and_may_come_back():
    with followed_by("good") as (weights, mask, channel, (good,)):
        copy = clones(weights)
        for version in (1, 2):
            left = ProcessGroupReceiver(WeightReceiver(copy), channel.address, timeout=PATIENCE, name="left")
            thread = started(left.receive, PATIENCE)
            channel.wait_for_receivers(2, PATIENCE)
            thread.join(PATIENCE)
            assert same_bits(weights, copy)
            left.close()
            assert channel.receivers == ("good",)
            change(weights, mask, 0.1, seed=version)
            assert channel.update() == version and same_bits(weights, good.weights)
    assert good.ended() and not good.errors


def test_close_waits_for_a_receiver_that_is_busy():
    weights, mask = weights_and_mask()
    channel = ProcessGroupSender(WeightSender(weights, mask), "127.0.0.1:0", timeout=0.3)
    busy = ProcessGroupReceiver(WeightReceiver(clones(weights)), channel.address, timeout=PATIENCE)
    versions = list[int | None]()

    def receive() -> None:
        versions.append(busy.receive(PATIENCE))
        time.sleep(1.0)  # longer than the channel's timeout
        versions.append(busy.receive(PATIENCE))

    thread = started(receive)
    channel.wait_for_receivers(1, PATIENCE)
    channel.close(timeout=PATIENCE)
    thread.join(PATIENCE)
    assert versions == [0, None]


def test_a_replaced_weight_gets_the_mask_again():
    with followed_by("moved") as (weights, mask, channel, (moved,)):
        moved.weights["b"] = moved.weights["b"].clone()
        change(weights, mask, 0.1, seed=1)
        with pytest.raises(WeightSyncError, match="^version 1: moved refused it: 'b' was replaced"):
            channel.update()
        assert channel.update() == 2
        assert same_bits(weights, moved.weights)
    assert moved.ended() and moved.versions == [0, 2] and len(moved.errors) == 1


class FailingReceiver(WeightReceiver):
    """Fails at the first update, as an engine that is out of memory."""

    failed = False

    def receive(self, message: Any) -> int | None:
        if message.kind == "update" and not self.failed:
            self.failed = True
            raise MemoryError("no memory\nfor the weights")
        return super().receive(message)


def test_any_error_of_a_receiver_is_reported_at_once():
    weights, mask = weights_and_mask()
    copy = clones(weights)
    with sending(WeightSender(weights, mask)) as channel:
        receiver = ProcessGroupReceiver(FailingReceiver(copy), channel.address, timeout=PATIENCE, name="failing")
        raised = list[BaseException]()

        def follow() -> None:
            version: int | None = 0
            while version is not None:
                try:
                    version = receiver.receive(PATIENCE)
                except MemoryError as error:
                    raised.append(error)

        thread = started(follow)
        channel.wait_for_receivers(1, PATIENCE)
        change(weights, mask, 0.1, seed=1)
        with pytest.raises(WeightSyncError, match="^version 1: failing refused it: MemoryError: no memory$"):
            channel.update()
        assert channel.update() == 2 and same_bits(weights, copy)
    thread.join(PATIENCE)
    assert len(raised) == 1 and not thread.is_alive()


def other_process(role: str, address: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    with open(folder / role, "wb") as output:
        return subprocess.Popen(
            [sys.executable, __file__, role, address, str(folder)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def test_killed_processes_are_named(tmp_path):
    """A receiver, then the sender, in processes that no signal handler tidies up."""
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask), timeout=2.0) as channel:
        process = other_process("receiver", channel.address, tmp_path)
        sender = other_process("sender", "127.0.0.1:0", tmp_path)
        try:
            channel.wait_for_receivers(1, 60)  # it imports torch first
            good = Follower(channel.address, clones(weights), "good")
            channel.wait_for_receivers(2, PATIENCE)
            process.send_signal(signal.SIGKILL)
            process.wait()
            change(weights, mask, 0.1, seed=1)
            with pytest.raises(WeightSyncError, match="^version 1: in another process has not replied within 2 s$"):
                channel.update()
            assert channel.receivers == ("good",) and same_bits(weights, good.weights)
            change(weights, mask, 0.1, seed=2)
            begin = time.monotonic()
            assert channel.update() == 2 and time.monotonic() - begin < 2
            assert same_bits(weights, good.weights)
            address = address_printed(tmp_path / "sender")
            orphan = ProcessGroupReceiver(WeightReceiver(clones(weights)), address, timeout=PATIENCE)
            assert orphan.receive(PATIENCE) == 0
            threading.Timer(0.2, sender.send_signal, [signal.SIGKILL]).start()
            begin = time.monotonic()
            with pytest.raises(WeightSyncError, match=f"^the sender at {address} is lost"):
                orphan.receive(60)
            assert time.monotonic() - begin < 30
        finally:
            for started in (process, sender):
                started.kill()
                started.wait()
    assert good.ended() and good.versions == [0, 1, 2] and not good.errors


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
def test_nccl_between_two_processes(tmp_path):
    weights = make_weights("mixed", "cuda:0")
    mask = MaskSet.random(weights, density=0.3)
    sender = WeightSender(weights, mask)
    channel = ProcessGroupSender(sender, "127.0.0.1:0", backend="nccl", device="cuda:0")
    process = other_process("nccl", channel.address, tmp_path)
    try:
        channel.wait_for_receivers(1, 120)
        for version in range(1, 3):
            change(weights, mask, 0.1, seed=version)
            assert channel.update() == version
        sent = send_aside(channel)
        torch.cuda._sleep(2 * 10**9)  # the next training step, about a second
        busy = torch.cuda.current_stream().record_event()
        sent.join(60)
        assert not busy.query(), "the update has waited for the training stream"
        channel.close()
        assert process.wait(60) == 0, (tmp_path / "nccl").read_text()
    finally:
        process.kill()
        process.wait()
    received = torch.load(tmp_path / "received")
    assert same_bits({name: w.cpu() for name, w in weights.items()}, received)


def address_printed(path: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = [line for line in path.read_text().splitlines() if line.startswith("127.0.0.1:")]
        if lines:
            return lines[0]
        time.sleep(0.05)
    raise AssertionError(path.read_text())


def test_nobody_waits_forever():
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask), timeout=0.5) as channel:
        with pytest.raises(WeightSyncError, match=r"^version 0: 0 receivers have joined at .* within 0.1 s"):
            channel.wait_for_receivers(1, timeout=0.1)
        idle = ProcessGroupReceiver(WeightReceiver(clones(weights)), channel.address, timeout=0.5, name="idle")
        with pytest.raises(WeightSyncError, match="^no message from the sender at 127.0.0.1:.* within 0.1 s"):
            idle.receive(timeout=0.1)
        with pytest.raises(WeightSyncError, match="^version 0: idle has not replied within 0.5 s"):
            channel.wait_for_receivers(1, timeout=1)  # idle does not receive
        address = channel.address
        thread = started(channel.wait_for_receivers, 1, PATIENCE)
        assert idle.receive(PATIENCE) == 0  # it joins again by itself
        thread.join(PATIENCE)
        idle.close()
    with pytest.raises(WeightSyncError, match=f"^no sender of weights responds at {address} within 0.5 s"):
        ProcessGroupReceiver(WeightReceiver(weights), address, timeout=0.5)
    with pytest.raises(ValueError, match="address is 'host', expected host:port"):
        ProcessGroupReceiver(WeightReceiver(weights), "host")


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


if __name__ == "__main__":
    role, address = sys.argv[1:3]
    if role == "nccl":
        copy = make_weights("mixed", "cuda:1")
        follower = ProcessGroupReceiver(WeightReceiver(copy), address, backend="nccl", device="cuda:1")
        while follower.receive() is not None:
            pass
        torch.save({name: w.cpu() for name, w in copy.items()}, Path(sys.argv[3]) / "received")
        sys.exit()
    weights, mask = weights_and_mask()
    if role == "receiver":
        receiver = ProcessGroupReceiver(WeightReceiver(weights), address, name="in another process")
        while receiver.receive() is not None:
            pass
    else:
        channel = ProcessGroupSender(WeightSender(weights, mask), address)
        print(channel.address, flush=True)
        channel.wait_for_receivers(1)
        time.sleep(60)
