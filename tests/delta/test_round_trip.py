"""Logged states are read with the same bits: any dtype, any change, tied tensors, models and plain states."""

import copy

import pytest
import torch
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
