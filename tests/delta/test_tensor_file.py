"""Safetensors files read into memory of their own: every dtype, any alignment, headers that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sparse_opt.tensor_file import DamagedFile, open_tensors


@pytest.fixture
def file(tmp_path):
    """`a` and `b` of 4 bytes, then `c` of 6."""
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.tensor([1.5]), "b": torch.tensor([7], dtype=torch.int32), "c": torch.ones(2, 3).byte()}, path)
    return path


@pytest.mark.parametrize("pad", range(9))
def test_every_dtype_at_any_address(tmp_path, states, same_bits, with_header, pad):
    state = states.state() | {"empty": torch.empty(0, dtype=torch.int64), "scalar": torch.tensor(3.0)}
    path = tmp_path / "file.safetensors"
    save_file(state, path, metadata={"key": "ü"})
    with_header(path, lambda header: None, pad)
    with safe_open(path, framework="pt") as expected, open_tensors(path) as found:
        assert set(found.names) == set(expected.keys()) and found.metadata == expected.metadata() == {"key": "ü"}
        tensors = {name: found.read(name) for name in found.names}
    same_bits({name: tensors[name] for name in state}, state)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors.values() if tensor.numel())


def test_ranges(file):
    save_file({"a": torch.arange(10).view(2, 5), "b": torch.arange(3.0)}, file)
    with open_tensors(file) as found:
        assert found.numel("a") == 10
        assert found.read_range("a", 3, 7).tolist() == [3, 4, 5, 6]
        assert found.read_range("a", 10, 10).tolist() == []
        assert found.read("b").tolist() == [0, 1, 2]
        for begin, end in ((-1, 2), (3, 2), (0, 11)):
            with pytest.raises(ValueError, match=rf"elements \[{begin}, {end}\) of a, expected .* \[0, 10\)"):
                found.read_range("a", begin, end)


def entry(name: str, key: str, value: object) -> Any:
    return lambda header: header[name].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry("a", "dtype", "F64"), r"a has 4 bytes, expected F64 \[1\]"),
        (entry("a", "dtype", "F4"), "a has the dtype 'F4', expected one of BOOL, "),
        (entry("a", "shape", [-1]), "a has an invalid shape"),
        (entry("a", "data_offsets", [0, 4, 8]), "a has invalid data_offsets, expected two numbers"),
        (entry("b", "data_offsets", [0, 4]), r"[ab] begins at byte \d+, expected \d+"),
        (lambda header: header.pop("c") and None, r"its tensors end at byte \d+, expected \d+, the end"),
        (lambda header: header.__setitem__("a", 5), "the header entry of a is not dtype, shape and data_offsets"),
        (lambda header: [header], "its header is a list, expected a JSON object"),
    ],
)
def test_headers_that_do_not_fit(file, with_header, change, message):
    with_header(file, change)
    with pytest.raises(DamagedFile, match=message), open_tensors(file):
        pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes, expected 8 or more"),
        (b"\1" + b"\0" * 7, "its header has 1 bytes, expected at most 0"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "its header is not JSON"),
    ],
)
def test_no_safetensors_file(file, content, message):
    file.write_bytes(content)
    with pytest.raises(DamagedFile, match=message), open_tensors(file):
        pass
