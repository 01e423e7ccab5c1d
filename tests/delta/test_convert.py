"""From a log to a log with other keyframes, or with some of its steps."""

import pytest
import torch
from torch import nn

from sparse_opt.delta.convert import convert
from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import DeltaLogError
from sparse_opt.masks.mask_set import MaskSet

States = dict[int, dict[str, torch.Tensor]]


@pytest.fixture
def run():
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
def log(run, tmp_path):
    return logged(tmp_path / "log", run, metadata={"model": "M"})


def test_a_log_is_rewritten_with_other_keyframes(log, run, tmp_path):
    seen: list[int] = []
    convert(log, tmp_path / "deep" / "new", keyframe_every=2, on_step=seen.append)
    new = DeltaLog.open(tmp_path / "deep" / "new")
    assert new.metadata == {"model": "M"} and tuple(seen) == new.steps == tuple(run)
    assert [new.digest(step) for step in new.steps] == [log.digest(step) for step in log.steps]
    assert [info.kind for info in new.info()] == ["keyframe", "patch", "keyframe", "patch"]
    assert new.verify() == []


def test_settings_and_mask_are_kept(run, tmp_path):
    moved = {n: torch.stack([t != state[n] for state in run.values()]).any(0) for n, t in run[0].items()}
    mask = MaskSet.from_bool(moved)
    source = logged(tmp_path / "a", run, keyframe_every=3, mask=mask)
    convert(source, tmp_path / "b")
    new = DeltaLog.open(tmp_path / "b")
    assert new.keyframe_every == 3
    assert new.mask_digest == source.mask_digest == mask.digest
    assert [new.digest(step) for step in new.steps] == [source.digest(step) for step in source.steps]


def test_chosen_steps_of_a_module_with_buffers(tmp_path):
    model = nn.BatchNorm1d(3)
    with DeltaLog.create(tmp_path / "log", model) as log:
        for step in (1, 2, 3):
            model(torch.randn(4, 3))
            log.append(step)
    convert(log, tmp_path / "new", steps=[3, 1])
    new = DeltaLog.open(tmp_path / "new")
    assert new.steps == (0, 1, 3) and new.layout == log.layout and new.verify() == []
    assert [new.digest(step) for step in new.steps] == [log.digest(step) for step in new.steps]
    with pytest.raises(DeltaLogError, match="step 4 is not logged; 4 are, 0 to 3; the nearest is 3"):
        convert(log, tmp_path / "never", steps=[4])
    assert not (tmp_path / "never").exists()


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
