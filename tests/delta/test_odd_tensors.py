"""Tensors of every dtype, and odd names: each is logged bit for bit, or refused by name before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_opt import DeltaLog
from sparse_opt.delta.convert import convert
from sparse_opt.errors import DeltaLogError

LOGGED = (
    "bool uint8 int8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint16 int16 float16 "
    "bfloat16 uint32 int32 float32 uint64 int64 float64 complex64"
).split()
DTYPES = sorted({str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)})
NOT_LOGGED = [name for name in DTYPES if name not in LOGGED]


def any_bits(dtype: torch.dtype, seed: int, shape: tuple[int, ...] = (40, 60)) -> Tensor:
    """Any bits that the dtype can have."""
    source = torch.Generator(device="cpu").manual_seed(seed)
    numel = torch.Size(shape).numel()
    end = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, end, (numel * dtype.itemsize,), dtype=torch.uint8, generator=source)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("name", LOGGED)
def test_logged_dtypes(tmp_path, same_bits, device, name):
    dtype = getattr(torch, name)
    # A matrix, the same transposed, a scalar and an empty one.
    first = {"m": any_bits(dtype, 0), "s": any_bits(dtype, 1, ()), "e": any_bits(dtype, 2, (0, 3))}
    first["t"] = any_bits(dtype, 3).t()
    kept = [first, {key: tensor.clone() for key, tensor in first.items()}, {**first, "m": any_bits(dtype, 4)}]
    kept[1]["m"].view(-1).view(torch.uint8)[: 9 * dtype.itemsize] ^= 1  # random bools might be those that are there
    live = [{key: tensor.to(device) for key, tensor in state.items()} for state in kept]
    with DeltaLog.create(tmp_path / "log", live[0]) as log:
        for step in (1, 2):
            log.append(step, live[step])
        for step, state in enumerate(kept):
            same_bits(log.load(step), state)
            assert log.step_of(live[step]) == step
        for key in first:
            for step, tensor in log.tensor_states(key, [0, 1, 2]):
                same_bits({key: tensor}, {key: kept[step][key]})
        assert log.verify() == []
    convert(log, tmp_path / "again")
    assert DeltaLog.open(tmp_path / "again").digest(2) == log.digest(2)


def of_dtype(name: str) -> Tensor:
    return torch.empty(4000, dtype=torch.uint8).view(getattr(torch, name))


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.zeros(4000)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(4000), 0.1, 0, torch.qint8)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def zeros() -> Tensor:
    return torch.zeros(3)


ODD: dict[str, tuple[Any, Callable[[], Tensor], str]] = {
    **{name: ("odd", lambda name=name: of_dtype(name), f"odd is torch.{name}") for name in NOT_LOGGED},
    "quantized": ("odd", quantized, "odd is torch.qint8"),
    "nested": ("odd", nested, "odd is nested"),
    "fake": ("odd", fake, "odd is FakeTensor, expected a plain tensor"),
    "lazy": ("odd", nn.UninitializedParameter, "odd is UninitializedParameter"),
    "meta": (
        "odd",
        lambda: torch.zeros(3, device="meta"),
        "odd is torch.strided on meta, expected a strided tensor in",
    ),
    "sparse": ("odd", lambda: torch.zeros(3, 3).to_sparse(), "odd is torch.sparse_coo on cpu"),
    "value": ("odd", lambda: 5, "odd is int, expected a tensor"),
    "surrogate": ("w\ud800", zeros, r"'w\\ud800' has a name that cannot be encoded as UTF-8"),
    "metadata": ("__metadata__", zeros, "__metadata__ .* reserved by the file format"),
    "number": (5, zeros, "5 is named by a int, expected a string"),
}


@pytest.mark.filterwarnings("ignore")  # some of these are on their way into torch, or out of it
@pytest.mark.parametrize(("name", "make", "message"), ODD.values(), ids=ODD)
def test_what_is_refused_is_named_before_anything_is_written(tmp_path, same_bits, name, make, message):
    odd = make()
    good = {"a": torch.zeros(4000), "odd": torch.ones(4000)}
    with pytest.raises(DeltaLogError, match=f"state entry {message}") as caught:
        DeltaLog.create(tmp_path / "none", {"a": torch.zeros(3), name: odd})
    assert "\n" not in str(caught.value)
    str(caught.value).encode()  # can be printed
    assert not (tmp_path / "none").exists()
    with DeltaLog.create(tmp_path / "log", good) as log:
        before = sorted(path.name for path in log.directory.iterdir())
        with pytest.raises(DeltaLogError, match=f"log: step 1: state entry {message}"):
            log.append(1, {**good, name: odd})
        log.flush()
        assert sorted(path.name for path in log.directory.iterdir()) == before
        good["a"][:9] += 1
        assert log.append(1).wait().kind == "patch"
        same_bits(log.load(1), good)
        assert log.verify() == []


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "a\\b", "ü.漢.😀", "a\0b", ".indices", "counts", "a" * 10_000])
def test_odd_names_that_are_logged(tmp_path, same_bits, name):
    state = {name: torch.zeros(4000), f"{name}.indices": torch.zeros(40)}
    kept = {key: tensor.clone() for key, tensor in state.items()}
    with DeltaLog.create(tmp_path / "log", state) as log:
        for tensor in state.values():
            tensor[:9] += 1
        assert log.append(1).wait().kind == "patch"
    log = DeltaLog.open(tmp_path / "log")
    same_bits(log.load(0), kept)
    same_bits(log.load(1), state)
    assert [step for step, _ in log.tensor_states(name, log.steps)] == [0, 1]
    assert log.verify() == []


@pytest.mark.parametrize("metadata", [{"model": "\ud800"}, {"\ud800": "m"}])
def test_metadata_that_cannot_be_written(tmp_path, metadata):
    with pytest.raises(DeltaLogError, match=r"metadata .*'\\ud800'.* cannot be written as UTF-8"):
        DeltaLog.create(tmp_path / "log", {"w": torch.zeros(3)}, metadata=metadata)
    assert not (tmp_path / "log").exists()
