"""The study's runs, chores and resuming, on the small arithmetic world."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from sparse_opt.bench.study import main as study_main
from sparse_opt.bench.study import runs, schedule
from sparse_opt.bench.study.plan import TUNING_SEED, Part, Run, Subject
from sparse_opt.bench.study.results import Results
from sparse_opt.bench.study.runs import Chore, do, mask_file, mask_path, needed_by
from sparse_opt.bench.study.world import World
from sparse_opt.errors import ConfigError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers.policy.pretrained import parameter_shapes

DENSE = Subject("grpo", "sums", "dense")


@pytest.fixture(scope="module")
def tiny_settings(tmp_path_factory):
    settings = yaml.safe_load(study_main.SETTINGS.read_text(encoding="utf-8"))["small"]
    settings["world"] |= {"n_train": 30, "n_test": 8, "n_demonstrations": 400}
    settings["start"]["n_steps"] = 100
    settings["questions"]["n_tune"] = 8
    settings["factors"] = [1]
    settings["grpo"] |= {"n_steps": 2, "batch_size": 32}
    file = tmp_path_factory.mktemp("settings") / "study.yaml"
    file.write_text(yaml.safe_dump({"small": settings}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_main, "SETTINGS", file)
        yield settings


def words_for(folder, *others):
    options = ["--size", "small", "--claims", "1", "--seeds", "0", "--device", "cpu"]
    return [*options, "--output_dir", str(folder), *others]


@pytest.fixture(scope="module")
def finished_folder(tiny_settings, tmp_path_factory):
    """The output folder of a finished study: a dense run with the tuning seed, and a random mask with it."""
    folder = tmp_path_factory.mktemp("study") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "plan", lambda *args: tuned("dense", "fisher:1:run16"))
        patch.setattr("sparse_opt.trainers.rft.train.datagen", None)  # the answers are sampled by `rft test`
        assert study_main.main(words_for(folder)) == 0
    return folder


def tuned(*words):
    return [Part(subject, subject, (), (1,)) for subject in (Subject("grpo", "sums", word) for word in words)]


@pytest.fixture
def finished(finished_folder, tmp_path, monkeypatch):
    """A copy of `finished_folder`, with one more part in the plan, an SGD run."""
    monkeypatch.setattr(schedule, "plan", lambda *args: tuned("dense", "fisher:1:run16", "sgd"))
    return Path(shutil.copytree(finished_folder, tmp_path / "out"))


def set_seconds(folder, seconds):
    file = folder / "results.jsonl"
    rows = [json.loads(line) | {"seconds": seconds} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_answers_are_sampled_once_for_rft_and_dpo(finished_folder):
    answers = finished_folder / "answers" / "sums" / "results.jsonl"
    right, wrong = set(), set()
    for row in map(json.loads, answers.read_text().splitlines()):
        for text, *of in zip(row["completions"], row["right"], row["finished"], strict=True):
            if of[1]:
                (right if of[0] else wrong).add((row["prompt"], text.strip()))
    kept, pairs = (
        [
            json.loads(line)
            for line in (finished_folder / "questions" / "sums" / f"{name}.jsonl").read_text().splitlines()
        ]
        for name in ("kept", "pairs")
    )
    assert {(row["prompt"], row["completion"].strip()) for row in kept} == right
    assert pairs and all((row["prompt"], row["chosen"]) in right for row in pairs)
    assert all((row["prompt"], row["rejected"]) in wrong for row in pairs)


def test_random_masks_have_their_share_of_the_whole_model(finished_folder, tiny_settings):
    world = World(finished_folder, tiny_settings, "cpu")
    mask = MaskSet.load(mask_file(world, Run("grpo", "sums", "random:1:run16", 1e-3, 7)))
    # With the rounding of each matrix, 1 % is one run less or more for every other one.
    assert 0 <= round(0.01 * mask.numel) - mask.nnz < 16 and mask.metadata["pool"] == "global"


def test_sources_that_score_the_start_choose_other_weights(finished, tiny_settings):
    world = World(finished, tiny_settings, "cpu")
    files = [mask_file(world, Run("grpo", "sums", f"{source}:10:run16", 1e-3, 7)) for source in runs.METHODS]
    masks = [MaskSet.load(file) for file in files]
    assert [mask.metadata["method"] for mask in masks] == list(runs.METHODS.values())
    assert len({mask.digest for mask in masks}) == len(masks)


def test_masks_have_as_many_values_as_lora(finished_folder, tiny_settings):
    """The settings' share of LoRA of rank 1, of this model and of SmolLM2-135M's 30 layers."""
    shapes = parameter_shapes(finished_folder / "start" / "final").items()
    small = sum(sum(shape) for name, shape in shapes if len(shape) == 2 and "layers" in name)
    smollm2 = 30 * (2 * (576 + 576) + 2 * (192 + 576) + 3 * (1536 + 576))
    settings = yaml.safe_load(Path(study_main.__file__).with_name("study.yaml").read_text(encoding="utf-8"))
    assert settings["small"]["lora"] == tiny_settings["lora"]
    for size, values, n in (
        ("small", small, sum(math.prod(of) for _, of in shapes)),
        ("smollm2", smollm2, 134_515_008),
    ):
        assert settings[size]["lora"]["percent"] / 100 * n == pytest.approx(values, rel=1e-3)


def test_the_start_is_scored_once(finished, monkeypatch, capsys):
    monkeypatch.setattr(schedule, "plan", lambda *args: tuned("dense"))
    monkeypatch.setattr("sparse_opt.bench.study.runs.perplexity", None)
    assert study_main.main(words_for(finished)) == 0
    before = json.loads((finished / "starts.json").read_text())["sums"]["accuracy"]
    row = scores_of_dense(capsys.readouterr().out)
    assert row[4] == f"{before:.3f}"
    # On another machine, with the small files alone.
    carried = finished.parent / "carried"
    carried.mkdir()
    for name in ("results.jsonl", "starts.json"):
        shutil.copy(finished / name, carried)
    assert study_main.main(words_for(carried, "--report_only")) == 0
    assert scores_of_dense(capsys.readouterr().out) == row


@pytest.mark.parametrize("trained", ["dense", "sgd", "random:10:run16"])
def test_bf16_hides_changes_of_the_fp32_copies(finished, tiny_settings, trained):
    settings = {**tiny_settings, "shared": {**tiny_settings["shared"], "dtype": "bf16"}}
    rate = 3e-3 if trained == "sgd" else 1e-5
    row = do(World(finished, settings, "cpu"), Run("grpo", "sums", trained, rate, TUNING_SEED))
    assert 0 <= row["changed_bf16"] < 0.5 * row["changed_fp32"]
    # Embeddings of tokens that no sequence has do not change.
    assert 0.05 < row["changed_fp32"] <= row.get("n_trained", math.inf) / n_weights_of(finished)


def test_lean_runs_differ_from_random_ones_by_the_optimizer_alone(finished, tiny_settings):
    world = World(finished, {**tiny_settings, "shared": {**tiny_settings["shared"], "dtype": "bf16"}}, "cpu")
    both = [Run("grpo", "sums", f"{source}:10:run16", 1e-3, 7) for source in ("lean", "random")]
    options, of_random = (runs.options_of(world, run) for run in both)
    assert options.pop("lean") and options == {
        name: value for name, value in of_random.items() if not name.startswith("statistics")
    }
    lean, random = (do(world, run) for run in both)
    assert mask_path(world, both[0]) == mask_path(world, both[1]) and lean["n_trained"] == random["n_trained"] > 0
    # Of each value two moments and the gradient have 2 bytes instead of 4, and the copy none.
    assert random["optimizer_bytes"] - lean["optimizer_bytes"] == 10 * lean["n_trained"]
    assert 0 < lean["changed_bf16"] <= lean["n_trained"] / n_weights_of(finished)
    assert "changed_fp32" in random and "changed_fp32" not in lean


def test_a_mask_from_another_machine_is_not_found_again(finished, tiny_settings):
    world, run = World(finished, tiny_settings, "cpu"), Run("grpo", "sums", "early5:1:run16", 1e-3, TUNING_SEED)
    assert needed_by(world, run) == Chore("log", "sums")
    file = mask_path(world, run)
    MaskSet.random(parameter_shapes(world.start), density=0.01, pattern="run16").save(file)
    content = file.read_bytes()
    assert needed_by(world, run) is None and mask_file(world, run) == file and file.read_bytes() == content


def n_weights_of(folder):
    return sum(math.prod(shape) for shape in parameter_shapes(folder / "start" / "final").values())


def test_a_job_without_memory_is_done_again_beside_fewer(finished, tiny_settings, capsys):
    world, pool = World(finished, tiny_settings, "cpu"), SimpleNamespace(size=2)
    results = Results(finished.parent / "none.jsonl", {"settings": ""})
    study = study_main.Study(world, study_main.Choice([1], ["sums"], [0], "small"), results, jobs=2)
    job = next(job for job in study._candidates() if isinstance(job, Run))
    study.ended(job, None, "torch.OutOfMemoryError: CUDA out of memory", pool)
    assert pool.size == 1 and not study.failures and "from now on 1 at once" in capsys.readouterr().err
    assert job in study._candidates()
    study.ended(job, None, "torch.OutOfMemoryError: CUDA out of memory", pool)
    assert pool.size == 1 and job in study.failures  # it was alone


@pytest.mark.parametrize("name", ["texts.jsonl", "questions/sums/kept.jsonl"])
def test_other_texts_than_those_of_the_finished_runs_are_refused(finished, name):
    file = finished / name
    text = file.read_text()
    file.write_text(text.replace("1", "2"))
    with pytest.raises(ConfigError, match=f"{file}: [0-9a-f]+, expected digest [0-9a-f]+"):
        study_main.main(words_for(finished))
    file.unlink()
    with pytest.raises(ConfigError, match=f"{file}: missing, expected digest"):
        study_main.main(words_for(finished))


def test_a_missing_sample_of_a_finished_run_is_refused(finished, monkeypatch):
    monkeypatch.setattr(schedule, "plan", lambda *args: [])
    row = json.loads((finished / "results.jsonl").read_text().splitlines()[0])
    with open(finished / "results.jsonl", "a") as file:
        file.write(json.dumps(row | {"seed": 0}) + "\n")
    words = words_for(finished)
    words[words.index("--claims") + 1] = "2"
    with pytest.raises(ConfigError, match=r"changed/grpo_sums_dense_lr\S+_seed0\.safetensors: missing"):
        study_main.main(words)


def step_times(page):
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| sums")]
    return [cells[-2] for cells in rows if len(cells) == 14]


def test_steps_are_timed_alone(finished, capsys):
    """The results are those of runs at once."""
    rows = [json.loads(line) | {"jobs": 8} for line in (finished / "results.jsonl").read_text().splitlines()]
    (finished / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert study_main.main(words_for(finished, "--time_steps", "2", "--stop_after", "0")) == 1
    assert step_times(capsys.readouterr().out) == ["", ""]
    assert study_main.main(words_for(finished, "--time_steps", "2")) == 0
    found = step_times(capsys.readouterr().out)
    times = [json.loads(line) for line in (finished / "times.jsonl").read_text().splitlines()]
    assert [row["trained"] for row in times] == ["dense", "random:1:run16", "sgd"]
    assert found == [f"{row['step_time_s']:.3f}" for row in times[:2]]
    assert study_main.main(words_for(finished, "--time_steps", "2")) == 0  # none is left
    assert len((finished / "times.jsonl").read_text().splitlines()) == 3
    with pytest.raises(ConfigError, match="--time_steps measures one after the other: it is not valid with"):
        study_main.main(words_for(finished, "--time_steps", "2", "--kill"))


def test_kill_begins_no_run_that_would_not_end(finished, capfd):
    set_seconds(finished, 1000.0)
    assert study_main.main(words_for(finished, "--kill", "--stop_after", "500")) == 1
    errors = capfd.readouterr().err
    assert re.search(r"s left: grpo_sums_sgd_\S+ is not begun, since it would last 1000 s", errors)
    assert "stopped:" not in errors
    assert len((finished / "results.jsonl").read_text().splitlines()) == 2


def test_a_study_that_is_killed_and_resumed_gives_the_same_table(tiny_settings, tmp_path, monkeypatch, capsys):
    """Dense, a mask of the first batch's Fisher information, SGD, and the dense run's subnetwork, of two steps each."""
    words = ("dense", "fisher:10:run16", "subnetwork")
    parts = [Part(Subject("grpo", "sums", word), DENSE, (0,), (1,)) for word in words]
    parts[1] = replace(parts[1], tuned_by=parts[1].subject)
    parts += tuned("sgd")
    monkeypatch.setattr(schedule, "plan", lambda *args: parts)
    words = words_for(tmp_path / "out")
    original = study_main.do
    done = []

    def killed_on_the_second(world, run):
        if done:
            raise KeyboardInterrupt
        done.append(run)
        return original(world, run)

    monkeypatch.setattr(study_main, "do", killed_on_the_second)
    with pytest.raises(KeyboardInterrupt):
        study_main.main(words)
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 1

    monkeypatch.setattr(study_main, "do", original)
    assert study_main.main(words) == 0
    resumed = table_without_times(capsys.readouterr().out)
    # Scores and shares by rate have a line for each part; the shares by component and by layer a column.
    assert sum(cells[0] == "| sums" for cells in resumed) == 2 * 4
    assert [cells[0] for cells in resumed[-2:]] == ["| 0", "| none"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    # The first seed of a part comes before the tuning of the next, since nothing else is left to begin.
    assert [(row["trained"], row["seed"]) for row in rows] == [
        *(("dense", seed) for seed in (TUNING_SEED, 0)),
        *(("fisher:10:run16", seed) for seed in (TUNING_SEED, 0)),
        ("subnetwork", 0),
        ("sgd", TUNING_SEED),
    ]
    # Weights of fp32 have no other copy.
    assert all(0 < row["changed"] == row["changed_fp32"] <= 1 for row in rows) and rows[2]["n_trained"] > 0
    assert rows[2]["changed"] < rows[0]["changed"]
    assert rows[4]["closeness"]["cosine"] > 0.9 and rows[5]["changed"] > 0
    assert 0 < rows[1]["ranks"]["effective"] <= rows[1]["ranks"]["numerical"] <= 1

    # Without results, the runs whose weights are gone are done again.
    (tmp_path / "out" / "results.jsonl").unlink()
    for folder in ("masks", "finals", "changed"):
        (tmp_path / "out" / folder).rename(tmp_path / folder)
    assert study_main.main([*words, "--jobs", "2"]) == 0
    assert table_without_times(capsys.readouterr().out) == resumed


def test_before_any_run_is_finished_its_time_is_the_estimate(finished, tiny_settings, capfd):
    (finished / "results.jsonl").unlink()
    assert tiny_settings["seconds"]["grpo"] == 30
    assert study_main.main(words_for(finished, "--kill", "--stop_after", "20")) == 1
    assert re.search(r"is not begun, since it would last 30 s", capfd.readouterr().err)


def test_kill_ends_a_run_that_is_alone(finished, capfd):
    set_seconds(finished, 0.0)
    began = time.monotonic()
    assert study_main.main(words_for(finished, "--kill", "--stop_after", "0.5")) == 1
    assert re.search(r"stopped: grpo_sums_sgd_", capfd.readouterr().err)
    assert time.monotonic() - began < 30
    assert len((finished / "results.jsonl").read_text().splitlines()) == 2


def scores_of_dense(page):
    """The cells of the dense run's row in the table of scores, without times."""
    return next(cells for cells in table_without_times(page) if cells[:3] == ["| sums", "grpo", "dense"])


def table_without_times(page):
    """The lines of all tables, as cells; without the seconds of a step and of a run, the last ones of scores."""
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [cells[:-2] if len(cells) == 14 else cells for cells in lines]
