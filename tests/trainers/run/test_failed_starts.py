"""Runs that end before their first step is logged leave nothing, so that the corrected command can use the folder."""

from __future__ import annotations

import builtins
import dataclasses
import io
import json
import signal
from pathlib import Path

import pytest
from rft_worlds import ScriptedEngine
from stopping import stop

from sparse_opt import files as atomic_files
from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import ConfigError, DataError, SparseOptError
from sparse_opt.trainers import dpo, grpo, ppo, rlt
from sparse_opt.trainers.rft import sampling as rft_sampling
from sparse_opt.trainers.rft.datagen import DatagenConfig, datagen
from sparse_opt.trainers.run import outputs, run_files
from sparse_opt.trainers.run.training_run import TrainingRun

FULL = "No space left on device"
ROLLOUT = {
    "dtype": "fp32",
    "device": "cpu",
    "n_steps": 2,
    "batch_size": 4,
    "gradient_accumulation_steps": 1,
    "n_generations": 2,
    "max_completion_length": 6,
    "save_steps": 1,
}

SHORT_TEMPLATES = {
    "teacher_system": "",
    "teacher_user": "{question}",
    "teacher_start": " {solution}. ",
    "student_system": "",
    "student_user": "{question}",
    "student_answer": " {explanation}. {solution}",
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory, pairs):
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    rows = [{"question": row["prompt"], "solution": row["chosen"]} for row in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def start(model_folder, questions, tmp_path):
    """`start("grpo", ...)`: run this algorithm in tmp_path/run, with a delta log in tmp_path/log where it has one."""

    def begin(algorithm, **changes):
        common = {
            "policy_name": str(model_folder),
            "dataset": str(questions),
            "output_dir": tmp_path / "run",
            **ROLLOUT,
        }
        if algorithm == "rft":
            for name in ("n_steps", "batch_size", "gradient_accumulation_steps", "save_steps"):
                del common[name]
            return datagen(DatagenConfig(**{**common, "reward_functions": ["token_rewards:even_tokens"], **changes}))
        common["delta_log_dir"] = tmp_path / "log"
        if algorithm == "rlt":
            return rlt.train(rlt.RLTConfig(**{**common, **SHORT_TEMPLATES, **changes}))
        rewarded = {**common, "reward_functions": ["token_rewards:even_tokens"], **changes}
        if algorithm == "ppo":
            return ppo.train(ppo.PPOConfig(**rewarded))
        return grpo.train(grpo.GRPOConfig(**rewarded))

    return begin


REFUSED = {
    "engine": ({"rollout_engine": "vllm"}, ConfigError, "rollout_engine vllm needs the package vllm"),
    "room": ({"max_completion_length": 500, "max_prompt_length": 100}, ConfigError, "max_position_embeddings"),
    "reward": ({"reward_functions": ["exact_match"]}, DataError, "'exact_match': missing a required argument"),
    "reference": ({"ref_name": "/nowhere"}, DataError, "cannot load .* /nowhere: "),
}


@pytest.mark.parametrize(
    ("algorithm", "case"),
    [
        *((algorithm, case) for algorithm in ("grpo", "ppo") for case in REFUSED),
        *(("rlt", case) for case in ("engine", "room", "reference")),
        *(("rft", case) for case in ("engine", "room", "reward")),
    ],
)
def test_a_run_that_is_refused_leaves_nothing(start, tmp_path, algorithm, case):
    changes, error, message = REFUSED[case]
    if case == "reference" and algorithm == "grpo":
        changes = {**changes, "beta": 0.1}
    with pytest.raises(error, match=message):
        start(algorithm, **changes)
    assert list(tmp_path.iterdir()) == []


def test_the_corrected_command_uses_the_folder(start, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(DataError, match="missing a required argument"):
        start("grpo", reward_functions=["exact_match"])
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]
    start("grpo")
    assert DeltaLog.open(tmp_path / "log").steps == (0, 2)


class FullDisk:
    """Lets the writes to files of one name fail, with half of what was to be written on disk."""

    def __init__(self, monkeypatch):
        self.name = ""
        self._monkeypatch = monkeypatch
        write_text, save_file, open_file = Path.write_text, atomic_files.save_file, io.open

        def full_text(path, data, *args, **kwargs):
            if self._fails(path):
                write_text(path, data[: len(data) // 2], *args, **kwargs)
                raise OSError(28, FULL)
            return write_text(path, data, *args, **kwargs)

        def full_tensors(tensors, path, metadata=None):
            if self._fails(path):
                write_text(path, "half a file")
                raise OSError(28, FULL)
            save_file(tensors, path, metadata=metadata)

        def full_open(file, mode="r", *args, **kwargs):
            opened = open_file(file, mode, *args, **kwargs)
            return FullFile(opened) if "a" in mode and self._fails(file) else opened

        monkeypatch.setattr(Path, "write_text", full_text)
        monkeypatch.setattr(atomic_files, "save_file", full_tensors)
        monkeypatch.setattr(io, "open", full_open)
        monkeypatch.setattr(builtins, "open", full_open)

    def _fails(self, path):
        return bool(self.name) and self.name in Path(path).name


class FullFile:
    def __init__(self, file):
        self._file = file

    def write(self, data):
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        raise OSError(28, FULL)

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.fixture
def full_disk(monkeypatch):
    return FullDisk(monkeypatch)


@pytest.mark.parametrize("name", ["options.yaml", "metrics.jsonl", "evaluations.jsonl", "keyframe.safetensors"])
def test_a_full_disk_at_the_start_leaves_nothing(dpo_options, pairs_file, full_disk, tmp_path, name):
    config = dpo_options(delta_log_dir=tmp_path / "log", eval_dataset=str(pairs_file), eval_subset_size=2, n_steps=1)
    full_disk.name = name
    with pytest.raises(SparseOptError, match=f"cannot be written: {FULL}"):
        dpo.train(config)
    assert list(tmp_path.iterdir()) == []
    full_disk.name = ""
    dpo.train(config)


@pytest.mark.parametrize("name", ["options.yaml", "inputs.json", "000000.json"])
def test_a_full_disk_at_the_start_of_sampling_leaves_nothing(start, full_disk, tmp_path, name):
    full_disk.name = name
    with pytest.raises(SparseOptError, match=f"{name}: cannot be written: {FULL}"):
        start("rft")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_later_leaves_what_can_be_resumed(dpo_options, full_disk, tmp_path, monkeypatch):
    config = dpo_options(save_steps=1, n_steps=3)
    save = outputs.save_into

    def save_on_a_full_disk(model, tokenizer, folder):
        if "step_00000002" in folder.name:
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(28, FULL)
        save(model, tokenizer, folder)

    with monkeypatch.context() as patch:
        patch.setattr("sparse_opt.trainers.run.resuming.checkpoints.save_into", save_on_a_full_disk)
        with pytest.raises(SparseOptError, match=f"step_00000002: cannot be written: {FULL}"):
            dpo.train(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]
    full_disk.name = "metrics.jsonl"
    with pytest.raises(SparseOptError, match=f"metrics.jsonl: cannot be written: {FULL}"):
        dpo.train(dataclasses.replace(config, resume=True))
    full_disk.name = ""
    assert dpo.train(dataclasses.replace(config, resume=True))["n_steps"] == 3


@pytest.mark.parametrize("content", [b"", b"\n", b"text", b"- 1\n", bytes(range(256)), b"[" * 100_000, b"{"])
def test_an_options_file_that_is_damaged_is_named(monkeypatch, dpo_options, tmp_path, content):
    config = dpo_options(save_steps=1)
    stop(monkeypatch, dpo.train, config, 1)
    (tmp_path / "run" / "options.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^option 'resume': [^\n]*options.yaml[^\n]*$"):
        dpo.train(dataclasses.replace(config, resume=True))


def test_a_run_that_has_logged_a_step_keeps_its_files(monkeypatch, dpo_options, tmp_path):
    stop(monkeypatch, dpo.train, dpo_options(delta_log_dir=tmp_path / "log"), 0)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "options.yaml"]
    assert DeltaLog.open(tmp_path / "log").steps == (0,)


def test_a_run_without_a_step_to_its_name_leaves_the_folder_as_it_was(monkeypatch, dpo_options, tmp_path):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(TrainingRun, "update", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dpo.train(dpo_options(log_margins=True, report_to=["tensorboard"], delta_log_dir=tmp_path / "log"))
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_the_engine_of_sampling_is_made_before_the_folder(start, monkeypatch, tmp_path, tokenizer):
    seen = []

    def make_engine(*args, **settings):
        seen.append((tmp_path / "run").exists())
        return ScriptedEngine(tokenizer, [])

    monkeypatch.setattr(rft_sampling, "make_engine", make_engine)
    with pytest.raises(ValueError, match="is shorter"):  # the engine has nothing to say
        start("rft")
    assert seen == [False]


def test_a_sigterm_does_not_interrupt_the_removal_of_a_failed_start(monkeypatch, dpo_options, tmp_path):
    def discard(folder):
        signal.raise_signal(signal.SIGTERM)
        discard_outputs(folder)

    def end(number, frame):
        raise SystemExit(128 + number)

    discard_outputs = run_files.discard_outputs
    monkeypatch.setattr(run_files, "discard_outputs", discard)
    monkeypatch.setattr(TrainingRun, "update", lambda self: 1 / 0)
    handler = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit, match="143"):
            dpo.train(dpo_options(delta_log_dir=tmp_path / "log"))
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not list(tmp_path.glob("run/*")) and not (tmp_path / "log").exists()
