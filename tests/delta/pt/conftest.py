"""Fixtures for logs of `.pt` files, in the format of the tools that write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparse_opt.tensors import as_bits

State = dict[str, Tensor]

SHAPES = {"embed.weight": (64, 48), "layer.0.weight": (8, 8), "layer.0.bias": (8,), "norm.scale": ()}


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bits(found[name]), as_bits(tensor.contiguous())), name


def walk(n_steps: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[State]:
    """An initial state and `n_steps` later ones; each changes a third of the weights by a few percent."""
    generator = torch.Generator().manual_seed(seed)
    states = [{name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}]
    for _ in range(n_steps):
        moved = {}
        for name, tensor in states[-1].items():
            where = torch.rand(tensor.shape, generator=generator) < 0.3
            move = 0.03 * torch.randn(tensor.shape, generator=generator)
            moved[name] = (tensor.float() + where * move).to(dtype)
        states.append(moved)
    return states


def write_as_tools_do(folder: Path, states: Sequence[State], steps: Sequence[int]) -> Path:
    """base_state.pt in fp32, and the fp32 difference of each further state to it."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {name: tensor.detach().float().cpu().clone() for name, tensor in states[0].items()}
    torch.save(base, folder / "base_state.pt")
    for step, state in zip(steps, states[1:], strict=True):
        deltas = {name: tensor.detach().float().cpu() - base[name] for name, tensor in state.items()}
        torch.save(deltas, folder / f"deltas_step_{step}.pt")
    return folder


@dataclass(frozen=True)
class Run:
    """A folder of .pt files, and the run's bf16 weights at each step."""

    folder: Path
    states: dict[int, State]


@pytest.fixture
def bf16_run(tmp_path: Path) -> Run:
    states = walk(3)
    steps = (5, 10, 100)
    folder = write_as_tools_do(tmp_path / "deltas", states, steps)
    return Run(folder, dict(zip((0, *steps), states, strict=True)))
