"""Files that are rewritten, truncated or crafted while they are read: what was checked is what is decoded."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_opt import DeltaLog, MaskSet, tensor_file
from sparse_opt.delta import codec as patch_codec
from sparse_opt.errors import DeltaLogError


@pytest.fixture(params=["packed", "tight"])
def level(request):
    return str(request.param)


@pytest.fixture(params=["dense", "mask"])
def log(request, tmp_path, states, level):
    """A log of three patches, and its states."""
    mask = None
    if request.param == "mask":
        mask = MaskSet.from_bool({name: torch.arange(9000) % 5 == 0 for name in "ab"})
    kept = [{name: states.bits((9000,), torch.bfloat16) for name in "ab"}]
    with DeltaLog.create(tmp_path / "log", kept[0], level=level, mask=mask) as log:
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


def test_states_that_are_not_aligned(tmp_path, states, same_bits, level):
    kept = [states.state()]
    kept = [{name: tensor for name, tensor in kept[0].items() if tensor.numel()}]
    with DeltaLog.create(tmp_path / "log", {k: unaligned(t) for k, t in kept[0].items()}, level=level) as log:
        for step in (1, 2):
            kept.append(states.change(kept[-1], 0.1))
            log.append(step, {name: unaligned(tensor) for name, tensor in kept[-1].items()})
        for step, state in enumerate(kept):
            same_bits(log.load(step), state)
            assert log.step_of({name: unaligned(tensor) for name, tensor in state.items()}) == step
        target = {name: unaligned(tensor) for name, tensor in kept[2].items()}
        log.apply_(target, 1)
        same_bits(target, kept[1])
