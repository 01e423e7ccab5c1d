"""One process at a time writes to the folder of a run; a killed one blocks nothing."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stopping import assert_same_run, stop

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.trainers import dpo
from sparse_opt.trainers.run import outputs
from sparse_opt.trainers.run import training_run as loop
from sparse_opt.trainers.run.lock import LOCK_FILE, RunLock, require_unlocked
from sparse_opt.trainers.run.resuming import checkpoints
from sparse_opt.trainers.run.training_run import TrainingRun

IN_USE = "'output_dir': another run is writing to .*run$"


def resumed(config):
    return dataclasses.replace(config, resume=True)


@pytest.fixture
def config(dpo_options):
    return dpo_options(save_steps=1)


@pytest.fixture
def while_it_runs(monkeypatch):
    """`while_it_runs(action)` has `action()` called once, in the middle of the next step."""

    def make(action):
        log, waiting = TrainingRun.log, [action]

        def log_and_act(self, *args, **metrics):
            if waiting:
                waiting.pop()()
            log(self, *args, **metrics)

        monkeypatch.setattr(TrainingRun, "log", log_and_act)

    return make


def test_a_second_resume_is_refused_and_loses_nothing(monkeypatch, config, dpo_options, tmp_path, while_it_runs):
    whole = dpo.train(dpo_options(output_dir=tmp_path / "whole"))
    stop(monkeypatch, dpo.train, config, 2)
    refused = []

    def resume_once_more():
        monkeypatch.setattr(loop, "load_policy", lambda *args: pytest.fail("started to load"))
        with pytest.raises(ConfigError, match=IN_USE) as error:
            dpo.train(resumed(config))
        refused.append(error.value)

    load_policy = loop.load_policy
    while_it_runs(resume_once_more)
    assert_same_run(whole, dpo.train(resumed(config)))
    assert refused
    monkeypatch.setattr(loop, "load_policy", load_policy)
    assert not (config.output_dir / LOCK_FILE).exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_into_the_folder_of_a_new_one_is_refused(config, while_it_runs, resume):
    def begin_another():
        message = IN_USE if resume else "another run is writing to .*run$|run exists and is not empty"
        with pytest.raises(ConfigError, match=message):
            dpo.train(dataclasses.replace(config, resume=resume))

    while_it_runs(begin_another)
    assert dpo.train(config)["n_steps"] == 4


def replace(path):
    path.unlink()
    path.touch()


LOSSES = {"deleted": Path.unlink, "replaced": replace}


def lost(loss, where, step):
    return f"^{where}: step {step}: .*run/run.lock was {loss} while .* may write to .*run: [^\n]*$"


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_lock_stops_the_run_before_its_next_row(monkeypatch, config, while_it_runs, loss):
    stop(monkeypatch, dpo.train, config, 2)
    file, lock = config.output_dir / "metrics.jsonl", config.output_dir / LOCK_FILE
    before = []

    def lose():
        before.append(file.read_bytes())
        LOSSES[loss](lock)
        if loss == "deleted":
            require_unlocked(config.output_dir)  # so another run can begin to write

    while_it_runs(lose)
    with pytest.raises(SparseOptError, match=lost(loss, r".*metrics\.jsonl", 3)):
        dpo.train(resumed(config))
    assert [file.read_bytes()] == before
    assert lock.exists() == (loss == "replaced")  # the file of another run is not removed
    dpo.train(resumed(config))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("folder", ["checkpoints/step_00000002", "final", "adapter"])
def test_a_lost_lock_publishes_no_model(monkeypatch, dpo_options, folder, loss):
    config = dpo_options(save_steps=2, **({"mode": "lora"} if folder == "adapter" else {}))
    module = checkpoints if folder.startswith("checkpoints") else outputs
    save = module.save_into

    def save_and_lose(model, tokenizer, aside):
        save(model, tokenizer, aside)
        if Path(folder).name in aside.name:
            LOSSES[loss](config.output_dir / LOCK_FILE)

    monkeypatch.setattr(module, "save_into", save_and_lose)
    with pytest.raises(SparseOptError, match=lost(loss, f".*/{folder}", 2 if "step" in folder else 4)):
        dpo.train(config)
    assert not (config.output_dir / folder).exists()
    assert not (config.output_dir / "summary.json").exists()


def test_a_run_that_lost_its_lock_at_the_start_removes_no_file_of_the_next(dpo_options, config, while_it_runs):
    def lose():
        (config.output_dir / LOCK_FILE).unlink()

    while_it_runs(lose)
    with pytest.raises(SparseOptError, match=lost("deleted", r".*metrics\.jsonl", 1)):
        dpo.train(config)
    assert (config.output_dir / "options.yaml").is_file()


def test_a_lost_lock_drops_nothing_of_another_run(monkeypatch, dpo_options):
    config = dpo_options(save_steps=1, save_total_limit=3)
    stop(monkeypatch, dpo.train, config, 3)
    restore = checkpoints.Checkpoints.restore

    def restore_and_lose(*args):
        restore(*args)
        (config.output_dir / LOCK_FILE).unlink()

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, "restore", restore_and_lose)
        with pytest.raises(SparseOptError, match=lost("deleted", ".*run", 1)):
            dpo.train(dataclasses.replace(config, resume=True, resume_step=1))
    dpo.train(dataclasses.replace(config, resume=True, resume_step=2))


def test_a_run_that_was_killed_blocks_nothing(config, tmp_path):
    hold = (
        "import sys, time; from pathlib import Path; from sparse_opt.trainers.run.lock import RunLock\n"
        "with RunLock(Path(sys.argv[1])): print('taken', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(config.output_dir)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"taken\n"
        with pytest.raises(ConfigError, match=IN_USE):
            dpo.train(config)
        process.send_signal(signal.SIGKILL)
    assert (config.output_dir / LOCK_FILE).exists()
    dpo.train(config)
    assert not (config.output_dir / LOCK_FILE).exists()


def test_another_run_that_came_and_went_is_noticed(monkeypatch, config):
    stop(monkeypatch, dpo.train, config, 1)
    load_policy = loop.load_policy

    def load_while_another_goes_on(*args):
        monkeypatch.setattr(loop, "load_policy", load_policy)
        stop(monkeypatch, dpo.train, resumed(config), 2)
        return load_policy(*args)

    monkeypatch.setattr(loop, "load_policy", load_while_another_goes_on)
    with pytest.raises(ConfigError, match="'resume': another run has written to .*run meanwhile; resume again"):
        dpo.train(resumed(config))
    dpo.train(resumed(config))


def test_a_failed_run_releases_its_folder(monkeypatch, config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "update", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dpo.train(config)
    require_unlocked(config.output_dir)


def test_a_folder_that_cannot_be_locked(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="'output_dir': .*file/run cannot be written: Not a directory"),
        RunLock(tmp_path / "file" / "run"),
    ):
        pass


def test_a_file_system_without_locks(monkeypatch, config):
    flock = fcntl.flock

    def refuse(descriptor, operation):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == LOCK_FILE:
            raise OSError(errno.ENOLCK, "No locks available")
        flock(descriptor, operation)  # of the data's cache

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match=r"file system of .*run has no locks \(No locks available\)"):
        dpo.train(config)
    assert not (config.output_dir / LOCK_FILE).exists()


def test_a_forked_process_neither_keeps_nor_removes_the_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    go_on, done = context.Event(), context.Event()

    def wait(lock):
        lock.__exit__(None, None, None)
        done.set()
        go_on.wait(30)

    with RunLock(tmp_path / "run") as lock:
        child = context.Process(target=wait, args=(lock,))
        child.start()
        assert done.wait(30)
        assert (tmp_path / "run" / LOCK_FILE).exists()
        with pytest.raises(ConfigError, match=IN_USE):
            require_unlocked(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with RunLock(tmp_path / "run"):
        assert child.is_alive()
    go_on.set()
    child.join()
    assert os.listdir(tmp_path) == []
