"""From `.pt` files to a delta log, and from any log to files that others read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from sparse_opt.delta.export import convert, export_state, export_values
from sparse_opt.delta.log import DeltaLog
from sparse_opt.delta.pt import PtDeltaLog, export_pt
from sparse_opt.errors import DeltaLogError
from sparse_opt.masks.mask_set import MaskSet

from .conftest import assert_same_bits, walk


@pytest.fixture
def any_log(bf16_run, tmp_path, request):
    """The same run as a folder of .pt files and as a delta log."""
    if request.param == "pt":
        return PtDeltaLog(bf16_run.folder, dtype=torch.bfloat16)
    with DeltaLog.create(tmp_path / "log", bf16_run.states[0], metadata={"model": "M"}) as log:
        for step, state in list(bf16_run.states.items())[1:]:
            log.append(step, state)
    return DeltaLog.open(tmp_path / "log")


both_kinds = pytest.mark.parametrize("any_log", ["pt", "delta_log"], indirect=True)


@pytest.mark.parametrize("level", ["fast", "packed", "tight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["bf16", "stored"])
def test_converted_states_have_the_same_bits_and_digests(bf16_run, tmp_path, level, dtype):
    source = PtDeltaLog(bf16_run.folder, dtype=dtype)
    seen: list[int] = []
    convert(source, tmp_path / "deep" / "new", level=level, metadata={"model": "M"}, on_step=seen.append)
    assert seen == list(source.steps)
    log = DeltaLog.open(tmp_path / "deep" / "new")
    assert log.steps == source.steps
    assert log.layout == source.layout
    assert log.metadata == {"model": "M"}
    for step in source.steps:
        assert_same_bits(log.load(step), source.load(step))
        assert log.digest(step) == source.digest(step)
    assert log.verify() == []
    assert {info.level for info in log.info() if info.kind == "patch"} == {level}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"]


def test_a_delta_log_is_converted_to_another_level(bf16_run, tmp_path):
    convert(PtDeltaLog(bf16_run.folder), tmp_path / "a", level="fast", metadata={"model": "M"})
    source = DeltaLog.open(tmp_path / "a")
    convert(source, tmp_path / "b", level="tight", keyframe_every=2)
    log = DeltaLog.open(tmp_path / "b")
    assert log.metadata == {"model": "M"}
    assert [log.digest(step) for step in log.steps] == [source.digest(step) for step in source.steps]
    assert [info.kind for info in log.info()] == ["keyframe", "patch", "keyframe", "patch"]


def test_a_delta_log_keeps_its_settings_and_its_mask(bf16_run, tmp_path):
    states = list(bf16_run.states.values())
    moved = {n: torch.stack([t != state[n] for state in states[1:]]).any(0) for n, t in states[0].items()}
    mask = MaskSet.from_bool(moved)
    with DeltaLog.create(tmp_path / "a", states[0], against="base", keyframe_every=3, level="fast", mask=mask) as log:
        for step, state in enumerate(states[1:], 1):
            log.append(step, state)
    source = DeltaLog.open(tmp_path / "a")
    convert(source, tmp_path / "b", level="tight")
    log = DeltaLog.open(tmp_path / "b")
    assert (log.settings.level, log.settings.against, log.settings.keyframe_every) == ("tight", "base", 3)
    assert log.mask_digest == source.mask_digest == mask.digest
    assert [log.digest(step) for step in log.steps] == [source.digest(step) for step in source.steps]


def test_tied_names_stay_tied(tmp_path):
    (tmp_path / "deltas").mkdir()
    embed, move = torch.randn(4, 4), torch.randn(4, 4)
    torch.save({"embed": embed, "head": embed}, tmp_path / "deltas" / "base_state.pt")
    torch.save({"embed": move, "head": move}, tmp_path / "deltas" / "deltas_step_1.pt")
    convert(PtDeltaLog(tmp_path / "deltas"), tmp_path / "log")
    assert dict(DeltaLog.open(tmp_path / "log").layout.aliases) == {"head": "embed"}


def test_buffers_are_not_made_parameters(tmp_path):
    DeltaLog.create(tmp_path / "log", nn.BatchNorm1d(3)).close()
    with pytest.raises(DeltaLogError, match="3 of its tensors are buffers, the first of them num_batches_tracked"):
        convert(DeltaLog.open(tmp_path / "log"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_conversion_that_fails_leaves_nothing(bf16_run, tmp_path):
    path = bf16_run.folder / "deltas_step_100.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DeltaLogError, match=r"deltas_step_100\.pt: step 100: damaged"):
        convert(PtDeltaLog(bf16_run.folder), tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    path.unlink()
    with pytest.raises(DeltaLogError, match="full: cannot be written: exists and is not an empty folder"):
        convert(PtDeltaLog(bf16_run.folder), tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deltas", "full"]
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]


@both_kinds
def test_an_exported_state_is_the_state(any_log, bf16_run, tmp_path):
    export_state(any_log, 10, tmp_path / "out" / "state.safetensors")
    assert_same_bits(
        dict(sorted(load_file(tmp_path / "out" / "state.safetensors").items())),
        dict(sorted(bf16_run.states[10].items())),
    )
    with safe_open(tmp_path / "out" / "state.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["digest"] == any_log.digest(10)
    with pytest.raises(DeltaLogError, match="step 11 is not logged"):
        export_state(any_log, 11, tmp_path / "never.safetensors")
    with pytest.raises(DeltaLogError, match=r"ends in \.pt, expected \.safetensors"):
        export_state(any_log, 10, tmp_path / "never.pt")
    assert not list(tmp_path.glob("*never*"))


def overwrite(state, file):
    """What grail's `apply_sparse_delta` and vLLM's loader of `CheckpointWeightPatch` do with indices and values."""
    found = {name: tensor.clone() for name, tensor in state.items()}
    for key, positions in file.items():
        if key.endswith(".indices"):
            name = key.removesuffix(".indices")
            found[name].view(-1)[positions.long()] = file[f"{name}.values"]
    return found


@both_kinds
def test_exported_values_lead_from_one_state_to_the_other(any_log, bf16_run, tmp_path):
    path = tmp_path / "values.safetensors"
    changed = export_values(any_log, 5, 100, path)
    file = load_file(path)
    assert_same_bits(overwrite(bf16_run.states[5], file), bf16_run.states[100])
    assert_same_bits(overwrite(bf16_run.states[100], file), bf16_run.states[100])
    assert changed == sum(int((bf16_run.states[5][n] != bf16_run.states[100][n]).sum()) for n in bf16_run.states[5])
    for key, part in file.items():
        assert part.dim() == 1
        if key.endswith(".indices"):
            assert part.dtype == torch.int32
            assert (part.diff() > 0).all()
        else:
            assert part.dtype == torch.bfloat16
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    assert (metadata["since"], metadata["step"], metadata.get("model")) == ("5", "100", any_log.metadata.get("model"))
    assert (metadata["since_digest"], metadata["step_digest"]) == (any_log.digest(5), any_log.digest(100))
    shapes = json.loads(metadata["shapes"])
    assert shapes == {n: list(t.shape) for n, t in bf16_run.states[5].items() if f"{n}.indices" in file}
    with pytest.raises(DeltaLogError, match="since is step 10, expected a step before 10"):
        export_values(any_log, 10, 10, path)


def test_exported_values_keep_any_bits(tmp_path):
    old = torch.tensor([1.0, 0.0, float("nan"), 2.0])
    new = torch.tensor([1.0, -0.0, float("nan"), float("-inf")])
    new.view(torch.int32)[2] ^= 1  # another NaN
    with DeltaLog.create(tmp_path / "log", {"w": old}) as log:
        log.append(1, {"w": new})
    export_values(DeltaLog.open(tmp_path / "log"), 0, 1, tmp_path / "values.safetensors")
    file = load_file(tmp_path / "values.safetensors")
    assert file["w.indices"].tolist() == [1, 2, 3]
    assert_same_bits(overwrite({"w": old}, file), {"w": new})


@both_kinds
def test_exported_pt_files_are_read_back(any_log, bf16_run, tmp_path):
    seen: list[int] = []
    assert export_pt(any_log, [5, 100], tmp_path / "out", on_step=seen.append) == {5: 0, 100: 0}
    assert seen == [5, 100]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "base_state.pt",
        "deltas_step_100.pt",
        "deltas_step_5.pt",
    ]
    for step in (5, 100):
        ours, theirs = (torch.load(folder / f"deltas_step_{step}.pt") for folder in (tmp_path / "out", bf16_run.folder))
        assert_same_bits(ours, theirs)
    log = PtDeltaLog(tmp_path / "out", dtype=torch.bfloat16)
    assert_same_bits(log.load(100), bf16_run.states[100])


def test_elements_that_a_difference_does_not_give_back_are_counted(tmp_path):
    old = {"w": torch.tensor([1.0, 1.0, 0.0]).bfloat16(), "n": torch.tensor([3])}
    new = {"w": torch.tensor([-0.0, 1.0078125 * 2.0**-20, 1.5]).bfloat16(), "n": torch.tensor([4])}
    with DeltaLog.create(tmp_path / "log", old) as log:
        log.append(1, new)
    assert export_pt(DeltaLog.open(tmp_path / "log"), [1], tmp_path / "out") == {1: 2}
    assert list(torch.load(tmp_path / "out" / "base_state.pt")) == ["w"]


def test_what_pt_files_cannot_hold(tmp_path):
    with DeltaLog.create(tmp_path / "log", {"w": torch.zeros(2, dtype=torch.float64)}) as log:
        log.append(1, {"w": torch.ones(2, dtype=torch.float64)})
    log = DeltaLog.open(tmp_path / "log")
    with pytest.raises(DeltaLogError, match="w is float64, which files of fp32 differences do not hold"):
        export_pt(log, [1], tmp_path / "out")
    for steps in ([], [0], [0, 1]):
        with pytest.raises(DeltaLogError, match="expected steps after 0, the base"):
            export_pt(log, steps, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    states = walk(1)
    with DeltaLog.create(tmp_path / "log", states[0]) as log:
        log.append(1, states[1])

    def full(tensors, file):
        raise RuntimeError("[enforce fail] . PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DeltaLogError, match=r"out: cannot be written: base_state\.pt: .*failed writing file"):
        export_pt(DeltaLog.open(tmp_path / "log"), [1], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
