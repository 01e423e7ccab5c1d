"""Receivers have the sender's bits after every update: patterns, dtypes, encodings, edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.weight_sync import WeightReceiver, WeightSender

SHAPES = {"b": (130, 70), "a": (65,), "c": (3, 40, 50), "none": (4, 4), "scalar": (), "z": (200, 256)}
DTYPES = {
    "bf16": dict.fromkeys(SHAPES, torch.bfloat16),
    "fp16": dict.fromkeys(SHAPES, torch.float16),
    "fp32": dict.fromkeys(SHAPES, torch.float32),
    "mixed": dict(zip(SHAPES, [torch.bfloat16, torch.float32, torch.float16] * 2, strict=True)),
}


def make_weights(dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtypes[name]) for name, shape in SHAPES.items()}


def change(weights: dict[str, Tensor], mask: MaskSet, share: float, seed: int) -> None:
    """Flip the lowest bit of a share of the active elements; the values may be any, NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    for name, positions in mask.indices.items():
        flat = weights[name].view(-1).view(torch.int16 if weights[name].element_size() == 2 else torch.int32)
        chosen = positions[torch.rand(positions.shape, generator=generator) < share].long()
        flat[chosen] ^= 1


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(t.view(-1).view(torch.uint8), other[n].view(-1).view(torch.uint8)) for n, t in one.items())


@pytest.mark.parametrize("encoding", ["auto", "values", "bitmap"])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_updates_equal_a_full_copy(pattern: str, dtypes: str, encoding: str) -> None:
    weights = make_weights(DTYPES[dtypes])
    mask = MaskSet.random(weights, density=0.3, pattern=pattern)
    copy = {name: w.clone() for name, w in weights.items()}
    sender, receiver = WeightSender(weights, mask, encoding=encoding), WeightReceiver(copy)
    assert receiver.receive(sender.mask_message().to_bytes()) == 0
    for version, share in enumerate([0.01, 0.9, 0.0, 0.3, 1.0], start=1):
        change(weights, mask, share, seed=version)
        assert receiver.receive(sender.update().to_bytes()) == version
        assert same_bits(weights, copy)


def test_an_optimizer_is_a_source() -> None:
    model = torch.nn.Linear(20, 30, dtype=torch.float32)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.2), lr=0.1)
    copy = {name: p.detach().clone() for name, p in model.named_parameters()}
    sender, receiver = WeightSender(optimizer), WeightReceiver(copy)
    receiver.receive(sender.mask_message())
    for _ in range(3):
        model(torch.randn(5, 20)).square().sum().backward()
        optimizer.step()
        receiver.receive(sender.update().wait())
        assert same_bits(dict(model.named_parameters()), copy)
