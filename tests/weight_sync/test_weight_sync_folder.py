"""The transport by a folder: a delta log that receivers follow, restart on, and refuse when it is damaged."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import bits, change, clones, make_weights, same_bits

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.cli.main import main
from sparse_opt.errors import DeltaLogError, WeightSyncError
from sparse_opt.weight_sync import Destination, WeightReceiver
from sparse_opt.weight_sync.transports import FolderReceiver

PATTERNS = ["element", "run16", "tile64"]


class Followed:
    """Weights in bf16, their mask, and a receiver with a copy of them, at a log that is not there yet."""

    def __init__(self, folder: Path, density: float = 0.3) -> None:
        self.weights, self.folder = make_weights("bf16"), folder / "log"
        self.mask, self.copy = MaskSet.random(self.weights, density=density), clones(self.weights)
        self.receiver = FolderReceiver(WeightReceiver(self.copy), self.folder)

    def log(self, **options: Any) -> DeltaLog:
        return DeltaLog.create(self.folder, self.weights, mask=self.mask, **options)

    def change(self, share: float, seed: int) -> None:
        change(self.weights, self.mask, share, seed)

    def receives(self, step: int) -> None:
        assert self.receiver.receive(0) == step and same_bits(self.weights, self.copy)


@pytest.fixture
def followed(tmp_path):
    return Followed(tmp_path)


@pytest.mark.parametrize("keyframe_every", [None, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_receivers_follow_restart_and_start_late(tmp_path, pattern, keyframe_every, capsys):
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
def test_weights_on_a_gpu_follow(tmp_path):
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


def test_a_receiver_may_start_before_the_log(followed):
    with pytest.raises(WeightSyncError, match=r"log: no new step within 0 s, none was found$"):
        followed.receiver.receive(0)

    def train() -> None:
        time.sleep(0.2)
        followed.change(0.5, seed=1)
        followed.log().close()

    thread = threading.Thread(target=train)
    thread.start()
    assert followed.receiver.receive(60) == 0
    thread.join()
    assert same_bits(followed.weights, followed.copy)


def test_steps_are_written_to_destinations(tmp_path):
    """Half of the columns of one weight and all of another, side by side in one tensor, as in an engine."""
    weights = {"q": torch.randn(6, 8), "k": torch.randn(4, 8)}
    mask = MaskSet.random(weights, density=0.5)
    fused = torch.cat([weights["q"][:, :4], weights["k"][:, :4]])
    places = {"q": [Destination(fused[:6], columns=(0, 4))], "k": [Destination(fused[6:], columns=(0, 4))]}
    receiver = FolderReceiver(WeightReceiver(None, destinations=places), tmp_path)
    with DeltaLog.create(tmp_path, weights, mask=mask) as log:
        receiver.receive(0)
        for step in (1, 2):
            change(weights, mask, 0.5, seed=step)
            log.append(step).wait()
            assert receiver.receive(0) == step
            assert torch.equal(bits(fused), bits(torch.cat([weights["q"][:, :4], weights["k"][:, :4]]).clone()))


def test_a_run_that_is_continued_from_an_earlier_step(followed):
    log = followed.log()
    kept = {}
    for step in range(1, 7):
        followed.change(0.1, seed=step)
        log.append(step).wait()
        kept[step] = clones(followed.weights)
    followed.receives(6)
    log.truncate(after=4)
    assert followed.receiver.receive(0) == 4 and same_bits(kept[4], followed.copy)
    log = DeltaLog.open(followed.folder)
    followed.change(0.1, seed=7)  # another step 6
    log.append(6, followed.weights).wait()
    followed.receives(6)
    followed.change(0.1, seed=8)
    log.append(8, followed.weights).wait()
    followed.receives(8)
    log.close()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "another run"])
def test_damage_is_named_and_leaves_the_weights(followed, tmp_path, damage):
    with followed.log() as log:
        followed.receives(0)
        before = clones(followed.weights)
        for step in (1, 2):
            followed.change(0.1, seed=step)
            log.append(step).wait()
    file = followed.folder / "step_00000001.patch.safetensors"
    data = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "truncated":
        file.write_bytes(data[:-9])
    elif damage == "missing":
        file.unlink()
    else:
        with DeltaLog.create(tmp_path / "other", before, mask=followed.mask) as other:
            other.append(1, followed.weights).wait()
        file.write_bytes((tmp_path / "other" / file.name).read_bytes())
    for _ in range(2):
        with pytest.raises(DeltaLogError, match="step 1"):
            followed.receiver.receive(0)
        assert same_bits(before, followed.copy) and followed.receiver.weights.version == 0
    file.write_bytes(data)
    followed.receives(2)


@pytest.mark.parametrize("keyframe_every", [None, 1])
def test_steps_that_change_other_elements_are_refused(followed, keyframe_every):
    with followed.log(keyframe_every=keyframe_every) as log:
        followed.receives(0)
        followed.change(0.1, seed=1)
        bits(followed.weights["z"])[~followed.mask.bool("z").view(-1)] ^= 1
        before = clones(followed.copy)
        log.append(1).wait()
    with pytest.raises(DeltaLogError, match="step 1: changes .*elements outside of the mask"):
        followed.receiver.receive(0)
    assert same_bits(before, followed.copy)


def test_a_log_without_a_mask_is_refused(followed):
    DeltaLog.create(followed.folder, followed.weights).close()
    with pytest.raises(DeltaLogError, match="the log has no mask"):
        followed.receiver.receive(0)


def test_weights_that_others_have_changed_are_written_whole(followed):
    with followed.log() as log:
        followed.receives(0)
        bits(followed.copy["z"])[followed.mask["z"].long()] ^= 1
        followed.change(0.01, seed=1)
        log.append(1).wait()
    followed.receives(1)
