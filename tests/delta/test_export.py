"""From a log to a log at another level, and to files that others read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from sparse_opt.delta.export import convert, export_state, export_values
from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import DeltaLogError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.tensors import as_bits

States = dict[int, dict[str, torch.Tensor]]


def assert_same_bits(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bits(found[name]), as_bits(tensor)), name


@pytest.fixture
def run() -> States:
    """bf16 weights at steps 0, 5, 10 and 100, of which a third changes each time."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (64, 48), "layer.0.bias": (8,), "norm.scale": ()}
    state = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    found = {0: state}
    for step in (5, 10, 100):
        state = {
            name: torch.where(torch.rand(t.shape, generator=generator) < 0.3, t * 1.03, t) for name, t in state.items()
        }
        found[step] = state
    return found


def logged(directory, states: States, **options) -> DeltaLog:
    (base, *_), (_, *later) = states.values(), states
    with DeltaLog.create(directory, base, **options) as log:
        for step in later:
            log.append(step, states[step])
    return DeltaLog.open(directory)


@pytest.fixture
def log(run, tmp_path) -> DeltaLog:
    return logged(tmp_path / "log", run, metadata={"model": "M"})


def test_a_log_is_rewritten_at_another_level(log, run, tmp_path):
    seen: list[int] = []
    convert(log, tmp_path / "deep" / "new", level="tight", keyframe_every=2, on_step=seen.append)
    new = DeltaLog.open(tmp_path / "deep" / "new")
    assert new.metadata == {"model": "M"} and tuple(seen) == new.steps == tuple(run)
    assert [new.digest(step) for step in new.steps] == [log.digest(step) for step in log.steps]
    assert [info.kind for info in new.info()] == ["keyframe", "patch", "keyframe", "patch"]
    assert {info.level for info in new.info() if info.kind == "patch"} == {"tight"} and new.verify() == []


def test_settings_and_mask_are_kept(run, tmp_path):
    moved = {n: torch.stack([t != state[n] for state in run.values()]).any(0) for n, t in run[0].items()}
    mask = MaskSet.from_bool(moved)
    source = logged(tmp_path / "a", run, against="base", keyframe_every=3, level="tight", mask=mask)
    convert(source, tmp_path / "b", level="packed")
    new = DeltaLog.open(tmp_path / "b")
    assert (new.settings.level, new.settings.against, new.settings.keyframe_every) == ("packed", "base", 3)
    assert new.mask_digest == source.mask_digest == mask.digest
    assert [new.digest(step) for step in new.steps] == [source.digest(step) for step in source.steps]


def test_buffers_are_not_made_parameters(tmp_path):
    DeltaLog.create(tmp_path / "log", nn.BatchNorm1d(3)).close()
    with pytest.raises(DeltaLogError, match="3 of its tensors are buffers, the first of them num_batches_tracked"):
        convert(DeltaLog.open(tmp_path / "log"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_conversion_that_fails_leaves_nothing(log, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    with pytest.raises(DeltaLogError, match="full: cannot be written: exists and is not an empty folder"):
        convert(log, tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]
    path = tmp_path / "log" / "step_00000010.patch.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DeltaLogError, match="step 10: damaged"):
        convert(log, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "log"]


def test_an_exported_state_is_the_state(log, run, tmp_path):
    export_state(log, 10, tmp_path / "out" / "state.safetensors")
    assert_same_bits(
        dict(sorted(load_file(tmp_path / "out" / "state.safetensors").items())),
        dict(sorted(run[10].items())),
    )
    with safe_open(tmp_path / "out" / "state.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["digest"] == log.digest(10)
    with pytest.raises(DeltaLogError, match="step 11 is not logged"):
        export_state(log, 11, tmp_path / "never.safetensors")
    with pytest.raises(DeltaLogError, match=r"ends in \.pt, expected \.safetensors"):
        export_state(log, 10, tmp_path / "never.pt")
    assert not list(tmp_path.glob("*never*"))


def overwrite(state, file):
    """What grail's `apply_sparse_delta` and vLLM's loader of `CheckpointWeightPatch` do with indices and values."""
    found = {name: tensor.clone() for name, tensor in state.items()}
    for key, positions in file.items():
        if key.endswith(".indices"):
            name = key.removesuffix(".indices")
            found[name].view(-1)[positions.long()] = file[f"{name}.values"]
    return found


def test_exported_values_lead_from_one_state_to_the_other(log, run, tmp_path):
    path = tmp_path / "values.safetensors"
    changed = export_values(log, 5, 100, path)
    file = load_file(path)
    assert_same_bits(overwrite(run[5], file), run[100])
    assert_same_bits(overwrite(run[100], file), run[100])
    assert changed == sum(int((run[5][n] != run[100][n]).sum()) for n in run[5])
    for key, part in file.items():
        assert part.dim() == 1
        if key.endswith(".indices"):
            assert part.dtype == torch.int32
            assert (part.diff() > 0).all()
        else:
            assert part.dtype == torch.bfloat16
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    assert (metadata["since"], metadata["step"], metadata.get("model")) == ("5", "100", log.metadata.get("model"))
    assert (metadata["since_digest"], metadata["step_digest"]) == (log.digest(5), log.digest(100))
    shapes = json.loads(metadata["shapes"])
    assert shapes == {n: list(t.shape) for n, t in run[5].items() if f"{n}.indices" in file}
    with pytest.raises(DeltaLogError, match="since is step 10, expected a step before 10"):
        export_values(log, 10, 10, path)


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
