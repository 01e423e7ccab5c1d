"""Updates with all values, whose tensors are on their way before their digests are known (gloo)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from followers import PATIENCE, Follower, sending, weights_and_mask
from samples import bits, change, clones, same_bits

from sparse_opt.errors import DamagedMessage, WeightSyncError
from sparse_opt.weight_sync import WeightReceiver, WeightSender
from sparse_opt.weight_sync.transports import ProcessGroupReceiver


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to announced tensors: a receiver joins or leaves, the sender begins or withdraws."""
    from sparse_opt.weight_sync.transports.process_group import ProcessGroupSender

    events = list[str]()

    def noted(cls: type, name: str, note: str) -> None:
        method = getattr(cls, name)

        def call(self: Any, *arguments: Any) -> Any:
            # Receivers are told to leave before every other command.
            had = getattr(self, "_joined", None) is not None
            result = method(self, *arguments)
            if result is not False and (name != "_leave" or had):
                events.append(note)
            return result

        monkeypatch.setattr(cls, name, call)

    noted(ProcessGroupReceiver, "_join", "join")
    noted(ProcessGroupReceiver, "_leave", "leave")
    noted(ProcessGroupSender, "_begin", "begin")
    noted(ProcessGroupSender, "_withdraw", "withdraw")
    return events


def test_all_join_if_none_has_missed_anything(announced: list[str]) -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values")) as channel:
        followers = [Follower(channel.address, clones(weights), name) for name in ("first", "second")]
        channel.wait_for_receivers(2, PATIENCE)
        for version in range(1, 5):
            change(weights, mask, 0.1, seed=version)
            assert channel.update() == version
            assert all(same_bits(weights, follower.weights) for follower in followers)
        channel.begin_update()
        assert channel.finish_update() == 5
    assert all(follower.ended() and follower.versions == [*range(6)] for follower in followers)
    assert announced == ["join", "join", "begin"] * 5


def test_values_that_may_be_sent_as_a_bitmap_are_not_announced(announced: list[str]) -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask)) as channel:
        follower = Follower(channel.address, clones(weights), "follower")
        channel.wait_for_receivers(1, PATIENCE)
        for version in (1, 2):
            assert channel.update() == version
    assert follower.ended() and announced == []


def test_the_others_leave_if_one_needs_a_state(announced: list[str]) -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values")) as channel:
        followers = [Follower(channel.address, clones(weights), name) for name in ("first", "second")]
        channel.wait_for_receivers(2, PATIENCE)
        channel.update()
        channel.update()
        bits(followers[0].weights["b"])[mask.indices["b"][0].long()] ^= 1  # loaded again, for example
        followers[0].channel.request_state()
        change(weights, mask, 0.1, seed=1)
        announced.clear()
        assert channel.update() == 3
        assert all(same_bits(weights, follower.weights) for follower in followers)
        assert announced == ["join", "withdraw", "leave"]
        announced.clear()
        channel.update()  # makes a group of both again
        channel.update()
        assert announced == ["join", "join", "begin"]
    assert all(follower.ended() and not follower.errors for follower in followers)


def test_a_receiver_that_dies_after_it_has_joined_is_named() -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values"), timeout=1.5) as channel:
        good = Follower(channel.address, clones(weights), "good")
        ended = threading.Event()

        def follow() -> None:
            """Take versions 0 and 1, join the transfer of 2, and stop."""
            copy = WeightReceiver(clones(weights))
            dying = ProcessGroupReceiver(copy, channel.address, timeout=PATIENCE, name="dying")
            assert [dying.receive(PATIENCE), dying.receive(PATIENCE)] == [0, 1]
            dying._join = lambda announced: True  # type: ignore[method-assign]
            dying._fetch = fail  # type: ignore[method-assign]
            with pytest.raises(WeightSyncError, match="^dies$"):
                dying.receive(PATIENCE)
            ended.set()

        def fail(command: dict[str, Any]) -> Any:
            time.sleep(4.0)  # longer than the channel waits for the transfer and the reply
            raise WeightSyncError("dies")

        threading.Thread(target=follow, daemon=True).start()
        channel.wait_for_receivers(2, PATIENCE)
        assert channel.update() == 1
        change(weights, mask, 0.1, seed=1)
        with pytest.raises(WeightSyncError, match="^version 2: dying has not replied within 1.5 s$"):
            channel.update()
        assert same_bits(weights, good.weights)
        change(weights, mask, 0.1, seed=2)
        assert channel.update() == 3 and same_bits(weights, good.weights)
        assert ended.wait(PATIENCE)
    assert good.ended() and good.versions == [0, 1, 2, 3] and not good.errors


def test_damaged_values_are_refused_and_followed_by_a_state() -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values")) as channel:
        follower = Follower(channel.address, clones(weights), "follower")
        channel.wait_for_receivers(1, PATIENCE)
        channel.update()
        before = clones(follower.weights)
        fetch = follower.channel._fetch

        def damaged(command: dict[str, Any]) -> Any:
            assert command["announced"]
            tensors = fetch(command)
            bits(next(iter(tensors.values())))[0] ^= 1
            follower.channel._fetch = fetch  # type: ignore[method-assign]
            return tensors

        follower.channel._fetch = damaged  # type: ignore[method-assign]
        change(weights, mask, 0.1, seed=1)
        with pytest.raises(WeightSyncError, match="^version 2: follower refused it: the values sent have digest"):
            channel.update()
        assert same_bits(before, follower.weights)
        assert channel.update() == 3 and same_bits(weights, follower.weights)
    assert follower.ended() and follower.versions == [0, 1, 3] and len(follower.errors) == 1


def test_digests_that_have_begun_are_those_of_the_same_tensors_only() -> None:
    weights, mask = weights_and_mask()
    sender, receiver = WeightSender(weights, mask, encoding="values"), WeightReceiver(clones(weights))
    receiver.receive(sender.mask_message())
    change(weights, mask, 0.1, seed=1)
    update = sender.update()
    tensors = update.values()
    assert [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()] == (
        sender.announced_tensors
    )
    others = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    receiver.begin_digests(others)  # of a message that does not come
    assert receiver.receive(update) == 1
    change(weights, mask, 0.1, seed=2)
    update = sender.update()
    receiver.begin_digests(update.values())
    # The digests are of the values when they were begun.
    message = update.wait()
    saved = {name: tensor.clone() for name, tensor in message.tensors.items()}
    for tensor in message.tensors.values():
        tensor.zero_()
    assert receiver.receive(message) == 2
    for name, tensor in message.tensors.items():
        tensor.copy_(saved[name])
    with pytest.raises(WeightSyncError, match="changed by others"):
        receiver.verify()  # zeros were written
    assert receiver.receive(sender.state_message()) == 2
    receiver.verify()


@pytest.mark.parametrize("error", [None, RuntimeError("no connection")])
def test_arrival_is_awaited_before_the_host_relies_on_the_values(error: Exception | None) -> None:
    from dataclasses import replace

    weights, mask = weights_and_mask()
    copy = clones(weights)
    sender, receiver = WeightSender(weights, mask, encoding="values"), WeightReceiver(copy)
    receiver.receive(sender.mask_message())
    change(weights, mask, 0.1, seed=1)
    message = sender.update().wait()
    damaged = {name: tensor.clone() for name, tensor in message.tensors.items()}
    bits(next(iter(damaged.values())))[0] ^= 1
    calls = []

    def arrival() -> None:
        calls.append(receiver.version)
        if error is not None:
            raise error

    expected = DamagedMessage if error is None else type(error)
    with pytest.raises(expected):
        receiver.receive(replace(message, tensors=damaged, arrival=arrival))
    assert calls == [0] and receiver.version == 0
    assert receiver.receive(message) == 1 and same_bits(weights, copy)
