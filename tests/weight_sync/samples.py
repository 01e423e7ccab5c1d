"""Weights of several shapes and dtypes, and changes of their active elements."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_opt import MaskSet

# Cut-off runs and tiles at both edges, a tensor of three dimensions, a vector, a scalar, and whole runs and tiles.
SHAPES = {"b": (130, 70), "a": (65,), "c": (3, 40, 50), "none": (4, 4), "scalar": (), "z": (200, 256)}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = {
    "bf16": dict.fromkeys(SHAPES, torch.bfloat16),
    "fp16": dict.fromkeys(SHAPES, torch.float16),
    "fp32": dict.fromkeys(SHAPES, torch.float32),
    "mixed": dict(zip(SHAPES, [torch.bfloat16, torch.float32, torch.float16] * 2, strict=True)),
}


def make_weights(dtypes: str = "bf16", device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: w.to(device, DTYPES[dtypes][name]) for name, w in made.items()}


def change(weights: Mapping[str, Tensor], mask: MaskSet, share: float, seed: int) -> None:
    """Replace a share of the active elements by random bits, NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    for name, positions in mask.indices.items():
        flat = bits(weights[name])
        chosen = positions[torch.rand(positions.shape, generator=generator) < share].long()
        end = 2 ** (8 * flat.element_size() - 1)
        new = torch.randint(-end, end, chosen.shape, generator=generator).to(flat.dtype)
        flat[chosen.to(flat.device)] = new.to(flat.device)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(bits(t), bits(other[n])) for n, t in one.items())


def clones(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.detach().clone() for name, w in weights.items()}


def send_aside(channel: Any) -> threading.Thread:
    """Make an update and send it in a thread, on a stream of its own."""
    update, stream = channel.weights.update(), torch.cuda.Stream()

    def send() -> None:
        with torch.cuda.stream(stream):
            channel.send(update)

    thread = threading.Thread(target=send)
    thread.start()
    return thread
