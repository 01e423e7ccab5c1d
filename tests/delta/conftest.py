"""Fixtures for delta log tests: states to log, and their bitwise comparison."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_dtypes import DTYPES
from torch import Tensor

from sparse_opt import DeltaLog

State = dict[str, Tensor]


class States:
    """States with random bits from a seed, including NaN payloads, both zeros, infinities and denormals."""

    def __init__(self, seed: int = 0) -> None:
        self.source = random.Random(seed)

    def bits(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numel = torch.Size(shape).numel()
        if dtype == torch.bool:
            return torch.tensor([self.source.random() < 0.5 for _ in range(numel)]).view(shape)
        raw = bytearray(self.source.randbytes(numel * dtype.itemsize))
        return torch.frombuffer(raw, dtype=dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)

    def state(self) -> State:
        state = {f"t.{str(dtype)[6:]}": self.bits((5, 7), dtype) for dtype in DTYPES}
        return state | {
            "scalar": self.bits((), torch.bfloat16),
            "nothing": torch.empty(0, 3),
            "row": self.bits((9,), torch.float32),
        }

    def change(self, state: Mapping[str, Tensor], share: float = 0.2) -> State:
        """A copy in which about `share` of the elements have new bits."""
        changed = {}
        for name, tensor in state.items():
            fresh = self.bits(tuple(tensor.shape), tensor.dtype)
            where = torch.tensor([self.source.random() < share for _ in range(tensor.numel())], dtype=torch.bool)
            old_bytes, new_bytes = (t.reshape(-1, 1).view(torch.uint8) for t in (tensor, fresh))
            changed[name] = torch.where(where[:, None], new_bytes, old_bytes).view(tensor.dtype).view(tensor.shape)
        return changed


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name].cpu().contiguous()
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        flat = tensor.cpu().contiguous().view(-1)
        assert other.view(-1).view(torch.uint8).numpy().tobytes() == flat.view(torch.uint8).numpy().tobytes(), name


@pytest.fixture(autouse=True)
def threads(two_threads: None) -> None:
    """The kernels' threads are tested here."""


@pytest.fixture
def states() -> States:
    return States()


@pytest.fixture
def same_bits():  # type: ignore[no-untyped-def]
    return assert_same_bits


@pytest.fixture
def with_header() -> Callable[..., None]:
    """`with_header(path, change, pad=0)`: rewrite a safetensors file with the header that `change(header)` returns or
    changes in place, and `pad` more spaces behind it."""

    def rewrite(path: Path, change: Callable[[Any], Any], pad: int = 0) -> None:
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        text = json.dumps(change(header) or header) + " " * pad
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + content[end:])

    return rewrite


class Logged:
    """A closed log on disk, and the expected state of each step."""

    def __init__(self, directory: Path, states: Mapping[int, State]) -> None:
        self.directory, self.states = directory, dict(states)

    def file(self, step: int) -> Path:
        return next(self.directory.glob(f"step_{step:08d}.*"))

    def load(self, step: int) -> State:
        return DeltaLog.open(self.directory).load(step)


@pytest.fixture
def logged(tmp_path: Path) -> Logged:
    """Steps 0 (keyframe), 1, 2, 5 (keyframe), 7, 8 of a small state."""
    source = States(1)
    state = {"a.w": source.bits((6, 5), torch.bfloat16), "b": source.bits((7,), torch.float32), "n": torch.tensor(3)}
    kept = {0: state}
    with DeltaLog.create(tmp_path / "log", state, keyframe_every=3, metadata={"model": "tiny"}) as log:
        for step in (1, 2, 5, 7, 8):
            state = source.change(state)
            log.append(step, state)
            kept[step] = state
    return Logged(tmp_path / "log", kept)
