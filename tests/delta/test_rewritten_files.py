"""Files that are rewritten, truncated or crafted while they are read: what was checked is what is decoded."""

import os
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparse_opt import DeltaLog, MaskSet, tensor_file
from sparse_opt.delta import codec as patch_codec
from sparse_opt.errors import DeltaLogError
from sparse_opt.tensor_file import DamagedFile, open_tensors


@pytest.fixture(params=["dense", "mask"])
def log(request, tmp_path, states):
    """A log of three patches, and its states."""
    mask = None
    if request.param == "mask":
        mask = MaskSet.from_bool({name: torch.arange(9000) % 5 == 0 for name in "ab"})
    kept = [{name: states.bits((9000,), torch.bfloat16) for name in "ab"}]
    with DeltaLog.create(tmp_path / "log", kept[0], mask=mask) as log:
        for step in (1, 2, 3):
            state = {name: tensor.clone() for name, tensor in kept[-1].items()}
            for tensor in state.values():
                tensor.view(torch.int16)[5 * step :: 25] += 1
            kept.append(state)
            assert log.append(step, state).wait().masked == (mask is not None)
    return DeltaLog.open(tmp_path / "log"), kept


def read_whole(log: DeltaLog) -> dict[str, Tensor]:
    return log.load(3)


def read_each(log: DeltaLog) -> dict[str, Tensor]:
    return {name: [tensor.clone() for _, tensor in log.tensor_states(name, log.steps)][-1] for name in log.layout.names}


@pytest.mark.parametrize("read", [read_whole, read_each])
def test_a_file_rewritten_before_it_is_decoded(log, same_bits, monkeypatch, read):
    """In place and after its sums were checked: a mapped file would change under the decoder."""
    opened, kept = log
    contents = {path: path.read_bytes() for path in opened.directory.glob("*.safetensors")}
    apply_ = patch_codec.apply_

    def rewritten(*args: Any, **kwargs: Any) -> None:
        for path, content in contents.items():
            with path.open("r+b") as file:
                file.seek(8 + int.from_bytes(content[:8], "little"))
                file.write(b"\xff" * (len(content) - file.tell()))
        apply_(*args, **kwargs)
        for path, content in contents.items():
            with path.open("r+b") as file:
                file.write(content)

    monkeypatch.setattr(patch_codec, "apply_", rewritten)
    same_bits(read(opened), kept[3])


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("read", [read_whole, read_each])
def test_a_file_truncated_while_it_is_read(log, monkeypatch, read, step):
    opened, _ = log
    opened.digest(3)  # reads the headers, which are kept
    (path,) = opened.directory.glob(f"step_0000000{step}.*")
    read_header = tensor_file._read_header

    def truncated(descriptor: int) -> Any:
        found = read_header(descriptor)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            os.truncate(path, path.stat().st_size // 2)
        return found

    monkeypatch.setattr(tensor_file, "_read_header", truncated)
    with pytest.raises(DeltaLogError, match=f"{path}: step {step}: damaged: it(s tensors|s header has| ends at byte)"):
        read(opened)


def unaligned(tensor: Tensor) -> Tensor:
    """The same bits, one byte behind an aligned address, as in a mapped file."""
    data = bytearray(1) + bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found = torch.frombuffer(data, dtype=tensor.dtype, offset=1).view(tensor.shape)
    assert tensor.element_size() == 1 or found.data_ptr() % tensor.element_size() != 0
    return found


def test_states_that_are_not_aligned(tmp_path, states, same_bits):
    kept = [states.state()]
    kept = [{name: tensor for name, tensor in kept[0].items() if tensor.numel()}]
    with DeltaLog.create(tmp_path / "log", {k: unaligned(t) for k, t in kept[0].items()}) as log:
        for step in (1, 2):
            kept.append(states.change(kept[-1], 0.1))
            log.append(step, {name: unaligned(tensor) for name, tensor in kept[-1].items()})
        for step, state in enumerate(kept):
            same_bits(log.load(step), state)
            assert log.step_of({name: unaligned(tensor) for name, tensor in state.items()}) == step
        target = {name: unaligned(tensor) for name, tensor in kept[2].items()}
        log.apply_(target, 1)
        same_bits(target, kept[1])


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
        assert found.entries["a"].numel == 10
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
