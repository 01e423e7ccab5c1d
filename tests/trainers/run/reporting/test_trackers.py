"""Metrics at wandb (offline) and TensorBoard."""

from __future__ import annotations

import builtins
import dataclasses
import sys

import pytest

from sparse_opt.errors import ConfigError
from sparse_opt.trainers import dpo
from sparse_opt.trainers.run.reporting.trackers import project_name


def scalars(folder):
    """{name: {step: value}} of all event files, as TensorBoard shows them: what a later run purged is left out."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_tensorboard_has_the_metrics_and_the_evaluations(dpo_options, pairs_file, read_metrics, tmp_path):
    summary = dpo.train(dpo_options(n_steps=3, report_to=["tensorboard"], eval_dataset=str(pairs_file), eval_steps=2))
    found = scalars(tmp_path / "run" / "tensorboard")
    for row in read_metrics(summary):
        for name in ("loss", "grad_norm", "learning_rate", "tokens_per_s"):
            assert found[name][row["step"]] == pytest.approx(row[name], rel=1e-6)
    assert set(found["eval_loss"]) == {0, 2, 3}


def test_wandb_gets_the_metrics_under_the_projects_name(dpo_options, monkeypatch, read_metrics, tmp_path):
    wandb = pytest.importorskip("wandb")
    calls, logged = {}, []

    class Run:
        def log(self, metrics, step):
            logged.append((step, metrics))

        def finish(self):
            calls["finished"] = True

    def init(**arguments):
        calls.update(arguments)
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    rows = read_metrics(dpo.train(dpo_options(n_steps=2, report_to=["wandb"])))
    assert [(step, metrics["loss"]) for step, metrics in logged] == [(row["step"], row["loss"]) for row in rows]
    assert calls["project"] == "tiny_llama-dpo-subnetwork-emergence"
    assert calls["name"] == "run" and calls["resume"] == "allow" and calls["finished"]
    assert calls["config"]["learning_rate"] == 1e-3 and calls["config"]["beta"] == 0.1
    assert calls["id"] == (tmp_path / "run" / "wandb_run_id").read_text()


def test_wandb_offline_writes_a_run(dpo_options, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    dpo.train(dpo_options(n_steps=2, report_to=["wandb"]))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_one_that_is_missing_is_an_error_before_training(dpo_options, monkeypatch, tmp_path, package):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == package or name == "torch.utils.tensorboard":
            raise ImportError(f"No module named '{name}'")
        return original(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.partition(".")[0] == package or "utils.tensorboard" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=f"is {package}, which cannot be imported .*: pip install {package}"):
        dpo.train(dpo_options(report_to=[package]))
    assert not (tmp_path / "run").exists()


def test_project_names(dpo_options):
    options = dpo_options()
    assert project_name(options, "grpo") == "tiny_llama-grpo-subnetwork-emergence"
    assert project_name(dataclasses.replace(options, project_name="mine"), "grpo") == "mine"
