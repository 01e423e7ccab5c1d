"""Logs of runs under a mask: patches over its elements, and changes elsewhere, which are never lost."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.errors import DeltaLogError


@pytest.fixture
def state(states, device):
    made = {
        "a": states.bits((40, 50), torch.bfloat16),
        "frozen": states.bits((300,), torch.bfloat16),
        "b": states.bits((700,), torch.float32),
        "n": torch.tensor([7, 8]),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


@pytest.fixture
def mask(state):
    return MaskSet.random({"a": state["a"], "b": state["b"]}, density=0.25, seed=3)


def step_(state: dict[str, Tensor], mask: MaskSet, seed: int) -> None:
    """New bits at half of the mask's elements."""
    for name in mask.names:
        words = state[name].view(-1).view(torch.int16 if state[name].element_size() == 2 else torch.int32)
        positions = mask[name][seed % 2 :: 2].long().to(words.device)
        words[positions] += seed


@pytest.mark.parametrize("outside", ["a", "frozen", "n"])
def test_a_change_outside_of_the_mask_is_not_lost(tmp_path, state, mask, same_bits, outside):
    """In a tensor that the mask lists, in one of the same dtype that it does not, and in one of another dtype."""
    chosen = set(mask[outside].tolist()) if outside in mask.names else set()
    position = next(i for i in range(state[outside].numel()) if i not in chosen)
    kept = {0: copy.deepcopy(state)}
    with DeltaLog.create(tmp_path / "log", state, mask=mask) as log:
        masked = []
        for step in (1, 2, 3):
            step_(state, mask, step)
            if step == 2:
                flat = state[outside].view(-1)
                flat.view(torch.uint8)[position * flat.element_size()] ^= 1
            masked.append(log.append(step).wait().masked)
            kept[step] = copy.deepcopy(state)
        assert masked == [True, False, True]
        for step, expected in kept.items():
            same_bits(log.load(step), expected)
        assert log.verify() == []


def test_a_masked_patch_stores_no_positions(tmp_path, mask):
    """With every element of the mask changed, the values alone remain; the plain form needs the positions too."""
    state = {"w": torch.zeros(100_000, dtype=torch.bfloat16)}
    mask = MaskSet.random(state, density=0.1)
    sizes = {}
    for name, given in (("masked", mask), ("plain", None)):
        moved = {"w": state["w"].clone()}
        with DeltaLog.create(tmp_path / name, moved, mask=given) as log:
            moved["w"][mask["w"].long()] = torch.randn(mask.nnz).bfloat16()
            info = log.append(1).wait()
            assert info.changed == mask.nnz == 10_000
            sizes[name] = info.bytes
    assert sizes["masked"] < 2 * mask.nnz
    assert sizes["plain"] - sizes["masked"] > 0.55 * mask.nnz  # 4.7 bits a position


def test_a_lost_or_other_mask(tmp_path, state, mask, same_bits):
    kept = copy.deepcopy(state)
    with DeltaLog.create(tmp_path / "log", state, mask=mask) as log:
        step_(state, mask, 1)
        log.append(1)
    path, file = tmp_path / "log" / "mask.safetensors", tmp_path / "log" / "step_00000001.patch.safetensors"
    other = MaskSet.random({"a": state["a"]}, density=0.5)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 64
    for content, message in (
        (None, "no such mask file"),
        (bytes(damaged), "positions of b run from 2 to 1073742512, expected 0 to 699"),
        (other, f"{mask.digest}, but {path} is the mask {other.digest}"),
    ):
        path.unlink(missing_ok=True)
        if isinstance(content, MaskSet):
            content.save(path)
        elif content is not None:
            path.write_bytes(content)
        log = DeltaLog.open(tmp_path / "log", state)
        calls: list[Callable[[], Any]] = [partial(log.load, 1), partial(log.append, 2)]
        for call in (*calls, partial(next, log.tensor_states("a", [1]))):
            with pytest.raises(DeltaLogError, match=f"(step 1|step 0): needs the mask .*{message}"):
                call()
        assert [(p.file, p.lost_steps) for p in log.verify()] == [(file.name, (1,))]
        same_bits(log.load(0), kept)


def test_a_mask_that_does_not_fit(tmp_path, state):
    for mask, message in (
        (MaskSet.random({"other": (3,)}, density=0.5), "other is not a parameter of the model"),
        (MaskSet.random({"a": (40, 51)}, density=0.5), r"a is \[40, 51\] in the mask, \[40, 50\] in the model"),
    ):
        with pytest.raises(DeltaLogError, match=f"log: mask does not fit the model: {message}"):
            DeltaLog.create(tmp_path / "log", state, mask=mask)
    assert not (tmp_path / "log").exists()


def test_a_mask_under_a_tied_name(tmp_path, same_bits):
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    mask = MaskSet.from_bool({"b.weight": torch.eye(4, dtype=torch.bool)})
    log = DeltaLog.create(tmp_path / "log", model, mask=mask)
    with torch.no_grad():
        model["a"].weight[2, 2] = 9
    assert log.append(1).wait().masked
    same_bits(log.load(1), model.state_dict())
