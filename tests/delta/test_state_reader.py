"""Every append logs what `state_dict()` returns at that step, whatever has changed in the model since the last one."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import DeltaLog
from sparse_opt.errors import DeltaLogError

Compare = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    made[2].weight = nn.Parameter(made[0].weight.detach().T.contiguous())
    return made


def assert_logs_every_step(
    folder: Path, module: nn.Module, same_bits: Compare, change: Callable[[int], object], n_steps: int = 4
) -> None:
    """Log steps of `module`, each after `change(step)`, and compare all of them with its state dict at that step."""
    kept = {0: copy.deepcopy(module.state_dict())}
    with DeltaLog.create(folder, module) as log:
        for step in range(1, n_steps + 1):
            change(step)
            kept[step] = copy.deepcopy(module.state_dict())
            assert any(not torch.equal(kept[step][name], tensor) for name, tensor in kept[step - 1].items())
            log.append(step)
    for step, state in kept.items():
        same_bits(log.load(step), state)
    assert log.verify() == []


def add_one(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)


def test_hooks(tmp_path, same_bits):
    """One that is there from the start, and another one from step 2 on."""
    module = model()

    def shift(part: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] - 7

    module[0].register_state_dict_post_hook(shift)

    def change(step: int) -> None:
        if step == 2:
            module[2].register_state_dict_post_hook(shift)
        add_one(module)

    assert_logs_every_step(tmp_path / "log", module, same_bits, change)


def test_other_memory(tmp_path, same_bits):
    module = model()

    def change(step: int) -> None:
        if step == 1:
            module[0].weight.data = torch.randn(3, 3)
        elif step == 2:
            module[2].bias = nn.Parameter(torch.randn(3))
        elif step == 3:
            module[1].running_mean = torch.randn(3)
        elif step == 4:
            module[0] = nn.Linear(3, 3)
        else:  # the same memory, other strides
            module[0].weight.data = module[0].weight.data.T

    assert_logs_every_step(tmp_path / "log", module, same_bits, change, n_steps=5)


def lazily_conjugated(tensor: Tensor) -> Tensor:
    found = tensor.conj()
    assert found.is_conj() and found.data_ptr() == tensor.data_ptr()
    return found


def lazily_negated(tensor: Tensor) -> Tensor:
    found = torch._neg_view(tensor)
    assert found.is_neg() and found.data_ptr() == tensor.data_ptr()
    return found


@pytest.mark.parametrize(
    ("view", "dtype"), [(lazily_conjugated, torch.complex64), (lazily_negated, torch.float32)], ids=["conj", "neg"]
)
def test_lazily_conjugated_and_negated_entries(tmp_path, same_bits, states, device, view, dtype):
    """The view has the address, shape and strides of what it is a view of, and other bits."""
    plain = torch.randn(4000, dtype=dtype, device=device)
    both = {"a": plain, "b": view(plain)}
    with DeltaLog.create(tmp_path / "log", both) as log:
        assert not log.layout.aliases, "a tensor and its conjugate are not tied"
        kept = {0: {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in both.items()}}
        for step, state in enumerate(({"a": view(plain), "b": plain}, both, {"a": plain, "b": plain.clone()})):
            log.append(step + 1, state)
            kept[step + 1] = {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in state.items()}
            plain[step::7] *= 3
        assert [log.step_of(state) for state in kept.values()] == [0, 1, 2, 3]
    for step, state in kept.items():
        same_bits(log.load(step), state)
    assert log.verify() == []
    # Written through the views.
    log.apply_(both, 0)
    same_bits({"a": both["a"], "b": both["b"].resolve_conj().resolve_neg()}, kept[0])
    assert log.step_of(both) == 0


def shared(module: nn.Sequential) -> None:
    module[2].bias = module[1].bias


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn(4, 5))), r"0.weight is float32 \[4, 5\]"),
        (lambda m: m[1].register_buffer("more", torch.ones(1)), "1.more is not in the log"),
        (shared, "2.bias is missing"),
    ],
)
def test_another_model_is_refused_after_the_first_step(tmp_path, change, message):
    module = model()
    with DeltaLog.create(tmp_path / "log", module) as log:
        log.append(1)
        change(module)
        with pytest.raises(DeltaLogError, match=f"log: step 2: the model is not the logged one: .*({message})"):
            log.append(2)


def test_what_cannot_be_logged_any_more_is_refused_by_step_and_name(tmp_path):
    module = model()
    with DeltaLog.create(tmp_path / "log", module) as log:
        log.append(1)
        module[0].weight.data = torch.zeros(3, 3)
        module[0].weight.untyped_storage().resize_(0)
        with pytest.raises(DeltaLogError, match=r"step 2: state entry 0\.weight has 9 .*memory was freed"):
            log.append(2)
        module[0].weight.data = torch.zeros(3, 3)
        log.append(3)
    assert log.steps == (0, 1, 3) and log.verify() == []
