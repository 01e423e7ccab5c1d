"""Weights that a receiver keeps in other tensors: fused, sliced, padded, transposed, several times, or not at all."""

import pytest
import torch
from samples import bits, change, clones
from torch import Tensor

from sparse_opt import MaskSet
from sparse_opt.errors import DamagedMessage, ForeignMessage, WeightSyncError
from sparse_opt.weight_sync import Destination, WeightReceiver, WeightSender

SHAPES = {
    "embed": (50, 24),
    "q": (32, 24),
    "k": (16, 24),
    "v": (16, 24),
    "gate": (40, 24),
    "up": (40, 24),
    "down": (24, 40),
    "conv": (4, 5, 24),
    "norm": (24,),
}


def make_weights(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator).to(device, torch.bfloat16) for name, shape in SHAPES.items()}
    return {name: w.half() if name == "down" else w for name, w in made.items()}


class Engine:
    """The tensors of an engine, with canaries (NaN) in memory that belongs to no weight."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        new = {name: w.clone() for name, w in weights.items()}
        nan = {"dtype": torch.bfloat16, "device": new["q"].device}
        self.qkv = torch.cat([new["q"], new["k"], new["v"]])
        self.gate_up = torch.full((80, 30), torch.nan, **nan)  # columns are padded, strides are not those of the weight
        self.gate_up[:40, 2:26], self.gate_up[40:, 2:26] = new["gate"], new["up"]
        self.down = new["down"].t().contiguous()  # stored transposed
        self.embed = torch.full((64, 24), torch.nan, **nan)  # a padded vocabulary
        self.embed[:50] = new["embed"]
        self.head = new["embed"].clone()
        self.conv = torch.empty(120, 4, **nan).t()  # [4, 120], columns first
        self.conv.copy_(new["conv"].view(4, 120))
        self.norm = torch.full((24, 3), torch.nan, **nan)
        self.norm[:, 1] = new["norm"]

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))

    def destinations(self) -> dict[str, list[Destination]]:
        conv = self.conv.view(4, 5, 24)
        return {
            "q": [Destination(self.qkv[:32])],
            "k": [Destination(self.qkv[32:48])],
            "v": [Destination(self.qkv[48:])],
            "gate": [Destination(self.gate_up[:40, 2:26])],
            "up": [
                Destination(self.gate_up[40:, 2:20], columns=(0, 18)),
                Destination(self.gate_up[40:, 20:26], columns=(18, 24)),
            ],
            "down": [Destination(self.down.t())],
            "embed": [
                Destination(self.embed[:50]),
                Destination(self.head[:30], rows=(0, 30)),
                Destination(self.head[30:], (30, 50)),
            ],
            "conv": [Destination(conv[i], rows=(5 * i, 5 * i + 5)) for i in range(4)],
            "norm": [Destination(self.norm[:, 1][None])],
        }


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(bits(t.contiguous()), bits(other[name].contiguous())) for name, t in one.items())


@pytest.mark.parametrize("pattern", ["element", "run16", "tile64"])
def test_an_engine_with_its_own_layout(place, pattern):
    device, backend = place
    weights = make_weights(device)
    # Each weight is a part of one tile of 64 x 64: of fewer than half of the tiles there are none.
    mask = MaskSet.random(weights, density=1.0 if pattern == "tile64" else 0.4, pattern=pattern)
    assert mask.nnz
    sender = WeightSender(weights, mask, backend=backend)
    engine = Engine(weights)
    receiver = WeightReceiver(None, destinations=engine.destinations(), backend=backend)
    assert receiver.receive(sender.mask_message()) == 0
    assert receiver.is_whole
    for version, share in enumerate((0.05, 1.0, 0.3), start=1):
        change(weights, mask, share, seed=version)
        assert receiver.receive(sender.update().wait()) == version
        assert equal(engine.tensors(), Engine(weights).tensors())
        assert receiver.digest == sender.state_message().result_digest


@pytest.mark.parametrize("pattern", ["element", "run16", "tile128"])
def test_tensor_parallel_slices(place, pattern):
    """Two ranks: rows of some weights, columns of others, replicated norms, a weight that only rank 0 has."""
    device, backend = place
    weights = make_weights(device)
    mask = MaskSet.random(weights, density=0.5, pattern=pattern)  # at least one tile of each tensor
    sender = WeightSender(weights, mask, backend=backend)
    ranks = []
    for rank in range(2):
        parts, destinations = {}, {}
        for name, w in weights.items():
            matrix = w.view(-1, w.shape[-1])
            rows, columns = (0, matrix.shape[0]), (0, matrix.shape[1])
            if name in ("down", "conv"):
                columns = (0, columns[1] // 2) if rank == 0 else (columns[1] // 2, columns[1])
            elif name not in ("norm", "v"):
                rows = (0, rows[1] // 2) if rank == 0 else (rows[1] // 2, rows[1])
            if name == "v" and rank == 1:
                destinations[name] = []
                continue
            parts[name] = (matrix[slice(*rows), slice(*columns)], rows, columns)
            copy = parts[name][0].clone()
            destinations[name] = [Destination(copy, rows, columns)]
        ranks.append((WeightReceiver(None, destinations=destinations, backend=backend), parts, destinations))
    for receiver, _, _ in ranks:
        assert receiver.receive(sender.mask_message()) is None
        assert not receiver.is_whole
        assert receiver.receive(sender.state_message()) == 0
        assert receiver.receive(sender.mask_message()) == 0  # it has the version that the message describes
    for version, share in enumerate((0.05, 1.0, 0.3), start=1):
        change(weights, mask, share, seed=version)
        message = sender.update().wait()
        for receiver, parts, destinations in ranks:
            assert receiver.receive(message) == version
            for name, (expected, _, _) in parts.items():
                assert torch.equal(bits(destinations[name][0].tensor), bits(expected.contiguous()))


def test_verify_notices_weights_that_others_have_changed(place):
    """At both ends of each weight; one of them is there in two parts."""
    device, backend = place
    weights = make_weights(device)
    mask = MaskSet.random(weights, density=0.5)
    sender = WeightSender(weights, mask, backend=backend)
    own = clones(weights)
    halves = [Destination(own["q"][:8], rows=(0, 8)), Destination(own["q"][8:], rows=(8, own["q"].shape[0]))]
    receiver = WeightReceiver(own, destinations={"q": halves}, backend=backend)
    with pytest.raises(WeightSyncError, match="cannot be verified: the receiver has no version"):
        receiver.verify()
    receiver.receive(sender.mask_message())
    change(weights, mask, 0.1, seed=1)
    receiver.receive(sender.update().wait())
    receiver.verify()
    for name in weights:
        for position in mask.indices[name].long()[[0, -1]].tolist():
            bits(own[name])[position] ^= 1
            with pytest.raises(WeightSyncError, match=f"expected {receiver.digest} at version 1: they were changed by"):
                receiver.verify()
            bits(own[name])[position] ^= 1
    receiver.verify()


def test_a_receiver_of_parts_cannot_verify_its_weights():
    weights = make_weights("cpu")
    sender = WeightSender(weights, MaskSet.random(weights, density=0.5), backend="reference")
    receiver = WeightReceiver(clones(weights), destinations={"v": []})
    receiver.receive(sender.mask_message())
    assert receiver.receive(sender.state_message()) == 0
    with pytest.raises(WeightSyncError, match="cannot be verified: the receiver has only parts of them"):
        receiver.verify()


def test_a_part_verifies_the_payload():
    weights = {"w": torch.randn(8, 8)}
    mask = MaskSet.random(weights, density=0.5)
    sender = WeightSender(weights, mask)
    part = weights["w"][:4].clone()
    receiver = WeightReceiver(None, destinations={"w": [Destination(part, rows=(0, 4))]})
    receiver.receive(sender.mask_message())
    receiver.receive(sender.state_message())
    change(weights, mask, 0.1, seed=1)
    message, before = sender.update().wait(), part.clone()
    for name, tensor in message.tensors.items():
        for i in range(tensor.numel()):
            damaged = clones(message.tensors)
            damaged[name].view(torch.uint8)[i * tensor.element_size()] ^= 4
            with pytest.raises(DamagedMessage):
                receiver.receive(type(message).from_header(message.header(), damaged))
            assert torch.equal(bits(part), bits(before))
    assert receiver.receive(message) == 1
    assert torch.equal(bits(part), bits(weights["w"][:4]))


def test_destinations_take_precedence_over_weights():
    weights = {"w": torch.randn(8, 8), "x": torch.randn(3)}
    mask = MaskSet.random(weights, density=0.5)
    sender = WeightSender(weights, mask)
    model, own = clones(weights), weights["w"].clone()
    receiver = WeightReceiver(model, destinations={"w": [Destination(own)]})
    receiver.receive(sender.mask_message())
    before = clones(model)
    change(weights, mask, 1.0, seed=1)
    receiver.receive(sender.update().wait())
    assert torch.equal(bits(own), bits(weights["w"])) and torch.equal(bits(model["x"]), bits(weights["x"]))
    assert torch.equal(bits(model["w"]), bits(before["w"]))


BFLOAT16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        (lambda: Destination(torch.zeros(6, 4)), "is float32, expected bfloat16"),
        (lambda: Destination(torch.zeros(6, 5, **BFLOAT16)), r"is \[6, 5\], expected \[6, 4\]"),
        (lambda: Destination(torch.zeros(6, 4, **BFLOAT16), rows=(1, 7)), "rows 1:7 and columns 0:4"),
        (lambda: Destination(torch.zeros(4, **BFLOAT16).expand(6, 4)), "an address for each element"),
        (lambda: Destination(torch.zeros(6, 4, **BFLOAT16, device="meta")), "on meta"),
    ],
)
def test_a_destination_that_does_not_fit_is_refused(destination, message):
    weights = {"a": torch.zeros(2, **BFLOAT16), "w": torch.zeros(6, 4, **BFLOAT16)}
    sender = WeightSender(weights, MaskSet.random(weights, density=1.0))
    receiver = WeightReceiver({"a": weights["a"]}, destinations={"w": [destination()]})
    with pytest.raises(ForeignMessage, match=f"'w'.*{message}"):
        receiver.receive(sender.mask_message())
    assert receiver.version is None and receiver.mask_digest is None
