from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

from sparse_opt.delta.log import DeltaLog
from sparse_opt.delta.open import open_log
from sparse_opt.delta.pt import PtDeltaLog
from sparse_opt.delta.state import read_state
from sparse_opt.delta.state_log import step_states
from sparse_opt.errors import DeltaLogError
from sparse_opt.tensors import as_bits

from .conftest import SHAPES, assert_same_bits, walk, write_as_tools_do


def widened(state):
    return {name: tensor.float() for name, tensor in state.items()}


def test_states_are_those_of_the_run_in_the_dtype_of_the_files(bf16_run):
    log = PtDeltaLog(bf16_run.folder)
    assert log.steps == (0, 5, 10, 100)
    assert log.layout == read_state(widened(bf16_run.states[0]))[0]
    for step, state in bf16_run.states.items():
        assert_same_bits(log.load(step), widened(state))


def test_states_are_those_of_the_run_in_its_own_dtype(bf16_run):
    log = PtDeltaLog(bf16_run.folder, dtype=torch.bfloat16)
    assert log.layout == read_state(bf16_run.states[0])[0]
    for step, state in step_states(log, log.steps):
        assert_same_bits(state, bf16_run.states[step])
    assert log.exact_dtype() == torch.bfloat16


@pytest.mark.parametrize("delta_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_16_bit_base_is_added_in_fp32_and_rounded_to_it(tmp_path, delta_dtype):
    base = walk(0)[0]
    deltas = {name: (0.01 * torch.randn(shape)).to(delta_dtype) for name, shape in SHAPES.items()}
    torch.save(base, tmp_path / "base_state.pt")
    torch.save(deltas, tmp_path / "deltas_step_1.pt")
    wide = torch.promote_types(delta_dtype, torch.float32)
    expected = {name: (base[name].to(wide) + deltas[name].to(wide)).bfloat16() for name in base}
    assert_same_bits(PtDeltaLog(tmp_path).load(1), expected)


def test_differences_to_the_previous_step_are_summed(tmp_path):
    states = walk(3, torch.float32)
    torch.save(states[0], tmp_path / "base_state.pt")
    expected = {0: states[0]}
    for step, (before, after) in zip((2, 4, 6), itertools.pairwise(states), strict=True):
        moves = {name: after[name] - before[name] for name in before}
        torch.save(moves, tmp_path / f"deltas_step_{step}.pt")
        expected[step] = {name: list(expected.values())[-1][name] + moves[name] for name in moves}
    log = PtDeltaLog(tmp_path, against="previous")
    for step in (6, 0, 4):
        assert_same_bits(log.load(step), expected[step])
    assert [step for step, _ in log.tensor_states("embed.weight", [0, 2, 6])] == [0, 2, 6]
    assert [info.parent_step for info in log.info()] == [None, 0, 2, 4]
    with pytest.raises(DeltaLogError, match="step 2 after step 4, expected ascending steps"):
        list(log.tensor_states("embed.weight", [4, 2]))


def test_values_that_a_difference_cannot_express_are_changed(tmp_path):
    # The docstring's two cases: a new negative zero, and a weight that shrank by more than 2**16.
    old = {"w": torch.tensor([1.0, 1.0, 0.0]).bfloat16()}
    new = {"w": torch.tensor([-0.0, 1.0078125 * 2.0**-20, 1.5]).bfloat16()}
    found = PtDeltaLog(write_as_tools_do(tmp_path / "log", [old, new], [1])).load(1)["w"]
    assert found.tolist() == [0.0, 2.0**-20, 1.5]
    assert not found.signbit().any()


def test_integers_are_added_as_integers(tmp_path):
    torch.save({"count": torch.tensor([2**60 + 1])}, tmp_path / "base_state.pt")
    torch.save({"count": torch.tensor([5])}, tmp_path / "deltas_step_1.pt")
    assert PtDeltaLog(tmp_path).load(1)["count"].tolist() == [2**60 + 6]


def test_a_yielded_tensor_is_the_callers_own(bf16_run):
    log = PtDeltaLog(bf16_run.folder)
    for _ in range(2):
        for step, tensor in log.tensor_states("layer.0.weight", [0, 5]):
            assert torch.equal(tensor, bf16_run.states[step]["layer.0.weight"].float())
            tensor.fill_(7)
    assert_same_bits(PtDeltaLog(bf16_run.folder).load(0), widened(bf16_run.states[0]))


def test_digests_are_those_of_a_delta_log_with_the_same_states(bf16_run, tmp_path):
    log = PtDeltaLog(bf16_run.folder)
    with DeltaLog.create(tmp_path / "log", widened(bf16_run.states[0])) as other:
        other.append(1, widened(bf16_run.states[5]))
    other = DeltaLog.open(tmp_path / "log")
    assert [log.digest(0), log.digest(5)] == [other.digest(0), other.digest(1)]


def test_info_counts_what_differs_from_the_step_before(bf16_run):
    seen = []
    infos = PtDeltaLog(bf16_run.folder).info(on_tensor=lambda: seen.append(1))
    assert len(seen) == len(SHAPES)
    states = list(bf16_run.states.values())
    changed = [sum(int((a[n] != b[n]).sum()) for n in a) for a, b in itertools.pairwise(states)]
    assert [info.changed for info in infos] == [0, *changed]
    assert [info.kind for info in infos] == ["base", *["difference"] * 3]
    assert [info.parent_step for info in infos] == [None, 0, 0, 0]
    assert infos[1].bytes == (bf16_run.folder / "deltas_step_5.pt").stat().st_size


def test_metadata_names_the_model(bf16_run):
    log = PtDeltaLog(bf16_run.folder)
    assert log.metadata == {}
    path = bf16_run.folder / "run_metadata.json"
    path.write_text(json.dumps({"model_name": "M", "learning_rate": 1e-6, "checkpoint_schedule": [5, 10]}))
    assert log.metadata == {"model": "M", "model_name": "M", "learning_rate": "1e-06"}
    path.write_text("[1]")
    with pytest.raises(DeltaLogError, match=r"run_metadata\.json: holds a list, expected a JSON object"):
        _ = log.metadata


def test_names_of_one_storage_are_tied(tmp_path):
    embed = torch.randn(4, 4)
    torch.save({"embed": embed, "head": embed}, tmp_path / "base_state.pt")
    move = torch.randn(4, 4)
    torch.save({"embed": move, "head": move.clone()}, tmp_path / "deltas_step_1.pt")
    log = PtDeltaLog(tmp_path)
    assert (log.layout.names, dict(log.layout.aliases)) == (("embed",), {"head": "embed"})
    assert log.load(1)["head"] is not None
    for other in (move + 1, move.double()):
        torch.save({"embed": move, "head": other}, tmp_path / "deltas_step_1.pt")
        with pytest.raises(DeltaLogError, match=r"deltas_step_1\.pt: step 1: head and embed are tied .* differ here"):
            PtDeltaLog(tmp_path).load(1)


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        if tied:
            self.head.weight = self.embed.weight


def written_by(model: nn.Module, folder, step: int = 1, move: float = 0.5):
    """The log of a run of this model: `named_parameters()` gives a tied one once, and no buffers."""
    base = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    return write_as_tools_do(folder, [base, {name: t + move for name, t in base.items()}], [step])


def test_a_model_gets_its_parameters_and_keeps_its_buffers(tmp_path):
    model = Model()
    log = PtDeltaLog(written_by(model, tmp_path / "log"))
    expected = model.embed.weight.detach() + 0.5
    log.apply_(model, 1)
    assert torch.equal(model.embed.weight, expected)
    assert model.head.weight is model.embed.weight
    assert model.scale == 2


@pytest.mark.parametrize("equal", [True, False])
def test_a_log_that_lists_both_names_of_a_tied_parameter(tmp_path, equal):
    model = Model()
    weight = model.embed.weight.detach().clone()
    base = {"embed.weight": weight, "head.weight": weight.clone()}
    later = {"embed.weight": weight + 1, "head.weight": weight + (1 if equal else 2)}
    log = PtDeltaLog(write_as_tools_do(tmp_path / "log", [base, later], [1]))
    if equal:
        log.apply_(model, 1)
        assert torch.equal(as_bits(model.head.weight.detach()), as_bits(log.load(1)["head.weight"]))
    else:
        with pytest.raises(
            DeltaLogError, match=r"step 1: head\.weight and embed\.weight are tied in the model, not in"
        ):
            log.apply_(model, 1)


def test_a_model_that_is_not_the_logged_one(tmp_path):
    log = PtDeltaLog(written_by(Model(), tmp_path / "log"))
    before = Model(tied=False)
    with pytest.raises(DeltaLogError, match=r"step 1: the model is not the logged one: head\.weight is not in the log"):
        log.apply_(before, 1)
    with pytest.raises(DeltaLogError, match=r"embed\.weight is missing"):
        log.apply_(nn.Linear(2, 2), 1)
    with pytest.raises(DeltaLogError, match=r"embed\.weight is bfloat16 \[5, 3\], float32 \[5, 3\] in the log"):
        log.apply_(Model().bfloat16(), 1)


def test_open_log_detects_the_format(bf16_run, tmp_path):
    assert isinstance(open_log(bf16_run.folder), PtDeltaLog)
    DeltaLog.create(tmp_path / "log", bf16_run.states[0]).close()
    assert isinstance(open_log(tmp_path / "log"), DeltaLog)
    with pytest.raises(DeltaLogError, match="holds no delta log"):
        open_log(tmp_path)
    DeltaLog.create(bf16_run.folder, bf16_run.states[0]).close()
    with pytest.raises(DeltaLogError, match=r"holds a delta log and a log of \.pt files"):
        open_log(bf16_run.folder)
