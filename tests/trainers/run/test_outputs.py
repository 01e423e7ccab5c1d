from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparse_opt.config import parse_config
from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import ConfigError, DeltaLogError, SparseOptError
from sparse_opt.tables import format_bytes
from sparse_opt.trainers import dpo, grpo
from sparse_opt.trainers.options import model_slug
from sparse_opt.trainers.run import training_run as loop
from sparse_opt.trainers.run.outputs import check_new_folder, save_checkpoint


@contextmanager
def not_root():
    """Root may write anywhere, so a test of permissions has to be somebody else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def read_only_folder():
    folder = Path(tempfile.mkdtemp())  # not under tmp_path, whose parents only root may enter
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("below", ["", "run", "some/run"])
def test_read_only_output_folder_is_refused_before_loading(dpo_options, read_only_folder, monkeypatch, below):
    monkeypatch.setattr(
        "sparse_opt.trainers.run.training_run.load_tokenizer", lambda config: pytest.fail("started to load")
    )
    options = dpo_options(output_dir=read_only_folder / below)
    with not_root(), pytest.raises(ConfigError, match=rf"'output_dir'.* in {read_only_folder}: Permission denied"):
        dpo.train(options)


@pytest.mark.parametrize("option", ["output_dir", "delta_log_dir"])
def test_folder_in_use_is_refused(dpo_options, tmp_path, option):
    used = tmp_path / "used"
    used.mkdir()
    (used / "something").touch()
    with pytest.raises(ConfigError, match=f"'{option}': .*used exists and is not empty"):
        dpo.train(dpo_options(**{option: used}))
    with pytest.raises(ConfigError, match=f"'{option}': .*something exists and is not a folder"):
        dpo.train(dpo_options(**{option: used / "something"}))
    with pytest.raises(ConfigError, match=f"'{option}': .*"):
        dpo.train(dpo_options(**{option: used / "something" / "below"}))
    assert [path.name for path in used.iterdir()] == ["something"]


def test_of_two_runs_that_start_together_one_gets_the_folder(dpo_options, tmp_path, monkeypatch):
    first = dpo_options(n_steps=1)
    second = dpo_options(n_steps=2, delta_log_dir=tmp_path / "log")
    load_policy, files = loop.load_policy, {}

    def load_while_the_first_runs(config, device):
        monkeypatch.setattr(loop, "load_policy", load_policy)
        dpo.train(first)
        files.update({path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()})
        return load_policy(config, device)

    monkeypatch.setattr(loop, "load_policy", load_while_the_first_runs)
    with pytest.raises(ConfigError, match="'output_dir': .*run exists and is not empty"):
        dpo.train(second)
    assert files == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not (tmp_path / "log").exists()


def test_a_second_run_into_a_delta_log_leaves_no_file(dpo_options, tmp_path, monkeypatch):
    first = dpo_options(n_steps=1, output_dir=tmp_path / "first", delta_log_dir=tmp_path / "log")
    second = dpo_options(n_steps=1, output_dir=tmp_path / "second", delta_log_dir=tmp_path / "log")
    load_policy = loop.load_policy
    with ExitStack() as runs:

        def load_while_the_first_begins(config, device):
            monkeypatch.setattr(loop, "load_policy", load_policy)
            runs.enter_context(loop.TrainingRun(first, "dpo", "preference"))
            return load_policy(config, device)

        monkeypatch.setattr(loop, "load_policy", load_while_the_first_begins)
        run = loop.TrainingRun(second, "dpo", "preference")
        with pytest.raises(DeltaLogError, match="log: another writer has this delta log open"):
            run.__enter__()
        assert not (tmp_path / "second").exists()
    assert DeltaLog.open(tmp_path / "log").steps == (0,)


def test_new_and_empty_folders_are_fine_and_untouched(tmp_path):
    check_new_folder(tmp_path, "output_dir")
    check_new_folder(tmp_path / "a" / "b", "output_dir")
    assert list(tmp_path.iterdir()) == []


def test_failing_checkpoint_leaves_nothing(model, tmp_path):
    class BrokenTokenizer:
        def save_pretrained(self, folder):
            raise OSError(28, "No space left on device")

    with pytest.raises(SparseOptError, match="final: cannot be written: No space left on device"):
        save_checkpoint(model, BrokenTokenizer(), tmp_path / "final")
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_on_disk_while_the_run_goes_on(dpo_options, monkeypatch, tmp_path):
    seen = []
    original = dpo.dpo_loss

    def watched(*arguments, **options):
        file = tmp_path / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        seen.append([json.loads(line)["step"] for line in lines])
        return original(*arguments, **options)

    monkeypatch.setattr(dpo, "dpo_loss", watched)
    dpo.train(dpo_options(n_steps=3))
    assert seen == [[], [1], [1, 2]]


def test_options_file_repeats_the_run(dpo_options, tmp_path):
    options = dpo_options(n_steps=1)
    summary = dpo.train(options)
    file = Path(summary["metrics_file"]).with_name("options.yaml")
    assert parse_config(dpo.DPOConfig, ["--config", str(file)]) == options


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("google/gemma-3-270m-it", "google_gemma_3_270m_it"),
        ("meta-llama/Llama-3.1-8B", "meta_llama_llama_3_1_8b"),
    ],
)
def test_model_slug(name, slug, tmp_path):
    assert model_slug(name) == slug
    (tmp_path / "My-Model").mkdir()
    assert model_slug(str(tmp_path / "My-Model")) == "my_model"


@pytest.mark.parametrize(
    ("folder", "slug"),
    [
        ("a/final", "a_final"),
        ("b/final", "b_final"),
        ("a/adapter", "a_adapter"),
        ("a/checkpoints/step_00000100", "a_step_00000100"),
        ("a/checkpoint-500", "a_checkpoint_500"),
        ("a/final_model", "final_model"),
    ],
)
def test_the_folders_of_two_runs_have_different_slugs(tmp_path, monkeypatch, folder, slug):
    (tmp_path / folder).mkdir(parents=True)
    assert model_slug(str(tmp_path / folder)) == slug
    monkeypatch.chdir(tmp_path / folder)
    assert model_slug(".") == slug


def test_a_model_of_a_run_is_named_after_the_model_that_was_trained(tmp_path):
    for run, start in (("sft", "meta-llama/Llama-3.1-8B"), ("dpo", tmp_path / "sft" / "final")):
        (tmp_path / run / "final").mkdir(parents=True)
        (tmp_path / run / "options.yaml").write_text(f"policy_name: {start}\n")
        assert model_slug(str(tmp_path / run / "final")) == "meta_llama_llama_3_1_8b"


def test_dense_runs_of_dpo_and_grpo_have_a_delta_log_by_default(dpo_options, tmp_path, capsys):
    by_default = Path("auto_if_dense")
    summary = dpo.train(dpo_options(delta_log_dir=by_default, n_steps=12, output_dir=tmp_path / "first"))
    log = DeltaLog.open(tmp_path / "first" / "delta_log")
    assert log.steps == (0, 10, 12) and summary["delta_log_dir"] == str(log.directory)
    said = capsys.readouterr().err
    whole = format_bytes(sum(w.nbytes for w in log.load(0).values()))
    assert f"{whole} of initial weights, and the changes at up to 2 steps, at most about {whole} each" in said
    dpo.train(dpo_options(delta_log_dir=by_default, n_steps=1, output_dir=tmp_path / "second"))  # another folder
    assert dpo_options(delta_log_dir=by_default, mode="lora").delta_log_dir is None
    for config in (dpo.DPOConfig, grpo.GRPOConfig):
        words = ["policy_name=m", "dataset=d", "batch_size=8"]
        assert parse_config(config, words).delta_log_dir == Path("auto")
        assert parse_config(config, [*words, "delta_log_dir=none"]).delta_log_dir is None


def test_a_delta_log_that_cannot_fit_the_disk_is_refused_before_training(dpo_options, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(SparseOptError, match=r"the delta log's initial weights take .* KiB, found 1000 B free"):
        dpo.train(dpo_options(delta_log_dir=tmp_path / "log"))
    assert not (tmp_path / "run").exists() and not (tmp_path / "log").exists()


def test_a_mount_has_the_model_and_the_logs_of_dpo(dpo_options, tmp_path, monkeypatch):
    options = {"output_dir": None, "mount_dir": tmp_path / "mount", "log_margins": True, "n_steps": 2}
    monkeypatch.setattr(loop.TrainingRun, "update", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dpo.train(dpo_options(**options))
    monkeypatch.undo()
    assert not list((tmp_path / "mount").glob("*/*"))  # the files of the run that failed do not block the next one
    summary = dpo.train(dpo_options(**options))
    assert summary["checkpoint"] == str(tmp_path / "mount" / "dpo_model")
    assert (tmp_path / "mount" / "dpo_model" / "config.json").is_file()
    margins = tmp_path / "mount" / "logs" / "margins"
    assert len((margins / "margins_log.jsonl").read_text().splitlines()) == 2
    assert len(list(margins.glob("epoch_*/step_*.npy"))) == 2
    with pytest.raises(ConfigError, match="'save_dir': .*dpo_model exists and is not empty"):
        dpo.train(dpo_options(**options | {"policy_name": str(tmp_path / "mount" / "dpo_model")}))


def test_a_run_killed_between_its_model_and_its_summary_is_resumed(dpo_options, tmp_path, monkeypatch):
    options = dpo_options(save_steps=1, n_steps=2)
    monkeypatch.setattr(loop.TrainingRun, "_summary", lambda self, final: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dpo.train(options)
    monkeypatch.undo()
    assert (tmp_path / "run" / "final" / "config.json").is_file()
    assert dpo.train(dataclasses.replace(options, resume=True))["n_steps"] == 2
