"""The study's plan, resuming and verdicts, on the small arithmetic world."""

from __future__ import annotations

import json
import re

import pytest
import torch
import yaml
from safetensors.torch import save_file

from sparse_opt.bench.study import main as study_main
from sparse_opt.bench.study.measures import closeness, overlaps_with
from sparse_opt.bench.study.plan import CLAIMS, TUNING_SEED, Choice, Part, Run, Subject, Trained, first_rates, plan
from sparse_opt.bench.study.report import report
from sparse_opt.bench.study.results import Results
from sparse_opt.bench.study.verdicts import Score, not_below, score_of, verdict
from sparse_opt.errors import ConfigError

HEADER = {"settings": "digest"}
SETTINGS = {"learning_rates": {"grpo": 1e-5}, "factors": [0.3, 1, 3], "tile": "tile64"}
DENSE = Subject("grpo", "sums", "dense")


def first_of(subjects):
    return subjects[0]


@pytest.mark.parametrize("size", ["smollm2", "small"])
def test_every_run_of_the_plan_can_be_read_and_has_rates(size):
    settings = yaml.safe_load(study_main.SETTINGS.read_text(encoding="utf-8"))[size]
    parts = plan(CLAIMS, [*settings["tasks"], "another"], [0, 1, 2], first_of)
    assert len({part.subject for part in parts}) == len(parts)
    assert {claim for part in parts for claim in part.claims} == set(CLAIMS)
    for part in parts:
        assert str(Trained.parse(part.subject.trained)) == part.subject.trained
        assert len(first_rates(settings, part.subject)) == len(settings["factors"])
        tuned_by = next(other for other in parts if other.subject == part.tuned_by)
        assert tuned_by.tuned_by == tuned_by.subject


def test_a_mask_is_run_with_every_seed_once_it_is_chosen():
    def seeds_of(trained, chosen):
        return {part.subject.trained: part.seeds for part in plan([4], ["sums"], [0, 1], chosen)}[trained]

    assert seeds_of("snip:1", lambda subjects: None) == ()
    assert seeds_of("snip:1", lambda subjects: Subject("grpo", "sums", "snip:1")) == (0, 1)


@pytest.mark.parametrize(
    "word", ["dense:1", "lora", "lora:0", "random", "random:0", "random:nan", "early3:1", "snip:1:x"]
)
def test_what_cannot_be_trained(word):
    with pytest.raises(ConfigError, match=f"trained {word}: expected"):
        Trained.parse(word)


def test_rates_grow_as_masks_shrink():
    rates = {word: first_rates(SETTINGS, Subject("grpo", "sums", word))[1] for word in ("dense", "lora:8", "random:1")}
    assert rates == {"dense": 1e-5, "lora:8": 1e-4, "random:1": 1e-4}


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results.jsonl", HEADER)


def measured(accuracy=0.5, **others):
    return {
        "accuracy": accuracy,
        "tune_accuracy": accuracy,
        "changed_bf16": 0.2,
        "changed_1e-5": 0.3,
        "changed_by_component": {"norms": 0.1},
        "ranks": {"numerical": 0.99, "numerical_min": 0.9, "effective": 0.5},
        "seconds": 2.0,
        "jobs": 1,
        **others,
    }


def test_a_killed_write_is_dropped_and_the_rest_kept(results):
    first, second = Run("grpo", "sums", "dense", 1e-5, 0), Run("grpo", "sums", "dense", 1e-5, 1)
    results.add(first, measured())
    whole = results.path.read_bytes()
    results.add(second, measured())
    results.path.write_bytes(results.path.read_bytes()[:-7])
    again = Results(results.path, HEADER)
    assert first in again and second not in again
    assert results.path.read_bytes() == whole
    again.add(second, measured())
    assert results.path.read_bytes().startswith(whole) and second in Results(results.path, HEADER)
    with pytest.raises(ConfigError, match="line 1 has a run of other settings"):
        Results(results.path, {"settings": "other"})
    results.path.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1 is not a run of the study"):
        Results(results.path, HEADER)


def test_tuning_goes_past_an_end_twice_and_seeds_use_the_best_rate(results):
    accuracies = {3e-6: 0.1, 1e-5: 0.2, 3e-5: 0.3, 1e-4: 0.4, 3e-4: 0.5}
    while runs := study_main.tuning_runs(SETTINGS, DENSE, results):
        for run in runs:
            assert run.seed == TUNING_SEED
            results.add(run, measured(accuracies[run.learning_rate]))
    assert len(results.of(DENSE, [TUNING_SEED])) == 5
    part = Part(DENSE, DENSE, (0, 1), (4,))
    assert [run.learning_rate for run in study_main.runs_left(SETTINGS, part, results)] == [3e-4, 3e-4]
    like = Part(Subject("grpo", "sums", "snip:1"), DENSE, (0,), (4,))
    found = [(run.learning_rate, run.seed) for run in study_main.runs_left(SETTINGS, like, results)]
    assert found == [(3e-4, TUNING_SEED), (3e-4, 0)]


def test_an_estimate_counts_what_is_left(results):
    part = Part(DENSE, DENSE, (0, 1, 2), (4,))
    text = study_main.estimate(SETTINGS, [part], results, 2)
    assert "6 runs, about" in text and "a guess" in text
    for rate, accuracy in ((3e-6, 0.1), (1e-5, 0.2), (3e-5, 0.1)):
        results.add(Run("grpo", "sums", "dense", rate, TUNING_SEED), measured(accuracy, seconds=1200.0))
    assert "3 runs, about 30 minutes with --jobs 2 (by the times" in study_main.estimate(SETTINGS, [part], results, 2)


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (Score(0.50, 0.00, 3), True),
        (Score(0.46, 0.01, 3), None),  # 0.04 below, known up to 0.012
        (Score(0.40, 0.02, 3), False),
        (Score(0.50, 0.10, 3), None),
        (Score(0.60, float("nan"), 1), None),
    ],
)
def test_not_below(first, expected):
    assert not_below(first, Score(0.50, 0.0, 3)) is expected


def with_scores(results, parts, accuracy):
    """Fill in the runs of the parts: `accuracy(trained, seed)`."""
    for part in parts:
        for seed in (TUNING_SEED, *part.seeds):
            run = Run("grpo", "sums", part.subject.trained, 1e-5, seed)
            if run not in results:
                results.add(run, measured(accuracy(part.subject.trained) + seed / 10**4 * (seed < 3)))


def test_the_verdict_on_cheap_masks(tmp_path):
    parts = plan([4], ["sums"], [0, 1, 2], first_of)

    def verdict_with(name, accuracy, start=0.2):
        found = Results(tmp_path / name, HEADER)
        with_scores(found, parts, accuracy)
        return verdict(4, found, parts, ["sums"], {"sums": {"accuracy": start}})

    good = ("dense", "random:2.5:tile64")
    assert verdict_with("a", lambda trained: 0.7 if trained in good else 0.1) == "holds"
    assert verdict_with("c", lambda trained: 0.25, start=0.2) == "not shown"  # nothing was learned
    # A mask of a whole dense run is not cheap, 10 % is not little, and one that was not chosen is not compared.
    dear = ("dense", "found:2.5:tile64", "random:10:tile64", "snip:1")
    assert verdict_with("b", lambda trained: 0.7 if trained in dear else 0.1) == "does not hold"


def test_several_comparisons_need_more():
    second = Score(0.5, 0.0, 3)
    assert not_below(Score(0.461, 0.009, 3), second) is True
    assert not_below(Score(0.461, 0.009, 3), second, n_comparisons=3) is None


def test_few_questions_show_little():
    """Of 100 questions, two runs answer 50 alike, 24 the one alone and 26 the other alone."""
    both, first, second = "1" * 25 + "0" * 25, "1" * 24 + "0" * 26, "0" * 24 + "1" * 26
    rows = [
        [{"accuracy": accuracy, "right": both + own, "n_generations": 1}] * 2
        for accuracy, own in ((0.49, first), (0.51, second))
    ]
    scores = [score_of(of) for of in rows]
    assert len(scores[0].questions) == 100 and scores[0].spread == 0
    assert not_below(*scores) is None  # 0.02 below, known up to 0.14
    assert not_below(scores[0]._replace(questions=()), scores[1]._replace(questions=())) is True


def test_the_page_says_what_is_missing(results):
    dense, sft = (Subject(algorithm, "sums", "dense") for algorithm in ("grpo", "sft"))
    parts = [Part(subject, subject, (0, 1), (1,)) for subject in (dense, sft)]
    results.add(Run("grpo", "sums", "dense", 1e-5, TUNING_SEED), measured())
    results.add(Run("grpo", "sums", "dense", 1e-5, 0), measured(0.75))
    page = report(results, parts, Choice([1], ["sums"], [0, 1]), {"sums": {"accuracy": 0.25}})
    assert "**not shown**" in page and "2 of 2 rows are not finished" in page
    assert "| sums | grpo | dense | 1e-05 | 0.250 | 0.750 | 0.750 |  | 1 | 20.0% | 2 |" in page


def test_the_verdicts_on_common_weights_and_on_the_subnetwork(tmp_path):
    seeds = (0, 1)
    words = ("dense", "again", "subnetwork")
    parts = [Part(Subject("grpo", "sums", word), DENSE, seeds, (2, 3)) for word in words]

    def verdicts(name, n_both, again, subnetwork):
        results = Results(tmp_path / name, HEADER)
        results.add(Run("grpo", "sums", "dense", 1e-5, TUNING_SEED), measured())
        for word in words:
            for seed in seeds:
                run = Run("grpo", "sums", word, 1e-5, seed)
                within = {"within_1e-5": 0.0, "within_1e-4": again if word == "again" else subnetwork}
                closeness = {} if word == "dense" else {"closeness": {**within, "distance": 1.0, "cosine": 0.5}}
                counts = {"n": 30, "n_other": 40, "n_both": n_both, "expected": 20.0, "expected_by_tensor": 15.0}
                overlaps = {Run("grpo", "sums", "dense", 1e-5, 1 - seed).name: counts} if word == "dense" else {}
                results.add(run, measured(0.5 + seed / 10**4, overlaps=overlaps, **closeness))
        page = report(results, parts, Choice([2, 3], ["sums"], seeds), {})
        row = f"| seed | 1 | {n_both / 30:.1%} | 50.0% | 66.7% | {n_both / 20:.2f} to {n_both / 20:.2f} |"
        assert row in page  # one pair, though both runs have counted it
        return tuple(
            verdict(claim, results, parts[: 1 if claim == 2 else 3], ["sums"], {"sums": {"accuracy": 0.1}})
            for claim in (2, 3)
        )

    assert verdicts("a", 25, again=1.0, subnetwork=1.0) == ("holds", "holds")
    assert verdicts("b", 21, again=1.0, subnetwork=0.9) == ("does not hold", "does not hold")
    assert verdicts("c", 25, again=0.9, subnetwork=0.9) == ("holds", "not shown")


def test_overlaps_of_changed_weights(tmp_path):
    generator = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(37, 5, generator=generator), "b": torch.ones(9)}
    masks = [{name: torch.rand(w.shape, generator=generator) < 0.3 for name, w in start.items()} for _ in range(2)]
    assert overlaps_with(tmp_path, "first", masks[0], start) == {}
    found = overlaps_with(tmp_path, "second", masks[1], start)["first"]
    joined = [torch.cat([mask["a"].flatten(), mask["b"]]) for mask in masks]
    assert found["n"] == joined[1].sum() and found["n_other"] == joined[0].sum()
    assert found["n_both"] == (joined[0] & joined[1]).sum()
    of_tensors = sum(float(masks[0][name].sum() * masks[1][name].sum()) / start[name].numel() for name in start)
    assert found["expected_by_tensor"] == pytest.approx(of_tensors)
    # The weights of b are equal, so that their exponents say nothing; all exponents of a weigh in.
    exponents = torch.frexp(start["a"].bfloat16().float()).exponent
    of_a = sum(
        float((masks[0]["a"] & (exponents == e)).sum() * (masks[1]["a"] & (exponents == e)).sum())
        / int((exponents == e).sum())
        for e in exponents.unique()
    )
    assert found["expected"] == pytest.approx(of_a + float(masks[0]["b"].sum() * masks[1]["b"].sum()) / 9)


def test_closeness_to_a_dense_run(tmp_path):
    start = torch.zeros(4)
    for name, weights in (("start", start), ("final", torch.tensor([1.0, 2.0, 0.0, 0.0]))):
        (tmp_path / name).mkdir()
        save_file({"w": weights}, tmp_path / name / "model.safetensors")
    save_file({"w": torch.tensor([1.00005, 0.0, 0.0, 0.0])}, tmp_path / "dense.safetensors")
    found = closeness(tmp_path / "start", tmp_path / "dense.safetensors", tmp_path / "final", "cpu")
    assert (found["within_1e-5"], found["within_1e-4"]) == (0.0, 1.0)
    assert found["distance"] == pytest.approx(2, rel=1e-3) and found["cosine"] == pytest.approx(5**-0.5, rel=1e-3)


@pytest.fixture
def tiny_settings(tmp_path, monkeypatch):
    settings = yaml.safe_load(study_main.SETTINGS.read_text(encoding="utf-8"))["small"]
    settings["world"] |= {"n_train": 30, "n_test": 8, "n_demonstrations": 400}
    settings["start"]["n_steps"] = 100
    settings["questions"]["n_tune"] = 8
    settings["factors"] = [1]
    settings["grpo"] |= {"n_steps": 2, "batch_size": 32}
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({"small": settings}))
    monkeypatch.setattr(study_main, "SETTINGS", file)


def test_a_study_that_is_killed_and_resumed_gives_the_same_table(tiny_settings, tmp_path, monkeypatch, capsys):
    """Dense, a mask of the first batch's Fisher information, SGD, and the dense run's subnetwork, of two steps each."""
    words = ("dense", "fisher:10:run16", "subnetwork")
    parts = [Part(Subject("grpo", "sums", word), DENSE, (0,), (1,)) for word in words]
    sgd = Subject("grpo", "sums", "sgd")
    parts.append(Part(sgd, sgd, (), (1,)))
    monkeypatch.setattr(study_main, "plan", lambda *args: parts)
    words = ["--size", "small", "--claims", "1", "--seeds", "0", "--device", "cpu"]
    words += ["--output_dir", str(tmp_path / "out")]
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
    assert len(resumed) == 4 * 3
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [TUNING_SEED, 0, TUNING_SEED, 0, 0, TUNING_SEED]
    assert all(0 < row["changed"] <= 1 for row in rows) and rows[2]["n_trained"] > 0
    assert rows[2]["changed"] < rows[0]["changed"]
    assert rows[4]["closeness"]["cosine"] > 0.9 and rows[5]["changed"] > 0
    assert 0 < rows[1]["ranks"]["effective"] <= rows[1]["ranks"]["numerical"] <= 1

    # Without results, the runs whose weights are gone are done again.
    (tmp_path / "out" / "results.jsonl").unlink()
    for folder in ("masks", "finals", "changed"):
        (tmp_path / "out" / folder).rename(tmp_path / folder)
    assert study_main.main([*words, "--jobs", "2"]) == 0
    assert table_without_times(capsys.readouterr().out) == resumed


def table_without_times(page):
    return [re.sub(r"[\d ]+\|$", "", line) for line in page.splitlines() if line.startswith("| sums")]
