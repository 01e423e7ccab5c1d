"""The study's plan, its order, and its results file; on made-up results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from sparse_opt.bench.study import main as study_main
from sparse_opt.bench.study import schedule
from sparse_opt.bench.study.plan import CLAIMS, TUNING_SEED, Part, Run, Subject, Trained, claims_of, first_rates, plan
from sparse_opt.bench.study.results import Results
from sparse_opt.bench.study.timing import timed_as
from sparse_opt.bench.study.verdicts import rows_of
from sparse_opt.bench.study.world import World
from sparse_opt.errors import ConfigError

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
        (8, {"dense", "random:2.5:tile64", "lean:2.5:tile64"}),
    ],
)
def test_the_central_comparison_is_made_on_every_task(claim, words):
    snip = Subject("grpo", "sums", "snip:2.5:tile64")
    parts = plan([claim], ["sums", "another"], [0, 1], lambda subjects: snip if snip in subjects else None, LORA)
    for task in ("sums", "another"):
        of_task = {part.subject.trained: part.seeds for part in parts if part.subject.task == task}
        assert all(of_task[word] == ((0,) if word == "again" else (0, 1)) for word in words)


def test_lean_runs_are_compared_with_the_random_mask_alone(results, finish, settings):
    """They take its learning rate without tuning, and are no mask of the other claims; their steps are timed."""
    parts = plan(CLAIMS, ["sums", "another"], [0, 1], lambda subjects: None, LORA)
    lean = [part for part in parts if part.subject.trained.startswith("lean")]
    assert [(part.subject.task, part.claims, part.seeds) for part in lean] == [
        ("sums", (8,), (0, 1)),
        ("another", (8,), (0, 1)),
    ]
    assert [part.tuned_by for part in lean] == [
        Subject("grpo", task, "random:2.5:tile64") for task in ("sums", "another")
    ]
    assert schedule.runs_left(settings, lean[0], results) == []
    random = next(part for part in parts if part.subject == lean[0].tuned_by)
    finish(results, [random], lambda run: {})
    assert schedule.runs_left(settings, lean[0], results) == [
        Run("grpo", "sums", "lean:2.5:tile64", results.best_rate(random.subject), seed) for seed in (0, 1)
    ]
    assert timed_as(lean[0].subject) == ("grpo", "lean:2.5:tile64")


def test_weights_of_fp32_have_no_lean_runs(tmp_path):
    settings = yaml.safe_load(study_main.SETTINGS.read_text(encoding="utf-8"))
    assert claims_of(settings["smollm2"]) == list(CLAIMS) == [*claims_of(settings["small"]), 8]
    with pytest.raises(ConfigError, match="--claims 8 needs bf16 weights, and those of size small are fp32"):
        study_main.main(["--size", "small", "--claims", "8", "--output_dir", str(tmp_path), "--dry_run"])


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
    assert sorted(ends, key=ends.get) == [1, 2, 3, 6, 7, 4, 5, 8]


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
