"""torch's default device and dtype are the user's: a log neither follows nor needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparse_opt import DeltaLog, MaskSet, backends
from sparse_opt.delta.codec import Backend
from sparse_opt.delta.export import convert, export_state, export_values
from sparse_opt.delta.pt import convert_pt

Compare = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
# A tensor on the device `meta` has no values: every tensor that is made without a device shows there.
DEVICES = ["meta", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=DEVICES)
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_device(request.param)
    yield
    torch.set_default_device(None)


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    cause = backends.why_unavailable(device.type, device.type)
    if request.param == "native" and cause:
        pytest.skip(f"needs the native backend of {device.type}: {cause}")
    found: Backend = request.param
    return found


def some_states(device: torch.device) -> list[dict[str, Tensor]]:
    """Four states of bf16, fp32, integer and empty tensors; all but the last change within the mask below."""
    source = torch.Generator(device="cpu").manual_seed(0)
    made = {
        "a": torch.randn(9000, generator=source, dtype=torch.float32, device="cpu").bfloat16(),
        "b": torch.randn(500, generator=source, dtype=torch.float32, device="cpu"),
        "n": torch.zeros(3, dtype=torch.int64, device="cpu"),
        "nothing": torch.empty(0, dtype=torch.float32, device="cpu"),
    }
    states = [made]
    for step in (1, 2, 3):
        state = {name: tensor.clone() for name, tensor in states[-1].items()}
        state["a"][5 * step :: 25] += 1
        state["b"][5 * step :: 25] += 1
        if step == 3:
            state["n"] += 1
        states.append(state)
    return [{name: tensor.to(device) for name, tensor in state.items()} for state in states]


def some_mask() -> MaskSet:
    positions = {"a": 9000, "b": 500}
    return MaskSet.from_bool(
        {name: torch.arange(n, dtype=torch.int64, device="cpu") % 5 == 0 for name, n in positions.items()}
    )


def use_a_log(folder: Path, states: list[dict[str, Tensor]], same_bits: Compare, level: str, backend: Backend) -> None:
    """Everything that a log can do."""
    live = {name: tensor.clone() for name, tensor in states[0].items()}
    for mask in (None, some_mask()):
        directory = folder / f"log{mask is not None}"
        with DeltaLog.create(directory, live, level=level, mask=mask, keyframe_every=3, backend=backend) as log:
            for step in (1, 2):
                for name, tensor in live.items():
                    tensor.copy_(states[step][name])
                info = log.append(step).wait()
                assert info.masked == (mask is not None and info.kind == "patch")
        with DeltaLog.open(directory, live, backend=backend) as log:
            for name, tensor in live.items():
                tensor.copy_(states[3][name])
            log.append(3).wait()
            assert log.step_of(live) == 3
            for step, state in enumerate(states):
                same_bits(log.load(step), state)
            for name in live:
                for step, tensor in log.tensor_states(name, log.steps):
                    same_bits({name: tensor}, {name: states[step][name]})
            log.apply_(live, 1)
            same_bits(live, states[1])
            live = {name: tensor.clone() for name, tensor in states[0].items()}
            assert log.verify() == []
            export_state(log, 2, folder / "state.safetensors")
            assert export_values(log, 0, 3, folder / "values.safetensors") > 0
            log.squash(0, 2)
            same_bits(log.load(2), states[2])
            log.truncate(2)
            assert log.verify() == [] and log.steps == (0, 2)


@pytest.mark.parametrize("level", ["packed", "tight"])
def test_default_devices(
    tmp_path: Path,
    same_bits: Compare,
    device: torch.device,
    backend: Backend,
    default_device: None,
    level: str,
) -> None:
    use_a_log(tmp_path, some_states(device), same_bits, level, backend)


def test_default_dtypes(
    tmp_path: Path, same_bits: Compare, device: torch.device, backend: Backend, default_dtype: None
) -> None:
    use_a_log(tmp_path, some_states(device), same_bits, "tight", backend)


def convert_pt_files(folder: Path, same_bits: Compare) -> None:
    states = [{name: t for name, t in s.items() if name != "n"} for s in some_states(torch.device("cpu"))]
    base = {name: tensor.float() for name, tensor in states[0].items()}
    (folder / "pt").mkdir()
    torch.save(base, folder / "pt" / "base_state.pt")
    torch.save({n: t.float() - base[n] for n, t in states[1].items()}, folder / "pt" / "deltas_step_1.pt")
    convert_pt(folder / "pt", folder / "log")
    log = DeltaLog.open(folder / "log")
    for step in (0, 1):
        same_bits(log.load(step), {name: tensor.float() for name, tensor in states[step].items()})
    convert(log, folder / "again")
    assert DeltaLog.open(folder / "again").digest(1) == log.digest(1)


def test_default_devices_of_pt_files(tmp_path: Path, same_bits: Compare, default_device: None) -> None:
    convert_pt_files(tmp_path, same_bits)


def test_default_dtypes_of_pt_files(tmp_path: Path, same_bits: Compare, default_dtype: None) -> None:
    convert_pt_files(tmp_path, same_bits)
