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
