"""Updates that a receiver begins before their message: what is written, confirmed and restored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from followers import weights_and_mask
from samples import change, clones, same_bits
from torch import Tensor

from sparse_opt import MaskSet
from sparse_opt.errors import DamagedMessage, WeightSyncError
from sparse_opt.weight_sync import Destination, Message, WeightReceiver, WeightSender, arriving
from sparse_opt.weight_sync.arriving import Marked, Written

Place = tuple[str, str]  # device and backend, see conftest.py


class Update(NamedTuple):
    """An update whose tensors have arrived before its message."""

    weights: dict[str, Tensor]  # of the sender
    mask: MaskSet
    copy: dict[str, Tensor]  # of the receiver
    before: dict[str, Tensor]
    receiver: WeightReceiver
    tensors: dict[str, Tensor]  # that were announced
    totals: Tensor | None
    capacity: dict[str, int]
    message: Message

    def begin(self) -> Any:
        begun = self.receiver.begin(self.tensors, self.capacity)
        if isinstance(begun, Written):
            begun.undo()
            assert same_bits(self.before, self.copy), "something was written before the totals were there"
            assert self.totals is not None
            begun.write(self.totals)
        return begun


def arrived(encoding: Any, place: Place = ("cpu", "reference"), pattern: str = "element", share: float = 0.3) -> Update:
    device, backend = place
    weights, mask = weights_and_mask(pattern)
    weights = {name: weight.to(device) for name, weight in weights.items()}
    copy = clones(weights)
    sender = WeightSender(weights, mask, encoding=encoding, backend=backend)
    receiver = WeightReceiver(copy, backend=backend)
    assert receiver.begin({}, {}) is None  # there was no mask message
    receiver.receive(sender.mask_message())
    change(weights, mask, 0.2, seed=1)
    assert (sender.announcement() is None) == (encoding != "values")
    receiver.receive(sender.update())
    before = clones(copy)
    change(weights, mask, share, seed=2)
    announcement = sender.announcement()
    update = sender.update()
    assert announcement is not None
    tensors = clones(update.announced(announcement))
    totals = update.totals().clone() if encoding == "values" else None
    shapes = [(n, list(t.shape)) for n, t in tensors.items()]
    shapes += [] if totals is None else [("totals", list(totals.shape))]
    assert shapes == [(name, shape) for name, _, shape in announcement.tensors]
    message = update.wait()
    assert same_bits(update.announced(announcement), tensors)
    all_tensors = {name: tensors.get(name, tensor) for name, tensor in message.tensors.items()}
    message = replace(message, tensors=all_tensors)
    return Update(weights, mask, copy, before, receiver, tensors, totals, announcement.capacity, message)


ENCODINGS = ["values", "bitmap", "auto"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("pattern", ["element", "run16", "tile64"])
@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
def test_an_update_that_was_begun_is_confirmed_by_its_message(
    place: Place, encoding: str, pattern: str, share: float
) -> None:
    found = arrived(encoding, place, pattern, share)
    begun = found.begin()
    if place == ("cuda", "reference"):
        assert begun is None
    elif encoding != "values":
        assert isinstance(begun, Marked)
    else:  # Triton writes the values of these runs by two launches
        assert isinstance(begun, Written) or (pattern == "run16" and place[1] == "triton")
    assert same_bits(found.weights if isinstance(begun, Written) else found.before, found.copy)
    assert found.receiver.version == 1
    assert found.receiver.receive(replace(found.message, begun=begun)) == 2
    assert same_bits(found.weights, found.copy)
    if isinstance(begun, Written):
        begun.undo()
    assert same_bits(found.weights, found.copy)


@pytest.mark.parametrize("pattern", ["element", "tile64"])
def test_values_that_were_written_are_brought_back(place: Place, pattern: str) -> None:
    found = arrived("values", place, pattern)
    new = clones(found.message.tensors)
    begun = found.begin()
    if begun is None:
        assert place == ("cuda", "reference")
        return
    assert same_bits(found.weights, found.copy)
    for _ in range(2):
        begun.undo()
        assert same_bits(found.before, found.copy)
    assert same_bits(found.message.tensors, new)
    assert found.receiver.receive(found.message) == 2
    assert same_bits(found.weights, found.copy)


@pytest.mark.parametrize("interrupted", ["HostCopy", "first", "second"])
def test_an_interrupted_write_is_undone_as_far_as_it_went(interrupted: str) -> None:
    found = arrived("values")
    indices = found.receiver._mask.indices  # type: ignore[union-attr]
    begun = found.receiver.begin(found.tensors, found.capacity)
    assert isinstance(begun, Written)
    at = {
        "HostCopy": (arriving, "HostCopy"),
        "first": (indices[0], "put"),
        "second": (indices[1], "put"),
    }[interrupted]
    with patch.object(*at, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        begun.write(found.totals)
    assert same_bits(found.before, found.copy) == (interrupted != "second")
    with patch.object(indices[2], "put", side_effect=KeyboardInterrupt):  # of `undo`, too
        if interrupted != "HostCopy":
            with pytest.raises(KeyboardInterrupt):
                begun.undo()
    begun.undo()
    assert same_bits(found.before, found.copy)
    assert found.receiver.receive(found.message) == 2
    assert same_bits(found.weights, found.copy)


@pytest.mark.parametrize(
    ("encoding", "what"),
    [("values", "a value"), ("values", "a digest"), ("bitmap", "the bitmap"), ("auto", "the bitmap")],
)
def test_damaged_tensors_are_not_written(place: Place, encoding: str, what: str) -> None:
    found = arrived(encoding, place)
    damaged = found.totals if what == "a digest" else next(iter(found.tensors.values())).view(torch.uint8)
    assert damaged is not None
    damaged[0] ^= 1
    begun = found.begin()
    assert same_bits(found.before, found.copy)
    if begun is None and what == "a digest":
        return  # it is not used
    with pytest.raises(DamagedMessage):
        found.receiver.receive(replace(found.message, begun=begun))
    assert same_bits(found.before, found.copy)
    assert found.receiver.version == 1


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_message_that_does_not_agree_brings_the_weights_back(place: Place, encoding: str) -> None:
    found = arrived(encoding, place)
    for field in ("payload_digest", "result_digest", "base_version", "base_digest", "mask_digest", "tensors"):
        begun = found.begin()
        wrong: Any = 7 if field == "base_version" else "0123456789abcdef"
        if field == "tensors":  # others than those that were begun, and damaged ones
            wrong = clones(found.message.tensors)
            wrong[found.message.entries[-1][0]].view(torch.uint8)[0] ^= 1
        with pytest.raises(WeightSyncError):
            found.receiver.receive(replace(found.message, begun=begun, **{field: wrong}))
        assert same_bits(found.before, found.copy), field
        assert found.receiver.version == 1


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("n_others", [1, 3])
def test_a_message_with_other_tensors_than_those_begun_is_received_as_any_other(encoding: str, n_others: int) -> None:
    found = arrived(encoding)
    tensors = dict(found.message.tensors)
    for name in [*tensors][:n_others]:
        tensors[name] = tensors[name].clone()
    message = replace(found.message, tensors=tensors)
    assert found.receiver.receive(replace(message, begun=found.begin())) == 2
    assert same_bits(found.weights, found.copy)


def test_a_message_of_another_kind_restores_the_weights() -> None:
    found = arrived("values")
    sender = WeightSender(found.before, found.mask)
    found.receiver.receive(replace(sender.mask_message(), begun=found.begin()))
    assert same_bits(found.before, found.copy)


@pytest.mark.parametrize("pattern", ["element", "run16", "tile64"])
def test_warming_up_writes_nothing(place: Place, pattern: str) -> None:
    found = arrived("values", place, pattern)
    mask = found.receiver._mask
    assert mask is not None
    arriving.warm_up(mask, [index.take() for index in mask.indices])
    assert same_bits(found.before, found.copy)
    empty = WeightReceiver(found.copy, backend=place[1])
    empty.receive(WeightSender(found.weights, MaskSet.random(found.weights, density=0.0)).mask_message())
    assert empty._mask is not None
    arriving.warm_up(empty._mask, [index.take() for index in empty._mask.indices])


def test_updates_that_have_to_wait_for_their_messages() -> None:
    found = arrived("values")
    begin = found.receiver.begin
    assert begin({n: t for n, t in found.tensors.items() if n != "float16.values"}, {}) is None
    with pytest.raises(DamagedMessage, match=r"\.values is .*, expected "):
        begin({n: t[:-1] if n.endswith("values") else t for n, t in found.tensors.items()}, {})
    begun = begin(found.tensors, {})
    assert isinstance(begun, Written) and found.totals is not None
    for totals in (found.totals[:1], found.totals.to(torch.int32)):
        with pytest.raises(DamagedMessage, match="^totals is "):
            begun.write(totals)
    changed = arrived("bitmap")
    with pytest.raises(DamagedMessage, match=r"\.bitmap is .*, expected "):
        changed.receiver.begin({n: t[:-1] for n, t in changed.tensors.items()}, {})
    assert same_bits(found.before, found.copy)


@pytest.mark.parametrize("where", ["in two places", "in memory of another weight"])
def test_weights_that_could_not_be_brought_back_wait_for_the_message(where: str) -> None:
    weights, mask = weights_and_mask()
    sender, copy = WeightSender(weights, mask, encoding="values"), clones(weights)
    destinations = {"b": [Destination(copy["b"]), Destination(copy["b"].clone())]}
    if where == "in memory of another weight":
        both = torch.cat([copy["b"].view(-1)[:1], copy["b"].view(-1)])
        destinations = {"b": [Destination(both[1:].view(130, 70))], "none": [Destination(both[:16].view(4, 4))]}
    receiver = WeightReceiver(copy, destinations=destinations)
    receiver.receive(sender.mask_message())
    announcement = sender.announcement()
    assert announcement is not None
    update = sender.update()
    assert receiver.begin(update.announced(announcement), {}) is None
