"""Fixtures for delta logs of small states."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from sparse_opt import DeltaLog


@pytest.fixture
def make_log(tmp_path: Path) -> Callable[..., DeltaLog]:
    """`make_log([state0, state1, ...], first=0)`: a delta log of these states, at steps 0, 10, 20, ..."""

    def make(states: Sequence[Mapping[str, torch.Tensor]]) -> DeltaLog:
        with DeltaLog.create(tmp_path / "log", states[0], metadata={"model": "small"}) as log:
            for i, state in enumerate(states[1:], start=1):
                log.append(10 * i, state)
        return DeltaLog.open(tmp_path / "log")

    return make


@pytest.fixture
def random_states() -> Callable[..., list[dict[str, torch.Tensor]]]:
    """`random_states(dtype, steps=3)`: a Llama-like state, followed by states with changes of 1e-8 to 1e-2."""

    def make(dtype: torch.dtype, steps: int = 3) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(3)
        shapes = {
            "model.embed_tokens.weight": (20, 8),
            "model.layers.0.self_attn.q_proj.weight": (8, 8),
            "model.layers.0.mlp.up_proj.weight": (12, 8),
            "model.layers.1.mlp.up_proj.weight": (12, 8),
            "model.norm.weight": (8,),
        }
        state = {name: (0.01 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}
        states = [state]
        for _ in range(steps):
            state = {name: tensor.clone() for name, tensor in state.items()}
            for tensor in state.values():
                moved = torch.rand(tensor.shape, generator=generator) < 0.3
                size = 10 ** (-8 + 6 * torch.rand(tensor.shape, generator=generator))
                tensor += (moved * size * torch.randn(tensor.shape, generator=generator)).to(dtype)
            states.append(state)
        return states

    return make
