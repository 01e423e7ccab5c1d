"""Updates whose tensors are on their way before their message, and are written before it (gloo)."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import DEFAULT, patch

import pytest
from followers import PATIENCE, Follower, sending, weights_and_mask
from samples import bits, change, clones, same_bits
from torch import Tensor

from sparse_opt import MaskSet
from sparse_opt.errors import DamagedMessage, WeightSyncError
from sparse_opt.weight_sync import Message, PendingMessage, WeightReceiver, WeightSender, arriving
from sparse_opt.weight_sync.arriving import Marked, Written
from sparse_opt.weight_sync.transports import ProcessGroupReceiver, ProcessGroupSender, process_group


class Events(list[str]):
    """What happens to announced tensors: a receiver joins or leaves, the sender begins or withdraws."""

    def note(self, owner: Any, name: str, event: str, when: Callable[[bool, Any], bool] = lambda joined, result: True):
        """Note an event with each call of a method, if `when` says so: after the result, and joined before it."""
        method = getattr(owner, name)

        def call(channel: Any, *arguments: Any) -> Any:
            joined = getattr(channel, "_accepted", None) is not None
            result = method(channel, *arguments)
            if when(joined, result):
                self.append(event)
            return result

        return patch.object(owner, name, call)


@pytest.fixture
def announced() -> Iterator[Events]:
    events = Events()
    with (
        events.note(ProcessGroupReceiver, "_accept", "join", lambda joined, result: result),
        events.note(ProcessGroupReceiver, "_leave", "leave", lambda joined, result: joined),
        events.note(ProcessGroupSender, "_begin", "begin"),
        events.note(ProcessGroupSender, "_withdraw", "withdraw"),
    ):
        yield events


class Followed(NamedTuple):
    """A sender of all values, whose version 1 all receivers have, and whose weights have changed since."""

    weights: dict[str, Tensor]
    mask: MaskSet
    channel: ProcessGroupSender
    followers: list[Follower]

    def are_equal(self) -> bool:
        return all(same_bits(self.weights, follower.weights) for follower in self.followers)


@contextmanager
def followed(n_receivers: int, encoding: Any = "values", *, errors: Sequence[str] = ()) -> Iterator[Followed]:
    """Several receivers, all of which meet these errors."""
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding=encoding), timeout=5.0) as channel:
        followers = [Follower(channel.address, clones(weights), str(i)) for i in range(n_receivers)]
        channel.wait_for_receivers(n_receivers, PATIENCE)
        change(weights, mask, 0.1, seed=0)
        channel.update()
        change(weights, mask, 0.1, seed=1)
        yield Followed(weights, mask, channel, followers)
    assert all(follower.ended() and follower.errors == [*errors] for follower in followers)


def test_all_join_if_none_has_missed_anything(announced: Events) -> None:
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


def test_bitmaps_are_announced_if_the_last_updates_had_some(announced: Events) -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask)) as channel:
        follower = Follower(channel.address, clones(weights), "follower")
        channel.wait_for_receivers(1, PATIENCE)
        # As many as before, more than are expected, all of them, which are sent without a bitmap, and none.
        for version, share in enumerate((0.2, 0.2, 0.5, 0.0, 0.2, 0.2, 1.0, 0.2, 0.2), start=1):
            change(weights, mask, share, seed=version)
            announced.clear()
            assert channel.update() == version
            assert announced == (["join"] if version in (2, 3, 4, 6, 7, 9) else [])
            assert same_bits(weights, follower.weights)
        assert channel._made == 1, "the group was made again"
    assert follower.ended()
    assert not follower.errors


def test_the_others_leave_if_one_needs_a_state(announced: Events) -> None:
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


def test_a_receiver_that_dies_after_it_has_joined_is_named(announced: Events) -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values"), timeout=1.5) as channel:
        good = Follower(channel.address, clones(weights), "good")
        ended = threading.Event()

        def follow() -> None:
            """Take versions 0 and 1, accept the transfer of 2, and stop."""
            dying = ProcessGroupReceiver(
                WeightReceiver(clones(weights)), channel.address, timeout=PATIENCE, name="dying"
            )
            assert [dying.receive(PATIENCE), dying.receive(PATIENCE)] == [0, 1]
            with patch.object(dying, "_join", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                dying.receive(PATIENCE)
            ended.set()

        threading.Thread(target=follow, daemon=True).start()
        channel.wait_for_receivers(2, PATIENCE)
        assert channel.update() == 1
        change(weights, mask, 0.1, seed=1)
        announced.clear()
        with pytest.raises(WeightSyncError, match="^version 2: dying has not replied within 1.5 s$"):
            channel.update()
        assert sorted(announced) == ["begin", "join", "join", "leave"]
        assert same_bits(weights, good.weights)
        assert ended.wait(PATIENCE)
        change(weights, mask, 0.1, seed=2)
        assert channel.update() == 3
        assert same_bits(weights, good.weights)
    assert good.ended()
    assert good.versions == [0, 1, 2, 3]
    assert not good.errors


@pytest.mark.parametrize("what", ["the broadcast", "memory"])
def test_a_transfer_that_cannot_begin_here_is_repeated(announced: Events, what: str) -> None:
    """The broadcast of the receiver fails at once, or there is no memory for its tensors."""
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values"), timeout=3.0) as channel:
        follower = Follower(channel.address, clones(weights), "follower")
        channel.wait_for_receivers(1, PATIENCE)
        channel.update()
        change(weights, mask, 0.1, seed=1)
        announced.clear()
        if what == "memory":
            results = [RuntimeError("out of memory"), DEFAULT]
            with patch.object(process_group, "tensors_of", wraps=process_group.tensors_of, side_effect=results):
                assert channel.update() == 2
            assert announced == []
        else:
            with patch.object(follower.channel._group, "begin", side_effect=RuntimeError("no connection")):
                assert channel.update() == 2
            assert announced == ["join", "begin"]
        assert same_bits(weights, follower.weights)
        announced.clear()
        assert channel.update() == 3
        assert announced == ["join", "begin"]
    assert follower.ended()
    assert not follower.errors


@pytest.mark.parametrize("n_receivers", [1, 2])
def test_an_update_whose_transfer_cannot_begin_at_the_sender_is_sent_as_others(
    announced: Events, n_receivers: int
) -> None:
    begin, failed = process_group._Group.begin, list[bool]()

    def fail_once(group: Any, tensors: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not failed:
            failed.append(True)
            raise RuntimeError("no connection")
        return begin(group, tensors)

    with followed(n_receivers) as found:
        announced.clear()
        began = time.monotonic()
        with patch.object(process_group._Group, "begin", fail_once):
            assert found.channel.update() == 2
        assert time.monotonic() - began < 4.0, "a receiver has waited for its timeout"
        assert announced == ["join"] * n_receivers + ["begin", "withdraw"] + ["leave"] * n_receivers
        assert found.are_equal()


def test_an_error_of_another_type_while_a_receiver_joins_is_a_refusal() -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values"), timeout=1.5) as channel:
        follower = Follower(channel.address, clones(weights), "follower")
        channel.wait_for_receivers(1, PATIENCE)
        channel.update()
        change(weights, mask, 0.1, seed=1)
        with (
            patch.object(process_group._Group, "begin", autospec=True, side_effect=WeightSyncError("no stream")),
            patch.object(channel, "_begin", return_value=True),
            patch.object(channel, "_transfer", return_value=None),
            pytest.raises(WeightSyncError, match="^version 2: follower refused it: no stream$"),
        ):
            channel.update()
        assert channel.update() == 3
        assert same_bits(weights, follower.weights)
    assert follower.ended()
    assert follower.errors == ["no stream"]


INTERRUPTED = {
    "collect": (ProcessGroupSender, "_collect"),
    "begin": (ProcessGroupSender, "_begin"),
    "wait": (PendingMessage, "wait"),
    "asked": (WeightSender, "update"),
    "posted": (ProcessGroupSender, "_transfer"),
}


@pytest.mark.parametrize("where", INTERRUPTED)
@pytest.mark.parametrize("n_receivers", [1, 2])
def test_the_next_update_is_right_after_a_round_that_was_interrupted(
    announced: Events, where: str, n_receivers: int
) -> None:
    with followed(n_receivers) as found:
        announced.clear()
        with patch.object(*INTERRUPTED[where], side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            found.channel.update()
        change(found.weights, found.mask, 0.1, seed=2)
        began = time.monotonic()
        announced.clear()
        last = found.channel.update()
        assert found.channel.update() == last + 1
        assert time.monotonic() - began < 4.0, "a receiver has waited for its timeout"
        assert "join" in announced
        assert found.are_equal()
        assert len(found.channel.receivers) == n_receivers


@contextmanager
def beginning_early(found: Followed) -> Iterator[list[Any]]:
    """Receivers that begin announced updates as with NCCL, whose broadcasts the host does not wait for; gloo's does."""
    begin, begun = WeightReceiver.begin, list[Any]()

    def noted(receiver: WeightReceiver, *arguments: Any) -> Any:
        begun.append(begin(receiver, *arguments))
        return begun[-1]

    with patch.object(ProcessGroupReceiver, "transport", "gloo"), patch.object(WeightReceiver, "begin", noted):
        for follower in found.followers:
            follower.channel._backend = "nccl"
        yield begun
        for follower in found.followers:
            follower.channel._backend = "gloo"


@pytest.mark.parametrize("encoding", ["values", "auto"])
def test_receivers_begin_before_the_message(announced: Events, encoding: Any) -> None:
    with followed(2, encoding) as found, beginning_early(found) as begun:
        # With "auto" the last ones are more than are expected, and then all, which are sent without the bitmap.
        for version, share in enumerate((0.1, 0.1, 0.5, 1.0), start=2):
            change(found.weights, found.mask, share, seed=version)
            assert found.channel.update() == version
            assert found.are_equal()
        assert [type(b) for b in begun] == 8 * [Written if encoding == "values" else Marked]
        assert found.channel._made == 1
        assert announced.count("join") == 8 + 2 * (encoding == "values")
        assert announced.count("begin") == 5 * (encoding == "values")


def test_what_was_written_before_the_message_is_undone_if_it_does_not_come() -> None:
    with followed(2) as found:
        before = [clones(follower.weights) for follower in found.followers]
        with beginning_early(found) as begun:
            written = threading.Barrier(3)
            join = ProcessGroupReceiver._join

            def joined(channel: Any) -> None:
                join(channel)
                written.wait(PATIENCE)  # the weights are the new ones
                written.wait(PATIENCE)  # and this was seen

            def interrupt(*arguments: Any, **options: Any) -> None:
                written.wait(PATIENCE)
                assert found.are_equal()
                written.wait(PATIENCE)
                raise KeyboardInterrupt

            with (
                patch.object(ProcessGroupReceiver, "_join", joined),
                patch.object(PendingMessage, "wait", interrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                found.channel.update()
            deadline = time.monotonic() + PATIENCE
            while not all(map(same_bits, before, [f.weights for f in found.followers])):  # they learn of it
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert len(begun) == 2
        change(found.weights, found.mask, 0.1, seed=2)
        found.channel.update()
        assert found.are_equal()


@contextmanager
def damaged_message(found: Followed) -> Iterator[None]:
    """Update receivers that begin early, by a message whose header they refuse."""
    refusal = "^version 2: 0 refused it: no header$"
    with (
        beginning_early(found) as begun,
        patch.object(Message, "from_fields", side_effect=DamagedMessage("no header")),
        pytest.raises(WeightSyncError, match=refusal),
    ):
        yield
    assert [type(b) for b in begun] == [Written]


def test_what_was_written_before_the_message_is_undone_if_that_is_damaged() -> None:
    with followed(1, errors=["no header"]) as found:
        before = clones(found.followers[0].weights)
        with damaged_message(found):
            found.channel.update()
        assert same_bits(before, found.followers[0].weights)
        assert found.channel.update() == 3
        assert found.are_equal()


def test_a_receiver_that_differs_and_leaves_does_not_keep_others_from_joining(announced: Events) -> None:
    with followed(1) as found:
        left = Follower(found.channel.address, clones(found.weights), "left")
        found.channel.update(2)
        bits(left.weights["b"])[found.mask.indices["b"][0].long()] ^= 1
        with pytest.raises(WeightSyncError, match="left: its active weights have digest"):
            found.channel.verify()
        left.channel._control.leave()
        assert found.channel.receivers == ("0",)
        with pytest.raises(WeightSyncError, match="1 receivers have joined .*, expected 2$"):
            found.channel.update(2)
        announced.clear()
        found.channel.update()
        assert "join" in announced
        assert found.are_equal()


def test_a_receiver_that_cannot_join_costs_no_new_group_in_each_round(announced: Events) -> None:
    with followed(2) as found:
        with patch.object(found.followers[1].channel, "_accept", return_value=False):
            for seed in (2, 3, 4):
                change(found.weights, found.mask, 0.1, seed=seed)
                found.channel.update()
                assert found.are_equal()
        assert found.channel._made == 2
        assert announced.count("withdraw") == 1


@pytest.mark.parametrize("encoding", ["values", "auto"])
def test_updates_that_the_device_has_no_memory_to_begin_are_received_as_others(encoding: Any) -> None:
    with followed(2, encoding) as found, beginning_early(found):
        began = time.monotonic()
        with (
            patch.object(WeightReceiver, "begin", side_effect=RuntimeError("out of memory")),
            pytest.warns(UserWarning, match="received as any other: out of memory"),
        ):
            found.channel.update()
        assert found.are_equal()
        if encoding == "values":  # within the writes
            change(found.weights, found.mask, 0.1, seed=2)
            with (
                patch.object(arriving, "HostCopy", side_effect=RuntimeError("out of memory")),
                pytest.warns(UserWarning, match="received as any other: out of memory"),
            ):
                found.channel.update()
            assert found.are_equal()
        assert time.monotonic() - began < 4.0, "somebody has waited for a timeout"
        assert found.channel._made == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the error ends the follower
def test_the_sender_gets_a_reply_also_if_the_old_values_cannot_be_restored_at_once() -> None:
    undo, calls = Written.undo, list[Written]()

    def fail_once(written: Written) -> None:
        calls.append(written)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        undo(written)

    with followed(1) as found:
        follower = found.followers[0]
        before = clones(follower.weights)
        with patch.object(Written, "undo", fail_once):
            with damaged_message(found):
                found.channel.update()
            assert follower.ended()
        assert follower.channel._needs_state
        assert same_bits(before, follower.weights)


def test_a_wait_for_an_update_that_is_interrupted_can_be_repeated() -> None:
    with followed(1) as found:
        goes_on = threading.Event()
        send = found.channel.send

        def wait_and_send(*arguments: Any, **options: Any) -> None:
            goes_on.wait(PATIENCE)
            send(*arguments, **options)

        with patch.object(found.channel, "send", wait_and_send):
            found.channel.begin_update()
            with (
                patch.object(found.channel, "_on_all_ranks", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                found.channel.finish_update()
            with pytest.raises(WeightSyncError, match="an update has begun"):
                found.channel.update()
            goes_on.set()
            assert found.channel.finish_update() == 2
        assert found.are_equal()


def test_a_question_of_an_interrupted_round_is_not_taken_for_another(announced: Events) -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values"), timeout=5.0) as channel:
        first = Follower(channel.address, clones(weights), "first")
        channel.wait_for_receivers(1, PATIENCE)
        channel.update()
        change(weights, mask, 0.1, seed=1)
        # The round ends between the question and the sending, as by Ctrl-C.
        with patch.object(channel, "send", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            channel.update()
        second = Follower(channel.address, clones(weights), "second")
        channel.wait_for_receivers(2, PATIENCE)
        assert same_bits(weights, first.weights)
        assert same_bits(weights, second.weights)
        assert "withdraw" in announced
        assert channel.update() == 3
    assert first.ended()
    assert second.ended()


def test_receivers_whose_weights_differ_get_a_state_and_no_announcement(announced: Events) -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values")) as channel:
        follower = Follower(channel.address, clones(weights), "follower")
        channel.wait_for_receivers(1, PATIENCE)
        channel.update()
        bits(follower.weights["b"])[mask.indices["b"][0].long()] ^= 1
        with pytest.raises(WeightSyncError, match="changed by others"):
            channel.verify()
        announced.clear()
        assert channel.update() == 2
        assert announced == []
        assert same_bits(weights, follower.weights)
        assert channel.update() == 3
        assert announced == ["join", "begin"]
    assert follower.ended()


def test_updates_that_are_awaited_before_they_are_sent() -> None:
    """By two channels of one sender, and as bytes."""
    weights, mask = weights_and_mask()
    sender = WeightSender(weights, mask, encoding="values")
    with sending(sender, timeout=5.0) as first, sending(sender, timeout=5.0) as second:
        followers = [Follower(channel.address, clones(weights), "follower") for channel in (first, second)]
        for channel in (first, second):
            channel.wait_for_receivers(1, PATIENCE)
        began = time.monotonic()
        for version in (1, 2):
            change(weights, mask, 0.1, seed=version)
            update = sender.update()
            update.to_bytes()
            first.send(update)
            second.send(update)
            assert all(same_bits(weights, follower.weights) for follower in followers)
        assert time.monotonic() - began < 4.0, "a receiver has waited for its timeout"
    assert all(follower.ended() and follower.versions == [0, 1, 2] for follower in followers)


def test_a_receiver_that_does_not_know_announcements_gets_no_second_one(announced: Events) -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values")) as channel:
        follower = Follower(channel.address, clones(weights), "follower")
        channel.wait_for_receivers(1, PATIENCE)

        def answer(announcement: Any) -> None:
            asked.append(announcement is not None)
            follower.channel._control.reply(follower.channel._status())

        asked = list[bool]()
        with patch.object(follower.channel, "_answer", answer):
            for version in (1, 2, 3):
                change(weights, mask, 0.1, seed=version)
                assert channel.update() == version
                assert same_bits(weights, follower.weights)
        assert asked == [True, False, False]
        assert announced == []
        assert channel._made == 1
    assert follower.ended()


def test_damaged_values_are_refused_and_followed_by_a_state() -> None:
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask, encoding="values")) as channel:
        follower = Follower(channel.address, clones(weights), "follower")
        channel.wait_for_receivers(1, PATIENCE)
        channel.update()
        before = clones(follower.weights)
        fetch = follower.channel._fetch

        def damaged(command: dict[str, Any], entries: Any) -> Any:
            assert command["announced"] is True
            tensors, begun = fetch(command, entries)
            bits(next(iter(tensors.values())))[0] ^= 1
            return tensors, begun

        change(weights, mask, 0.1, seed=1)
        with (
            patch.object(follower.channel, "_fetch", damaged),
            pytest.raises(WeightSyncError, match="^version 2: follower refused it: the values sent have digest"),
        ):
            channel.update()
        assert same_bits(before, follower.weights)
        assert channel.update() == 3
        assert same_bits(weights, follower.weights)
    assert follower.ended()
    assert follower.versions == [0, 1, 3]
    assert len(follower.errors) == 1


def test_a_sender_is_freed_with_its_last_reference() -> None:
    weights, mask = weights_and_mask()
    sender = WeightSender(weights, mask, encoding="values")
    sender.update()
    last = weakref.ref(sender)
    gc.disable()
    try:
        del sender
        assert last() is None
    finally:
        gc.enable()
