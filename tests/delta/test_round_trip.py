"""Logged states are read with the same bits: any dtype, any change, tied tensors, models and plain states."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from sparse_opt import DeltaLog


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


def test_a_training_model(tmp_path, same_bits, device):
    torch.manual_seed(0)
    model = Small().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept = {0: copy.deepcopy(model.state_dict())}
    with DeltaLog.create(tmp_path / "log", model) as log:
        for step in range(1, 6):
            model(torch.randint(0, 7, (16,), device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            log.append(step)
            kept[step] = copy.deepcopy(model.state_dict())
    other = Small().to(device)
    for step, state in kept.items():
        loaded = log.load(step)
        same_bits(loaded, state)
        assert loaded["head.weight"] is loaded["embed.weight"]
        other.load_state_dict(loaded)
        same_bits(other.state_dict(), state)
        log.apply_(model, step)
        same_bits(model.state_dict(), state)
        assert model.head.weight is model.embed.weight
        assert model.head.weight.requires_grad


def test_tied_tensors_are_stored_once(tmp_path):
    log = DeltaLog.create(tmp_path / "log", Small())
    with safe_open(tmp_path / "log" / "step_00000000.keyframe.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == [
            "embed.weight",
            "norm.bias",
            "norm.num_batches_tracked",
            "norm.running_mean",
            "norm.running_var",
            "norm.weight",
        ]
    assert log.layout.aliases == {"head.weight": "embed.weight"}
    assert log.layout.buffers == {"norm.num_batches_tracked", "norm.running_mean", "norm.running_var"}
    assert log.info()[0].numel == 28 + 4 * 4 + 1


def test_views_of_one_buffer_and_other_strides(tmp_path, same_bits):
    flat = torch.arange(24, dtype=torch.float32)
    state = {"a": flat[:6].view(2, 3), "b": flat[6:12], "t": flat[12:].view(3, 4).t(), "overlaps": flat[3:9]}
    before = {name: tensor.clone() for name, tensor in state.items()}
    with DeltaLog.create(tmp_path / "log", state, keyframe_every=2) as log:
        for step in (1, 2, 3):
            flat[step::5] -= 1
            log.append(step)
            same_bits(log.load(step), state)
        assert [info.kind for info in log.info()] == ["keyframe", "patch", "keyframe", "patch"]
        log.apply_(state, 0)
    same_bits(state, before)


@pytest.mark.gpu
def test_a_state_on_several_devices(tmp_path, states, same_bits):
    """Tensors of one dtype are coded together, on the device of the first; and a model may move between steps."""
    state = {"a": states.bits((40,), torch.bfloat16), "b": states.bits((50,), torch.bfloat16), "n": torch.tensor(1)}
    kept = {0: state}
    with DeltaLog.create(tmp_path / "log", {**state, "b": state["b"].cuda()}) as log:
        for step, on_gpu in enumerate(("a", "b", "n", "ab", "abn", ""), start=1):
            kept[step] = states.change(kept[step - 1], 0.1)
            log.append(step, {name: t.cuda() if name in on_gpu else t for name, t in kept[step].items()})
        for step, expected in kept.items():
            same_bits(log.load(step), expected)
        assert log.verify() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_patch_larger_than_a_keyframe_is_a_keyframe(tmp_path, device, states, same_bits, dtype):
    state = {"w": states.bits((300,), dtype).to(device)}
    kept = {0: {"w": state["w"].clone()}}
    with DeltaLog.create(tmp_path / "log", state) as log:
        kinds = []
        for step, changed in enumerate((100, 300, 1, 300, 2), start=1):
            state["w"][:changed] = states.bits((changed,), dtype).to(device)
            kinds.append(log.append(step).wait().kind)
            kept[step] = {"w": state["w"].clone()}
    assert kinds == ["patch", "keyframe", "patch", "keyframe", "patch"]
    log = DeltaLog.open(tmp_path / "log")
    for step, expected in kept.items():
        same_bits(log.load(step), expected)
    assert log.verify() == []
    assert [info.kind for info in log.info()] == ["keyframe", *kinds]
    # A keyframe needs nothing before it, and the chain goes on from it.
    (tmp_path / "log" / "step_00000001.patch.safetensors").unlink()
    assert [problem.lost_steps for problem in log.verify()] == [(1,)]
    same_bits(log.load(3), kept[3])
    with DeltaLog.open(tmp_path / "log", state) as log:
        state["w"][7] = 100
        assert log.append(9).wait().kind == "patch"
        same_bits(log.load(9), state)


def test_a_keyframe_is_a_plain_safetensors_file(logged):
    with safe_open(logged.file(5), framework="pt") as file:
        assert torch.equal(file.get_tensor("n"), logged.states[5]["n"])
        layout = json.loads(file.metadata()["layout"])
    assert layout["tensors"] == [["a.w", "bfloat16", [6, 5]], ["b", "float32", [7]], ["n", "int64", []]]
