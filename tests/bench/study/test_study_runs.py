"""The study's plan and its resuming, on the small arithmetic world."""

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
from sparse_opt.bench.study.plan import CLAIMS, TUNING_SEED, Part, Run, Subject, Trained, first_rates, plan
from sparse_opt.bench.study.results import Results
from sparse_opt.bench.study.runs import Chore, do, mask_file, mask_path, needed_by
from sparse_opt.bench.study.verdicts import rows_of
from sparse_opt.bench.study.world import World
from sparse_opt.errors import ConfigError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers.policy.pretrained import parameter_shapes

DENSE = Subject("grpo", "sums", "dense")
LORA = {"ranks": [8, 1], "percent": 0.25}


def first_of(subjects):
    return subjects[0]


@pytest.mark.parametrize("size", ["smollm2", "small"])
def test_every_run_of_the_plan_can_be_read_and_has_rates(size):
    settings = yaml.safe_load(study_main.SETTINGS.read_text(encoding="utf-8"))[size]
    parts = plan(CLAIMS, [*settings["tasks"], "another"], [0, 1, 2], first_of, settings["lora"], settings["tile"])
    assert len({part.subject for part in parts}) == len(parts)
    assert {claim for part in parts for claim in part.claims} == set(CLAIMS)
    for part in parts:
        assert str(Trained.parse(part.subject.trained)) == part.subject.trained
        assert len(first_rates(settings, part.subject)) == len(settings["factors"])
        tuned_by = next(other for other in parts if other.subject == part.tuned_by)
        assert tuned_by.tuned_by == tuned_by.subject


def test_every_source_is_run_at_every_density_the_best_one_first():
    def words_of(task, chosen):
        parts = plan([4], ["sums", "another"], [0, 1], chosen, LORA)
        assert all(part.seeds == ((0, 1) if part.tier < 10 else (0,)) for part in parts)
        return {part.subject.trained for part in parts if part.subject.task == task}

    at_first = words_of("sums", lambda subjects: None)
    assert not any(word.startswith("snip") for word in at_first - {"snip:2.5:tile64"})
    added = words_of("sums", lambda subjects: subjects[-1]) - at_first
    sources = {"magnitude", "fisher", "snip", "early2", "early5", "early10"}
    sizes = {f"{percent}{pattern}" for percent in ("10", "2.5", "1", "0.1") for pattern in ("", ":tile64")}
    assert added == {f"{source}:{size}" for source in sources for size in sizes - {"2.5:tile64"}}
    parts = plan([4], ["sums", "another"], [0, 1], lambda subjects: subjects[-1], LORA)
    tiers = {part.subject.trained: part.tier for part in parts if part.subject.trained in added}
    assert {tier for word, tier in tiers.items() if word.startswith("early10:")} == {6}
    assert {tier for word, tier in tiers.items() if not word.startswith("early10:")} == {10}
    # The best masks of one density are compared on the other task too.
    assert words_of("another", first_of) == {"dense", "random:2.5:tile64", "random:1"}


def test_runs_that_need_dense_weights_follow_the_dense_runs():
    parts = plan(CLAIMS, ["sums", "another"], [0, 1, 2], lambda subjects: None, LORA)
    for task, tier in (("sums", 0), ("another", 2)):
        of_tier = [part.subject for part in parts if part.tier == tier]
        assert of_tier == [Subject("grpo", task, word) for word in ("dense", "again", "subnetwork")]


@pytest.mark.parametrize("claims", [[4], [7], [4, 7], [5, 6]])
def test_everything_is_tuned_on_its_own_on_every_task(claims):
    """Whether the best mask is random, which claim 7 tunes too, or another."""
    for chosen in (first_of, lambda subjects: subjects[-1]):
        parts = plan(claims, ["sums", "another"], [0, 1], chosen, LORA)
        assert {part.subject.task for part in parts} == {"sums", "another"}
        assert all(part.tuned_by == part.subject for part in parts)


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (3, {"dense", "again", "subnetwork"}),
        (4, {"dense", "random:2.5:tile64", "snip:2.5:tile64"}),
        (5, {"dense", "lora:8", "random:2:tile64"}),
        (6, {"dense", "sgd"}),
    ],
)
def test_the_central_comparison_is_made_on_every_task(claim, words):
    snip = Subject("grpo", "sums", "snip:2.5:tile64")
    parts = plan([claim], ["sums", "another"], [0, 1], lambda subjects: snip if snip in subjects else None, LORA)
    for task in ("sums", "another"):
        of_task = {part.subject.trained: part.seeds for part in parts if part.subject.task == task}
        assert all(of_task[word] == ((0,) if word == "again" else (0, 1)) for word in words)


def test_masks_are_run_as_long_as_dense_training_takes(settings):
    """Masks of other sources have one size, and random ones all; what was not timed, or takes as long, has no more."""
    tiles = [f"{source}:2.5:tile64" for source in ("random", "snip", "early10", "found")]
    words = [*tiles, "random:10", "random:1", "random:0.1", "snip:1"]
    subjects = [DENSE, *(Subject("grpo", "sums", word) for word in words)]
    parts = [Part(subject, subject, (0, 1), (4, 5)) for subject in subjects]
    seconds = {"dense": 1.0, "random:2.5:tile64": 0.8, "random:1": 0.5, "random:10": 1.0}
    times = {("grpo", word): {"step_time_s": step} for word, step in seconds.items()}
    found = schedule.at_equal_time(settings, parts, times)
    assert {part.subject.trained: part.n_steps for part in found} == {
        "random:2.5:tile64": 62,
        "random:1": 100,
        "snip:2.5:tile64": 62,
        "early10:2.5:tile64": 56,  # of 90 % of the time, since it takes 10 % to find it
    }
    assert all(part.claims == (4,) and part.seeds == (0, 1) for part in found)
    assert schedule.at_equal_time(settings, parts, {}) == []


def test_runs_of_another_length_are_kept_apart(results, measured, settings, tmp_path):
    subject = Subject("grpo", "sums", "random:1:tile64")
    for rate, accuracy in zip(first_rates(settings, subject), (0.4, 0.5, 0.4), strict=True):
        results.add(Run("grpo", "sums", subject.trained, rate, TUNING_SEED), measured(accuracy))
    part = Part(subject, subject, (0, 1), (4,))
    longer = replace(part, n_steps=70)
    rate = results.best_rate(subject)
    assert [run.n_steps for run in schedule.runs_left(settings, longer, results)] == [70, 70]
    results.add(Run("grpo", "sums", subject.trained, rate, 0, 70), measured(0.75))
    results.add(Run("grpo", "sums", subject.trained, rate, 0), measured(0.25))
    for known in (results, Results(results.path, results.header)):
        assert [row["accuracy"] for row in rows_of(known, longer)] == [0.75]
        assert [row["accuracy"] for row in rows_of(known, part)] == [0.25]
        assert [run.seed for run in schedule.runs_left(settings, longer, known)] == [1]
    world = World(tmp_path, {"model": "smollm2", "shared": {}, "grpo": {"n_steps": 50}, "reward_functions": []}, "cpu")
    assert world.options(Run("grpo", "sums", "dense", 1e-5, 0))["n_steps"] == 50
    assert world.options(Run("grpo", "sums", "dense", 1e-5, 0, 70))["n_steps"] == 70
    assert Run("grpo", "sums", "dense", 1e-5, 0, 70).name.endswith("_seed0_70steps")


def test_first_seeds_come_before_second_ones_and_small_claims_before_large_ones():
    parts = plan(CLAIMS, ["sums", "another"], [0, 1, 2], lambda subjects: None, LORA)
    order = schedule.in_order(parts)
    for tier in {part.tier for part in parts}:
        seeds = [part.seeds for part in order if part.tier == tier]
        assert sorted(seeds, key=lambda of: of == (1, 2)) == seeds and {len(of) for of in seeds} <= {0, 1, 2}
    for part in parts:
        assert sum((of.seeds for of in order if of.subject == part.subject), ()) == part.seeds
    ends = {claim: max(i for i, part in enumerate(order) if claim in part.claims) for claim in CLAIMS}
    assert sorted(ends, key=ends.get) == [1, 2, 3, 6, 7, 4, 5]


@pytest.mark.parametrize(
    "word", ["dense:1", "lora", "lora:0", "random", "random:0", "random:nan", "early3:1", "snip:1:x"]
)
def test_what_cannot_be_trained(word):
    with pytest.raises(ConfigError, match=f"trained {word}: expected"):
        Trained.parse(word)


def test_rates_grow_as_masks_shrink(settings):
    rates = {word: first_rates(settings, Subject("grpo", "sums", word))[1] for word in ("dense", "lora:8", "random:1")}
    assert rates == {"dense": 1e-5, "lora:8": 1e-4, "random:1": pytest.approx(10**-3.5, rel=1e-5)}
    # As many values as LoRA of rank 8, but as of a mask.
    shira, mask = (first_rates(settings, Subject("grpo", "sums", word)) for word in ("shira:8", "random:1.8152"))
    assert shira == mask


def test_a_killed_write_is_dropped_and_the_rest_kept(results, measured):
    first, second = Run("grpo", "sums", "dense", 1e-5, 0), Run("grpo", "sums", "dense", 1e-5, 1)
    results.add(first, measured())
    whole = results.path.read_bytes()
    results.add(second, measured())
    results.path.write_bytes(results.path.read_bytes()[:-7])
    again = Results(results.path, results.header)
    assert first in again and second not in again
    assert results.path.read_bytes() == whole
    again.add(second, measured())
    assert results.path.read_bytes().startswith(whole) and second in Results(results.path, results.header)
    with pytest.raises(ConfigError, match="line 1 has a run of other settings"):
        Results(results.path, {"settings": "other"})
    results.path.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1 is not a run of the study"):
        Results(results.path, results.header)


def test_tuning_goes_past_an_end_twice_and_seeds_use_the_best_rate(results, measured, settings):
    accuracies = {3e-6: 0.1, 1e-5: 0.2, 3e-5: 0.3, 1e-4: 0.4, 3e-4: 0.5}
    while runs := schedule.tuning_runs(settings, DENSE, results):
        for run in runs:
            assert run.seed == TUNING_SEED
            results.add(run, measured(accuracies[run.learning_rate]))
    assert len(results.of(DENSE, [TUNING_SEED])) == 5
    part = Part(DENSE, DENSE, (0, 1), (4,))
    assert [run.learning_rate for run in schedule.runs_left(settings, part, results)] == [3e-4, 3e-4]
    again = Part(Subject("grpo", "sums", "again"), DENSE, (0,), (3,))
    assert [(run.learning_rate, run.seed) for run in schedule.runs_left(settings, again, results)] == [(3e-4, 0)]


def test_an_estimate_counts_what_is_left(results, measured, settings):
    """Two claims share the dense runs; a mask that is found in a dense run takes one more of these."""
    mask = Subject("grpo", "sums", "found:1")
    parts = [Part(DENSE, DENSE, (0, 1, 2), (4, 6)), Part(mask, mask, (), (4,), tier=1)]
    text = schedule.estimate(settings, parts, results, 2)
    assert "| grpo | sums | dense | tuning 0 | 4 6 | 4 | 3 |" in text  # 4 runs of 100 s
    assert "| grpo | sums | dense | 1 2 | 4 6 | 2 | 5 |" in text
    assert "| 4 | 9 | 3 | 8 |" in text and "| 6 | 6 | 0 | 5 |" in text  # 9 runs and one to find the mask, and 6
    assert "9 runs, about 8 minutes" in text and "guesses" in text
    for rate, accuracy in ((3e-6, 0.1), (1e-5, 0.2), (3e-5, 0.1)):
        results.add(Run("grpo", "sums", "dense", rate, TUNING_SEED), measured(accuracy, seconds=1200.0))
    text = schedule.estimate(settings, parts[:1], results, 2)
    assert "| grpo | sums | dense | 0 | 4 6 | 1 | 10 |" in text
    assert "3 runs, about 30 minutes with --jobs 2 (by the times" in text


def test_runs_of_other_questions_are_refused(results, measured):
    first, second = Run("grpo", "sums", "dense", 1e-5, 0), Run("grpo", "sums", "dense", 1e-5, 1)
    results.add(first, measured(inputs={"texts.jsonl": "a", "questions/sums/asked.jsonl": "b"}))
    assert results.agrees_with({"texts.jsonl": "a", "other": "c"}) and not results.agrees_with({"texts.jsonl": "b"})
    with pytest.raises(ConfigError, match=r"seed1 is a run on texts\.jsonl with digest x; expected a"):
        results.add(second, measured(inputs={"texts.jsonl": "x"}))
    row = json.loads(results.path.read_text()) | {"seed": 1, "inputs": {"questions/sums/asked.jsonl": "x"}}
    with open(results.path, "a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="line 2 is a run on questions/sums/asked.jsonl"):
        Results(results.path, results.header)


def test_times_are_those_of_as_many_runs_at_once(results, measured):
    for seed, (jobs, seconds) in enumerate([(1, 10.0), (8, 80.0), (8, 90.0)]):
        results.add(Run("grpo", "sums", "dense", 1e-5, seed), measured(jobs=jobs, seconds=seconds))
    assert [results.seconds_per_run("grpo", jobs) for jobs in (1, 8, 4)] == [10, 85, 80]
    assert results.seconds_per_run("sft", 1) is None


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
