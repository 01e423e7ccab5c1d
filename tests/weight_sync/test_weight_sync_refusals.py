"""Damaged, reordered and foreign messages leave weights and version as they were, and the next correct one works."""

import copy
import dataclasses

import pytest
import torch
from samples import change, clones, make_weights, same_bits

from sparse_opt import MaskSet
from sparse_opt.errors import DamagedMessage, ForeignMessage, OutOfOrderMessage, WeightSyncError
from sparse_opt.tensors import metadata_digest
from sparse_opt.weight_sync import Message, WeightReceiver, WeightSender


class Pair:
    """A sender and a receiver at version 1, and messages that follow."""

    def __init__(self, backend=None, density=0.05, pattern="element", names=None):
        self.weights = {name: w for name, w in make_weights("mixed").items() if names is None or name in names}
        self.mask = MaskSet.random(self.weights, density=density, pattern=pattern)
        self.copy = clones(self.weights)
        self.sender = WeightSender(self.weights, self.mask, backend=backend)
        self.receiver = WeightReceiver(self.copy, backend=backend)
        self.mask_message = self.sender.mask_message()
        self.receiver.receive(self.mask_message)
        self.receiver.receive(self.next(0.3))

    def next(self, share: float) -> Message:
        change(self.weights, self.mask, share, seed=self.sender.version + 1)
        return self.sender.update().wait()

    def refuses(self, message, error=WeightSyncError, match=None):
        before = clones(self.copy), self.receiver.version, self.receiver.digest, self.receiver.mask_digest
        with pytest.raises(error, match=match):
            self.receiver.receive(message)
        assert same_bits(self.copy, before[0])
        assert (self.receiver.version, self.receiver.digest, self.receiver.mask_digest) == before[1:]

    def works(self, message: Message) -> None:
        assert self.receiver.receive(message) == message.version
        assert same_bits(self.copy, self.weights)


@pytest.mark.parametrize("kind", ["update", "state", "mask"])
def test_every_flipped_byte(kind):
    pair = Pair(density=0.5, names=("none", "scalar", "a"))
    update = pair.next(0.3)
    message = {"update": update, "state": pair.sender.state_message(), "mask": pair.sender.mask_message()}[kind]
    data = bytearray(message.to_bytes())
    for i in range(len(data)):
        data[i] ^= 1 << i % 8
        pair.refuses(data, DamagedMessage)
        data[i] ^= 1 << i % 8
    pair.works(update)


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_flipped_values_on_the_device(place, share):
    """Transports that move tensors do not see the bytes: the digests of the values find the damage."""
    device, backend = place
    if device == "cuda":
        pytest.skip("moves the weights itself")
    pair = Pair(backend)
    message = pair.next(share)
    expected = {"bfloat16.bitmap", "bfloat16.changed"} if share < 1 else {"bfloat16.values", "float32.values"}
    assert expected <= message.tensors.keys()
    for name, tensor in message.tensors.items():
        for i in range(0, tensor.numel(), max(tensor.numel() // 4, 1)):
            damaged = clones(message.tensors)
            damaged[name].view(torch.uint8)[i * tensor.element_size()] ^= 1
            pair.refuses(Message.from_header(message.header(), damaged), DamagedMessage)
    if share < 1:
        damaged = clones(message.tensors)
        damaged["bfloat16.bitmap"][-1] |= 128  # behind the last element
        pair.refuses(Message.from_header(message.header(), damaged), DamagedMessage, "bfloat16.bitmap marks")
    pair.works(message)


def test_updates_out_of_order():
    pair = Pair()
    second, third, fourth = pair.next(0.1), pair.next(0.2), pair.next(0.3)
    pair.refuses(third, OutOfOrderMessage, "version 3 follows version 2, the receiver has version 1")
    assert pair.receiver.receive(second) == 2
    pair.refuses(second, OutOfOrderMessage, "version 2 follows version 1, the receiver has version 2")
    assert pair.receiver.receive(third) == 3
    pair.works(fourth)


def test_two_weights_of_the_trainer_in_one_place():
    pair = Pair(names=("b",))
    weights = {**pair.weights, "tied": pair.weights["b"].clone()}
    sender = WeightSender(weights, MaskSet.random(weights, density=0.1))
    receiver = WeightReceiver({"b": pair.copy["b"], "tied": pair.copy["b"]})
    with pytest.raises(ForeignMessage, match="'b' and 'tied' share their memory here"):
        receiver.receive(sender.mask_message())


def test_weights_without_memory():
    pair = Pair()
    meta = {name: weight.to("meta") for name, weight in pair.copy.items()}
    with pytest.raises(ForeignMessage, match="^'[a-z]' is on the meta device, expected it in memory"):
        WeightReceiver(meta).receive(pair.sender.mask_message())
    with pytest.raises(ValueError, match="^'[a-z]' is on the meta device, expected it in memory"):
        WeightSender(meta, pair.mask)


def test_messages_before_the_mask_and_of_another_mask():
    pair = Pair()
    receiver = WeightReceiver(clones(pair.weights))
    with pytest.raises(OutOfOrderMessage, match="before the first mask"):
        receiver.receive(pair.next(0.1))
    other = MaskSet.random(pair.weights, density=0.05, seed=1)
    foreign = WeightSender(pair.weights, other)
    pair.receiver.receive(pair.sender.state_message())
    pair.refuses(foreign.state_message(), ForeignMessage, f"mask {other.digest}, the receiver has {pair.mask.digest}")
    pair.refuses(foreign.update().wait(), ForeignMessage)
    pair.works(pair.next(0.1))


def test_weights_that_the_receiver_does_not_have():
    pair = Pair()
    for name, odd, message in [
        ("z", None, "'z', which the receiver does not have"),
        ("z", pair.copy["z"].float(), "'z' is float32, expected"),
        ("z", pair.copy["z"][:, :-1], r"'z' is \[200, 255\] here, \[200, 256\] in the message"),
        ("c", pair.copy["c"].permute(1, 0, 2).contiguous().permute(1, 0, 2), "'c'.*is no view of a matrix"),
    ]:
        weights = {n: w for n, w in {**pair.copy, name: odd}.items() if w is not None}
        receiver = WeightReceiver(weights)
        with pytest.raises(ForeignMessage, match=message):
            receiver.receive(pair.mask_message)
        assert receiver.version is None


@pytest.mark.parametrize("by", ["data", "parameter", "module"])
def test_weights_that_were_replaced(by):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    mask = MaskSet.random(model, density=0.5)
    sender, receiver = WeightSender(clones(dict(model.named_parameters())), mask), WeightReceiver(model)
    receiver.receive(sender.mask_message())
    replacement = model[0].weight.detach().clone()
    if by == "data":
        model[0].weight.data = replacement
    elif by == "parameter":
        model[0].weight = torch.nn.Parameter(replacement)
    else:
        model[0] = copy.deepcopy(model[0])
    with pytest.raises(WeightSyncError, match="'0.weight' was replaced"):
        receiver.receive(sender.state_message())
    receiver.receive(sender.mask_message())
    assert receiver.receive(sender.state_message()) == 0
    assert receiver.receive(sender.update()) == 1  # waits for it


def test_a_sender_with_a_new_mask():
    pair = Pair()
    mask = MaskSet.random(pair.weights, density=0.1, seed=5, pattern="run16")
    sender = WeightSender(pair.weights, mask)
    pair.receiver.receive(pair.sender.state_message())
    assert pair.receiver.receive(sender.mask_message()) == 0
    assert pair.receiver.mask_digest == mask.digest
    change(pair.weights, mask, 0.5, seed=1)
    pair.works(sender.update().wait())


def test_positions_that_are_no_mask():
    """Those that test_independent_receiver.py has not."""
    pair = Pair(pattern="run16", density=0.3)
    i = next(i for i, name in enumerate(sorted(pair.mask.names)) if name == "z")
    good = pair.mask_message.tensors[f"positions.{i}"]
    for odd, message in [(good - 4000, "has numbers outside of 0:3200"), (good.long(), "is torch.int64")]:
        tensors = {**pair.mask_message.tensors, f"positions.{i}": odd}
        pair.refuses(dataclasses.replace(pair.mask_message, tensors=tensors), DamagedMessage, message)
    pair.works(pair.next(0.1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bfloat16.changed": None}, "only one of bfloat16.bitmap and bfloat16.changed"),
        ({"bfloat16.bitmap": lambda t: t[:-8]}, "bfloat16.bitmap is torch.uint8"),
        ({"bfloat16.changed": lambda t: t[:-1]}, "bfloat16.bitmap marks"),
        ({"float64.values": lambda t: torch.zeros(3)}, "'float64.values', which the mask does not have"),
    ],
)
def test_tensors_that_are_no_update(changes, message):
    pair = Pair()
    update = pair.next(0.1)
    tensors = dict(update.tensors)
    for name, function in changes.items():
        tensors[name] = None if function is None else function(tensors.get(name))
    tensors = {name: t for name, t in tensors.items() if t is not None}
    pair.refuses(dataclasses.replace(update, tensors=tensors), DamagedMessage, message)
    pair.works(update)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("version", "9" * 5000, r"the version of a message is '9{32}' \(5000 characters\)"),
        ("tensors", "[" * 100_000, "the list of a message's tensors is malformed"),
    ],
)
def test_extreme_fields_with_a_valid_digest(field, value, match):
    pair = Pair()
    message = pair.next(0.1)
    header = message.header() | {field: value}
    del header["digest"]
    header["digest"] = metadata_digest(header)
    with pytest.raises(DamagedMessage, match=match):
        Message.from_header(header, message.tensors)
    pair.works(message)
