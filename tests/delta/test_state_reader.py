"""Reading a model's state step after step: what has stayed is not looked at again, what has not is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparse_opt import delta_state
from sparse_opt.delta_state import StateReader, read_state
from sparse_opt.errors import DeltaLogError


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    made[2].weight = nn.Parameter(made[0].weight.detach().T.contiguous())
    return made


@pytest.fixture
def full_readings(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that everything was looked at."""
    made: list[None] = []

    def counted(*args: object) -> object:
        made.append(None)
        return read_state(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(delta_state, "read_state", counted)
    return made


def assert_read(reader: StateReader, module: nn.Module) -> None:
    found, wanted = reader.read(module, "here"), module.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].data_ptr() == tensor.data_ptr() and torch.equal(found[name], tensor), name
        assert not found[name].requires_grad


def test_a_state_that_stays_is_read_once(full_readings: list[None]) -> None:
    module = model()
    reader = StateReader(read_state(module)[0])
    for _ in range(3):
        assert_read(reader, module)
        with torch.no_grad():
            module[0].weight.add_(1)
        module(torch.randn(5, 3))  # writes to the buffers
    assert len(full_readings) == 1


def test_other_memory_is_noticed(full_readings: list[None]) -> None:
    module = model()
    reader = StateReader(read_state(module)[0])
    assert_read(reader, module)
    module[0].weight.data = torch.randn(4, 3)
    assert_read(reader, module)
    module[2].bias = nn.Parameter(torch.randn(3))
    assert_read(reader, module)
    module[1].running_mean = torch.randn(4)
    assert_read(reader, module)
    assert_read(reader, model())
    assert len(full_readings) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn(4, 5))), r"0.weight is float32 \[4, 5\]"),
        (lambda m: setattr(m[0].weight, "data", m[0].weight.data.view(3, 4)), r"0.weight is float32 \[3, 4\]"),
        (lambda m: m.double(), "0.weight is float64"),
        (lambda m: m.append(nn.Linear(1, 1)), "3.weight is not in the log"),
        (lambda m: m[0].register_parameter("scale", nn.Parameter(torch.ones(1))), "0.scale is not in the log"),
        (lambda m: m[1].register_buffer("more", torch.ones(1)), "1.more is not in the log"),
        (lambda m: setattr(m[2], "bias", m[1].bias), "2.bias is missing|2.bias is float32|tied names"),
        (lambda m: m.pop(2), "2.weight is missing"),
        (lambda m: setattr(m[0], "bias", None), "0.bias is missing"),
    ],
)
def test_another_model_is_refused_after_the_first_step(change, message) -> None:  # type: ignore[no-untyped-def]
    module = model()
    reader = StateReader(read_state(module)[0])
    assert_read(reader, module)
    change(module)
    with pytest.raises(DeltaLogError, match=f"^here: the model is not the logged one: .*({message})"):
        reader.read(module, "here")


def test_modules_that_make_their_state_dict_themselves_are_read_anew(full_readings: list[None]) -> None:
    module = model()
    module[0].register_state_dict_post_hook(
        lambda part, state, prefix, meta: state.update({"0.weight": part.weight + 0})
    )
    reader = StateReader(read_state(module)[0])
    for value in (1.0, 2.0):
        nn.init.constant_(module[0].weight, value)
        assert torch.equal(reader.read(module, "here")["0.weight"], torch.full((4, 3), value))
    assert len(full_readings) == 2


def test_state_dicts_too(full_readings: list[None]) -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(2)}
    reader = StateReader(read_state(state)[0])
    assert reader.read(state, "here")["a"] is not None
    reader.read(dict(state), "here")
    assert len(full_readings) == 1
    reader.read({**state, "a": torch.ones(3)}, "here")
    assert len(full_readings) == 2
    with pytest.raises(DeltaLogError, match=r"^here: .* b is missing"):
        reader.read({"a": state["a"]}, "here")
