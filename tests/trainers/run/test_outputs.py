from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sparse_opt.config import parse_config
from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import ConfigError, DeltaLogError, SparseOptError
from sparse_opt.trainers import dpo
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
