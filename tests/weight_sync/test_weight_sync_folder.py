"""The transport by a folder: a delta log that receivers follow, restart on, and refuse when it is damaged."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from samples import bits, change, clones, make_weights, same_bits

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.cli.main import main
from sparse_opt.errors import DeltaLogError, WeightSyncError
from sparse_opt.weight_sync import Destination, WeightReceiver
from sparse_opt.weight_sync.transports import FolderReceiver

PATTERNS = ["element", "run16", "tile64"]


@pytest.mark.parametrize("keyframe_every", [None, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_receivers_follow_restart_and_start_late(
    tmp_path: Path, pattern: str, keyframe_every: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = make_weights("mixed")
    mask = MaskSet.random(weights, density=0.3, pattern=pattern)
    copy, base = clones(weights), clones(weights)
    with DeltaLog.create(tmp_path, weights, mask=mask, keyframe_every=keyframe_every) as log:
        receiver = FolderReceiver(WeightReceiver(copy), tmp_path)
        assert receiver.receive(0) == 0
        for step in range(10, 90, 10):
            change(weights, mask, 0.0 if step == 50 else 0.02, seed=step)
            log.append(step).wait()
            if step in (40, 50):
                continue  # two steps that are received with the next one
            if step == 30:  # a new process, with the weights of the old one; the first step is a state
                receiver = FolderReceiver(WeightReceiver(copy), tmp_path)
            assert receiver.receive(0) == step
            assert same_bits(weights, copy)
        late = clones(base)
        assert FolderReceiver(WeightReceiver(late), tmp_path).receive(0) == 80
        assert same_bits(weights, late)
    with pytest.raises(WeightSyncError, match=r": no new step within 0 s, the last one is 80$"):
        receiver.receive(0)
    assert main(["delta", "verify", "--delta_log_dir", str(tmp_path)]) == 0
    assert "all 9 steps" in capsys.readouterr().out


@pytest.mark.gpu
def test_weights_on_a_gpu_follow(tmp_path: Path) -> None:
    weights = make_weights("mixed", "cuda")
    mask = MaskSet.random(weights, density=0.3)
    copy = clones(weights)
    receiver = FolderReceiver(WeightReceiver(copy), tmp_path, device="cuda")
    with DeltaLog.create(tmp_path, weights, mask=mask) as log:
        assert receiver.receive(0) == 0
        for step in (1, 2, 3):
            change(weights, mask, 0.1, seed=step)
            log.append(step).wait()
            assert receiver.receive(0) == step and same_bits(weights, copy)


def test_a_receiver_may_start_before_the_log(tmp_path: Path) -> None:
    weights = make_weights("bf16")
    mask = MaskSet.random(weights, density=0.1)
    copy = clones(weights)
    receiver = FolderReceiver(WeightReceiver(copy), tmp_path / "log")
    with pytest.raises(WeightSyncError, match=r"log: no new step within 0 s, none was found$"):
        receiver.receive(0)

    def train() -> None:
        time.sleep(0.2)
        change(weights, mask, 0.5, seed=1)
        DeltaLog.create(tmp_path / "log", weights, mask=mask).close()

    thread = threading.Thread(target=train)
    thread.start()
    assert receiver.receive(60) == 0
    thread.join()
    assert same_bits(weights, copy)


def test_steps_are_written_to_destinations(tmp_path: Path) -> None:
    """Half of the columns of one weight and all of another, side by side in one tensor, as in an engine."""
    weights = {"q": torch.randn(6, 8), "k": torch.randn(4, 8)}
    mask = MaskSet.random(weights, density=0.5)
    fused = torch.cat([weights["q"][:, :4], weights["k"][:, :4]])
    places = {
        "q": [Destination(fused[:6], columns=(0, 4))],
        "k": [Destination(fused[6:], columns=(0, 4))],
    }
    receiver = FolderReceiver(WeightReceiver(None, destinations=places), tmp_path)
    with DeltaLog.create(tmp_path, weights, mask=mask) as log:
        receiver.receive(0)
        for step in (1, 2):
            change(weights, mask, 0.5, seed=step)
            log.append(step).wait()
            assert receiver.receive(0) == step
            assert torch.equal(bits(fused), bits(torch.cat([weights["q"][:, :4], weights["k"][:, :4]]).clone()))


def test_a_run_that_is_continued_from_an_earlier_step(tmp_path: Path) -> None:
    weights = make_weights("bf16")
    mask = MaskSet.random(weights, density=0.3)
    copy = clones(weights)
    receiver = FolderReceiver(WeightReceiver(copy), tmp_path)
    log = DeltaLog.create(tmp_path, weights, mask=mask)
    kept = {}
    for step in range(1, 7):
        change(weights, mask, 0.1, seed=step)
        log.append(step).wait()
        kept[step] = clones(weights)
    assert receiver.receive(0) == 6
    log.truncate(after=4)
    assert receiver.receive(0) == 4 and same_bits(kept[4], copy)
    log = DeltaLog.open(tmp_path)
    change(weights, mask, 0.1, seed=7)  # another step 6
    log.append(6, weights).wait()
    assert receiver.receive(0) == 6 and same_bits(weights, copy)
    change(weights, mask, 0.1, seed=8)
    log.append(8, weights).wait()
    assert receiver.receive(0) == 8 and same_bits(weights, copy)
    log.close()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "another run"])
def test_damage_is_named_and_leaves_the_weights(tmp_path: Path, damage: str) -> None:
    weights = make_weights("bf16")
    mask = MaskSet.random(weights, density=0.3)
    copy = clones(weights)
    receiver = FolderReceiver(WeightReceiver(copy), tmp_path / "log")
    with DeltaLog.create(tmp_path / "log", weights, mask=mask) as log:
        assert receiver.receive(0) == 0
        before = clones(weights)
        for step in (1, 2):
            change(weights, mask, 0.1, seed=step)
            log.append(step).wait()
    file = tmp_path / "log" / "step_00000001.patch.safetensors"
    data = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "truncated":
        file.write_bytes(data[:-9])
    elif damage == "missing":
        file.unlink()
    else:
        with DeltaLog.create(tmp_path / "other", before, mask=mask) as other:
            other.append(1, weights).wait()
        file.write_bytes((tmp_path / "other" / file.name).read_bytes())
    for _ in range(2):
        with pytest.raises(DeltaLogError, match="step 1"):
            receiver.receive(0)
        assert same_bits(before, copy) and receiver.weights.version == 0
    file.write_bytes(data)
    assert receiver.receive(0) == 2 and same_bits(weights, copy)


@pytest.mark.parametrize("keyframe_every", [None, 1])
def test_steps_that_change_other_elements_are_refused(tmp_path: Path, keyframe_every: int | None) -> None:
    weights = make_weights("bf16")
    mask = MaskSet.random(weights, density=0.3)
    copy = clones(weights)
    receiver = FolderReceiver(WeightReceiver(copy), tmp_path)
    with DeltaLog.create(tmp_path, weights, mask=mask, keyframe_every=keyframe_every) as log:
        assert receiver.receive(0) == 0
        change(weights, mask, 0.1, seed=1)
        bits(weights["z"])[~mask.bool("z").view(-1)] ^= 1
        before = clones(copy)
        log.append(1).wait()
    with pytest.raises(DeltaLogError, match="step 1: changes .*elements outside of the mask"):
        receiver.receive(0)
    assert same_bits(before, copy)


def test_a_log_without_a_mask_is_refused(tmp_path: Path) -> None:
    weights = make_weights("bf16")
    DeltaLog.create(tmp_path, weights).close()
    with pytest.raises(DeltaLogError, match="the log has no mask"):
        FolderReceiver(WeightReceiver(weights), tmp_path).receive(0)


def test_weights_that_others_have_changed_are_written_whole(tmp_path: Path) -> None:
    weights = make_weights("bf16")
    mask = MaskSet.random(weights, density=0.3)
    copy = clones(weights)
    receiver = FolderReceiver(WeightReceiver(copy), tmp_path)
    with DeltaLog.create(tmp_path, weights, mask=mask) as log:
        assert receiver.receive(0) == 0
        for name, positions in mask.indices.items():
            bits(copy[name])[positions.long()] ^= 1
        receiver.request_state()
        assert receiver.receive(0) == 0 and same_bits(weights, copy)
        bits(copy["z"])[mask["z"].long()] ^= 1
        change(weights, mask, 0.01, seed=1)
        log.append(1).wait()
    assert receiver.receive(0) == 1 and same_bits(weights, copy)
