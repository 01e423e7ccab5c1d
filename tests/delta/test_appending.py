"""Appending: what is refused, going on after a stop, and what a failed or killed write leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import DeltaLog, atomic_files
from sparse_opt.errors import DeltaLogError

Compare = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


def test_steps_ascend(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4)}
    log = DeltaLog.create(tmp_path / "log", state)
    log.append(5)
    for step in (5, 4, 0, -1, True, 6.0, "7"):
        with pytest.raises(DeltaLogError, match=f"step {step!r} cannot follow step 5: steps ascend"):
            log.append(step)  # type: ignore[arg-type]
    log.append(6)
    assert log.steps == (0, 5, 6)


def test_create_wants_a_directory_without_a_log(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4)}
    DeltaLog.create(tmp_path / "a" / "b", state).close()
    with pytest.raises(DeltaLogError, match="holds a delta log already"):
        DeltaLog.create(tmp_path / "a" / "b", state)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DeltaLogError, match="cannot be written"):
        DeltaLog.create(tmp_path / "file", state)
    with pytest.raises(DeltaLogError, match="keyframe_every is 0"):
        DeltaLog.create(tmp_path / "c", state, keyframe_every=0)


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
def test_another_model_is_refused(tmp_path: Path, other: dict[str, Tensor], message: str) -> None:
    log = DeltaLog.create(tmp_path / "log", {"w": torch.zeros(4), "b": torch.zeros(2)})
    for call in (lambda: log.append(3, other), lambda: log.apply_(other, 0), lambda: log.step_of(other)):
        with pytest.raises(DeltaLogError, match=f"the model is not the logged one: {message}"):
            call()
    assert log.steps == (0,)


def test_another_tie_is_refused(tmp_path: Path) -> None:
    w = torch.zeros(3)
    log = DeltaLog.create(tmp_path / "log", {"a": w, "b": w})
    with pytest.raises(DeltaLogError, match="b is not in the log"):
        log.append(1, {"a": w, "b": torch.zeros(3)})


def test_many_mismatches_stay_one_short_line(tmp_path: Path) -> None:
    log = DeltaLog.create(tmp_path / "log", {f"w{i}": torch.zeros(1) for i in range(500)})
    with pytest.raises(DeltaLogError, match="and 497 more$") as error:
        log.append(1, {})
    assert len(str(error.value)) < 1500


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4)}
    first = DeltaLog.create(tmp_path / "log", state)
    second = DeltaLog.open(tmp_path / "log", state)
    assert second.load(0).keys() == {"w"}
    with pytest.raises(DeltaLogError, match="another writer has this delta log open"):
        second.append(1)
    first.append(1)
    first.close()
    assert second.append(2).step == 2
    # A closed log reads on, and takes the directory again when it is written to.
    assert first.steps == (0, 1, 2)
    with pytest.raises(DeltaLogError, match="another writer"):
        first.append(3)
    del second
    state["w"] += 1
    assert first.append(3).changed == 4
    assert first.verify() == []


def test_appending_needs_a_model(logged: Any) -> None:
    with pytest.raises(DeltaLogError, match="step 9: no model given"):
        DeltaLog.open(logged.directory).append(9)


def test_going_on_after_a_stop(logged: Any, states: Any, same_bits: Compare) -> None:
    """Also from a state that was never logged, as after a checkpoint newer than the last logged step."""
    state = states.change(states.change(logged.states[8]))
    with DeltaLog.open(logged.directory, state) as log:
        assert log.step_of(state) is None
        # keyframe_every is 3 and counts on over the stop: steps 5 (keyframe), 7, 8, then 9.
        assert log.append(9).kind == "keyframe"
        after = states.change(state, 0.05)
        assert log.append(10, after).kind == "patch"
    for step, wanted in {**logged.states, 9: state, 10: after}.items():
        same_bits(logged.load(step), wanted)
    assert DeltaLog.open(logged.directory).verify() == []


def test_going_on_with_tensors_in_another_order(logged: Any, states: Any, same_bits: Compare) -> None:
    state = states.change(logged.states[8])
    with DeltaLog.open(logged.directory) as log:
        log.append(9, dict(reversed(state.items())))
    same_bits(logged.load(9), state)


def test_going_on_wants_a_sound_last_step(logged: Any) -> None:
    path = logged.file(8)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DeltaLogError, match=f"{path}: step 8: damaged"):
        DeltaLog.open(logged.directory, logged.states[8]).append(9)


def test_leftovers_of_a_killed_writer_are_ignored(logged: Any, same_bits: Compare) -> None:
    for name in (".step_00000009.patch.safetensors.123.abcd.tmp", "step_00000009.patch.safetensors.tmp"):
        (logged.directory / name).write_bytes(logged.file(8).read_bytes()[:100])
    log = DeltaLog.open(logged.directory, logged.states[1])
    assert log.steps == tuple(logged.states)
    assert log.verify() == []
    log.append(9)
    same_bits(log.load(9), logged.states[1])


@pytest.mark.parametrize("broken_call", ["save_file", "fsync", "replace"])
@pytest.mark.parametrize("step_before", [7, 8], ids=["patch", "keyframe"])
def test_a_failed_write_loses_nothing_and_can_go_on(
    logged: Any, same_bits: Compare, states: Any, monkeypatch: pytest.MonkeyPatch, broken_call: str, step_before: int
) -> None:
    if step_before == 7:
        logged.file(8).unlink()
    state = states.change(logged.states[step_before])
    log = DeltaLog.open(logged.directory, state)
    before = sorted(os.listdir(logged.directory))

    def disk_full(*args: Any, **kwargs: Any) -> None:
        if broken_call == "save_file":
            Path(args[1]).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files if broken_call == "save_file" else os, broken_call, disk_full)
        with pytest.raises(DeltaLogError, match=r"step 20: cannot be written: .*No space left on device"):
            log.append(20)
    assert sorted(os.listdir(logged.directory)) == before
    assert log.verify() == []
    later = states.change(state)
    log.append(21, later)
    same_bits(log.load(21), later)
    assert log.verify() == []


# Appends step 1, then step 2 in forked copies, each of which kills itself at another point of the write.
KILLED_WRITER = """
import os, shutil, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # so that no thread pool is lost in the forks
from sparse_opt import DeltaLog, atomic_files

root = Path(sys.argv[1])
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
state = {"w": torch.arange(50.0), "n": torch.tensor(0)}
log = DeltaLog.create(root / "start", state)
state["w"][::7] += 1
log.append(1)
log.close()
state["w"][::5] -= 1
state["n"] += 1

save_file, fsync, replace = atomic_files.save_file, os.fsync, os.replace
synced = []

def half_written(tensors, path, metadata):
    save_file(tensors, path, metadata)
    os.truncate(path, os.path.getsize(path) // 2)
    kill()

def second_fsync(descriptor):
    synced.append(descriptor)
    if len(synced) == 2:
        kill()
    fsync(descriptor)

points = {
    "before_write": lambda: setattr(atomic_files, "save_file", lambda *_, **__: kill()),
    "half_written": lambda: setattr(atomic_files, "save_file", half_written),
    "before_fsync": lambda: setattr(os, "fsync", lambda _: kill()),
    "before_rename": lambda: setattr(os, "replace", lambda *_: kill()),
    "after_rename": lambda: setattr(os, "replace", lambda *names: (replace(*names), kill())),
    "before_directory_fsync": lambda: setattr(os, "fsync", second_fsync),
    "acknowledged": lambda: None,
}
for point, arm in points.items():
    shutil.copytree(root / "start", root / point)
    child = os.fork()
    if not child:
        log = DeltaLog.open(root / point, state)
        arm()
        log.append(2)
        print(point, "acknowledged", flush=True)
        kill()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def test_killed_at_every_point_of_a_write(tmp_path: Path, same_bits: Compare) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["acknowledged"] * 2
    one = {"w": torch.arange(50.0), "n": torch.tensor(0)}
    one["w"][::7] += 1
    two = {"w": one["w"].clone(), "n": torch.tensor(1)}
    two["w"][::5] -= 1
    points = {
        "before_write": (0, 1),
        "half_written": (0, 1),
        "before_fsync": (0, 1),
        "before_rename": (0, 1),
        "after_rename": (0, 1, 2),
        "before_directory_fsync": (0, 1, 2),
        "acknowledged": (0, 1, 2),
    }
    for point, steps in points.items():
        log = DeltaLog.open(tmp_path / point, two)
        assert log.steps == steps, point
        assert log.verify() == []
        same_bits(log.load(1), one)
        # The dead writer's lock is gone with it.
        log.append(3)
        for step in (*steps[2:], 3):
            same_bits(log.load(step), two)
        log.close()
    assert [p.name.endswith(".tmp") for p in (tmp_path / "half_written").iterdir()].count(True) == 1


def test_the_model_of_create_is_remembered(tmp_path: Path, same_bits: Compare) -> None:
    model = nn.Linear(3, 2)
    with DeltaLog.create(tmp_path / "log", model) as log:
        with torch.no_grad():
            model.weight[0, 1] = 7
        assert log.append(1).changed == 1
        same_bits(log.load(1), model.state_dict())
