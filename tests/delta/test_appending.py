"""Appending: refused calls, continuing after a stop, the writer's lock; and the removal of the last steps."""

import os

import pytest
import torch
from damage import flip
from torch import nn

from sparse_opt import DeltaLog, MaskSet, SparseAdamW
from sparse_opt.errors import DeltaLogError
from sparse_opt.tensors import as_bits


def test_steps_ascend(tmp_path):
    state = {"w": torch.zeros(4)}
    log = DeltaLog.create(tmp_path / "log", state)
    log.append(5)
    for step in (5, 4, 0, -1, True, 6.0, "7"):
        with pytest.raises(DeltaLogError, match=f"step is {step!r}, expected a step after 5"):
            log.append(step)  # type: ignore[arg-type]
    log.append(6)
    assert log.steps == (0, 5, 6)


def test_base_weights_are_step_0_and_no_later_one(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with optimizer.base_weights():
        log = DeltaLog.create(tmp_path / "log", model)
        for state in (model, model.state_dict()):
            with pytest.raises(DeltaLogError, match="step 1: the model holds its base weights: leave base_weights"):
                log.append(1, state)
    log.append(1)
    log.flush()
    assert log.step_of(model) == 1
    with optimizer.base_weights():
        assert log.step_of(model) == 0


def test_create_refuses_a_directory_with_a_log(tmp_path):
    state = {"w": torch.zeros(4)}
    DeltaLog.create(tmp_path / "a" / "b", state).close()
    with pytest.raises(DeltaLogError, match="holds a delta log already"):
        DeltaLog.create(tmp_path / "a" / "b", state)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DeltaLogError, match="cannot be written"):
        DeltaLog.create(tmp_path / "file", state)
    with pytest.raises(DeltaLogError, match="keyframe_every is 0"):
        DeltaLog.create(tmp_path / "c", state, keyframe_every=0)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"w": torch.zeros(4)}, "b is missing"),
        ({"w": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(1)}, "c is not in the log"),
        ({"w": torch.zeros(2, 2), "b": torch.zeros(2)}, r"w is float32 \[2, 2\], float32 \[4\] in the log"),
        ({"w": torch.zeros(4).half(), "b": torch.zeros(2)}, r"w is float16 \[4\], float32 \[4\] in the log"),
    ],
    ids=["missing", "more", "shape", "dtype"],
)
def test_another_model_is_refused(tmp_path, other, message):
    log = DeltaLog.create(tmp_path / "log", {"w": torch.zeros(4), "b": torch.zeros(2)})
    for call in (lambda: log.append(3, other), lambda: log.apply_(other, 0), lambda: log.step_of(other)):
        with pytest.raises(DeltaLogError, match=f"the model is not the logged one: {message}"):
            call()
    assert log.steps == (0,)


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path):
    state = {"w": torch.zeros(4)}
    first = DeltaLog.create(tmp_path / "log", state)
    second = DeltaLog.open(tmp_path / "log", state)
    assert second.load(0).keys() == {"w"}
    with pytest.raises(DeltaLogError, match="another writer has this delta log open"):
        second.append(1)
    first.append(1)
    first.close()
    assert second.append(2).wait().step == 2
    # A closed log can still be read, and locks the directory again when it is written to.
    assert first.steps == (0, 1, 2)
    with pytest.raises(DeltaLogError, match="another writer"):
        first.append(3)
    del second
    state["w"] += 1
    assert first.append(3).wait().changed == 4
    assert first.verify() == []


def test_appending_needs_a_model(logged):
    with pytest.raises(DeltaLogError, match="step 9: no model given"):
        DeltaLog.open(logged.directory).append(9)


def test_appending_after_a_stop(logged, states, same_bits):
    """Also from a state that was never logged, as after a checkpoint newer than the last logged step."""
    state = states.change(states.change(logged.states[8]))
    with DeltaLog.open(logged.directory, state) as log:
        assert log.step_of(state) is None
        # keyframe_every is 3 and counts on over the stop: steps 5 (keyframe), 7, 8, then 9.
        keyframe = log.append(9).wait()
        moved = sum(int((as_bits(state[name]) != as_bits(before)).sum()) for name, before in logged.states[8].items())
        assert (keyframe.kind, keyframe.changed) == ("keyframe", moved) and moved > 0
        after = states.change(state, 0.05)
        assert log.append(10, after).wait().kind == "patch"
    for step, expected in {**logged.states, 9: state, 10: after}.items():
        same_bits(logged.load(step), expected)
    assert DeltaLog.open(logged.directory).verify() == []


def test_appending_tensors_in_another_order(logged, states, same_bits):
    state = states.change(logged.states[8])
    with DeltaLog.open(logged.directory) as log:
        log.append(9, dict(reversed(state.items())))
    same_bits(logged.load(9), state)


def test_appending_needs_an_intact_last_step(logged):
    path = logged.file(8)
    flip(path)
    with pytest.raises(DeltaLogError, match=f"{path}: step 8: damaged"):
        DeltaLog.open(logged.directory, logged.states[8]).append(9)


def test_leftovers_of_a_killed_writer(logged, same_bits):
    """Readers ignore them, and the next writer removes them; files of other names are kept."""
    ours = {".step_00000009.patch.safetensors.123.abcd.tmp", ".mask.safetensors.123.abcd.tmp", ".tmpA1b2C3"}
    others = {"step_00000009.patch.safetensors.tmp", ".tmpA1b2C34", ".step_9.tmp"}
    for name in ours | others:
        (logged.directory / name).write_bytes(logged.file(8).read_bytes()[:100])
    log = DeltaLog.open(logged.directory, logged.states[1])
    assert log.steps == tuple(logged.states)
    assert log.verify() == []
    assert ours < {path.name for path in logged.directory.iterdir()}
    log.append(9)
    same_bits(log.load(9), logged.states[1])
    found = {path.name for path in logged.directory.iterdir()}
    assert others < found and not ours & found


@pytest.mark.parametrize("sharded", ["FullyShardedDataParallel", "zero3"])
def test_sharded_models_are_refused(tmp_path, sharded):
    model = nn.Linear(3, 2)
    if sharded == "zero3":
        model.weight.ds_id = 0  # type: ignore[attr-defined]
        message = "weight is sharded by DeepSpeed ZeRO-3: log a full state dict"
    else:
        model = type("FullyShardedDataParallel", (nn.Sequential,), {})(model)
        message = "the model is sharded by FullyShardedDataParallel: log a full state dict"
    with pytest.raises(DeltaLogError, match=message):
        DeltaLog.create(tmp_path / "log", model)


def test_a_process_that_was_forked_and_lives_on_does_not_hold_the_directory(tmp_path):
    state = {"w": torch.zeros(4)}
    log = DeltaLog.create(tmp_path / "log", state)
    leave = os.pipe()
    child = os.fork()
    if not child:
        os.read(leave[0], 1)
        os._exit(0)
    log.close()
    assert DeltaLog.open(tmp_path / "log", state).append(1).wait().step == 1
    os.write(leave[1], b"x")
    os.waitpid(child, 0)


@pytest.fixture
def log(tmp_path):
    """Steps 0, 2, 4, 6 of a small state, and the state."""
    state = {"weight": torch.arange(64, dtype=torch.float32), "bias": torch.zeros(3, dtype=torch.bfloat16)}
    log = DeltaLog.create(tmp_path / "log", state, keyframe_every=2)
    for step in (2, 4, 6):
        state["weight"][step] += 0.5
        log.append(step)
    return log, state


@pytest.mark.parametrize(
    ("after", "left"), [(0, (0,)), (3, (0, 2)), (4, (0, 2, 4)), (6, (0, 2, 4, 6)), (9, (0, 2, 4, 6))]
)
def test_truncate_removes_the_later_steps_alone_and_the_run_continues(log, after, left):
    log, state = log
    log.flush()
    digests = {step: log.digest(step) for step in left}
    log.truncate(after)
    assert log.steps == left
    assert not log.verify()
    assert {step: log.digest(step) for step in left} == digests
    for step in {2, 4, 6} - set(left):
        state["weight"][step] -= 0.5
    assert log.step_of(state) == left[-1]
    state["weight"][7] = -1.0
    log.append(11, state)
    log.close()
    assert log.steps == (*left, 11)
    assert torch.equal(log.load(11)["weight"], state["weight"])


def test_a_truncation_that_is_refused_removes_nothing(log):
    log, _ = log
    with pytest.raises(DeltaLogError, match="another writer has this delta log open"):
        DeltaLog.open(log.directory).truncate(2)
    with pytest.raises(DeltaLogError, match="truncating after step -1: the log begins with step 0"):
        log.truncate(-1)
    assert log.steps == (0, 2, 4, 6)
