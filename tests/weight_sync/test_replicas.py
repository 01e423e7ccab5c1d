"""A weight with several destinations that overlap, as a tied head that the engine keeps twice."""

from __future__ import annotations

import torch

from sparse_opt import MaskSet
from sparse_opt.weight_sync import Destination, WeightReceiver, WeightSender


def test_every_copy_of_a_weight_is_written():
    weights = {"head": torch.arange(24.0).view(6, 4)}
    mask = MaskSet({"head": torch.tensor([0, 5, 6, 17, 23])}, {"head": (6, 4)})
    sender = WeightSender(weights, mask)
    first, second, part = weights["head"].clone(), weights["head"].clone(), weights["head"][3:, 1:].clone()
    receiver = WeightReceiver(
        None,
        destinations={
            "head": [Destination(first), Destination(second), Destination(part, rows=(3, 6), columns=(1, 4))]
        },
    )
    assert receiver.receive(sender.mask_message()) == 0
    weights["head"].view(-1)[mask["head"].long()] += 0.5
    assert receiver.receive(sender.update().wait()) == 1
    assert first.equal(weights["head"]) and second.equal(weights["head"]) and part.equal(weights["head"][3:, 1:])


def test_destinations_may_depend_on_the_layout_of_the_mask():
    weights = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(8.0)}
    sender = WeightSender(weights, MaskSet.random(weights, density=0.5, seed=0))
    memory = torch.cat([weights["a"].flatten(), weights["b"]])

    def find(layout):
        places, start = {}, 0
        for entry in layout.tensors:
            rows, columns = entry.matrix
            places[entry.name] = [Destination(memory[start : start + rows * columns].view(rows, columns))]
            start += rows * columns
        return places

    receiver = WeightReceiver(None, destinations=find)
    assert receiver.receive(sender.mask_message()) == 0
    for name, weight in weights.items():
        weight.view(-1)[sender.mask[name].long()] += 1
    assert receiver.receive(sender.update().wait()) == 1
    assert memory.equal(torch.cat([weights["a"].flatten(), weights["b"]]))
