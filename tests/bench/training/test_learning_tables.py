"""`bench learning`: its options, its search for a learning rate, its results file and tables."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest
import torch
import yaml

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
pytest.importorskip("datasets", reason="needs datasets: pip install 'sparse-opt[train]'")

from sparse_opt.bench.training.learning import main as learning
from sparse_opt.bench.training.learning.main import best_rate, beyond, do_runs, tune
from sparse_opt.bench.training.learning.report import Results, json_text, pattern_text, text
from sparse_opt.bench.training.learning.runs import FINDING_SEED, TUNING_SEED, Run, Trained, World, make_mask
from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import ConfigError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.masks.patterns import PATTERNS, matrix_shape, unit_grid

SEEDS = (0, 1)
HEADER = {"size": "small", "settings": {"a": 1}}


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results.json", HEADER)


def measurements(run, after, curve=(0.1, 0.2)):
    masked = {"active": 0.0997} if ":" in run.trained else {}
    fields = {"algorithm": run.algorithm, "trained": run.trained, "learning_rate": run.learning_rate, "seed": run.seed}
    return {**fields, "start": "s0", **masked, "after": after, "curve": list(curve), "seconds": 3.0}


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("dense", "dense"),
        ("lora", "lora"),
        ("random:10", "random:10"),
        ("random:10:element", "random:10"),
        ("found:2.50:tile64", "found:2.5:tile64"),
    ],
)
def test_what_is_trained_has_one_name(word, name):
    assert str(Trained.parse(word)) == name
    assert Trained.parse(name) == Trained.parse(word)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("dens", "--trained dens: expected dense, lora, or random"),
        ("dense:10", "--trained dense:10: expected dense"),
        ("random", "--trained random: expected dense"),
        ("random:10:run32:3", "expected dense"),
        ("random:ten", "--trained random:ten: ten percent, expected a number above 0 and below 100"),
        ("found:nan", "nan percent"),
        ("found:100", "100 percent, expected a number above 0 and below 100"),
        ("found:10:tile32", "pattern tile32, expected one of element, run16, run32, tile64, tile128"),
    ],
)
def test_what_cannot_be_trained_is_said(word, message):
    with pytest.raises(ConfigError, match=message):
        Trained.parse(word)


@pytest.mark.parametrize("size", ["small", "large", "tiles"])
def test_sizes_have_a_rate_for_all_they_train(size):
    settings = yaml.safe_load(learning.SETTINGS.read_text(encoding="utf-8"))[size]
    for algorithm in set(learning.ALGORITHMS) & set(settings):
        for word in settings.get("trained", learning.TRAINED):
            assert str(Trained.parse(word)) == word
            assert float(settings[algorithm]["learning_rates"][Trained.parse(word).source]) > 0


def test_every_pattern_means_something_at_the_size_for_patterns():
    from sparse_opt.trainers.arithmetic import make_model, make_tokenizer

    settings = yaml.safe_load(learning.SETTINGS.read_text(encoding="utf-8"))["tiles"]
    plain = settings["plain"]
    with torch.device("meta"):
        model = make_model(make_tokenizer(), plain["hidden_size"], plain["n_layers"], 0)
    least = min(parts.percent for parts in map(Trained.parse, settings["trained"]) if parts.percent is not None) / 100
    for name, parameter in model.named_parameters():
        if "proj" in name:
            for pattern in PATTERNS:
                down, across = unit_grid(parameter.shape, pattern)
                # A random mask takes two units or more, of several rows and columns of units.
                assert least * down * across >= 1.5 and min(down, across) >= 8, (name, pattern)
                assert matrix_shape(parameter.shape)[0] % PATTERNS[pattern][0] == 0


def test_masks_are_as_they_are_named(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **config))
    world = World(tmp_path, {"found_masks": {"min_tensor_keep": 0.0}}, "cpu")
    model.save_pretrained(world.start("grpo"))
    with DeltaLog.create(world.finding_log("grpo"), model) as log:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        log.append(1)
    for what in ("random:20:run16", "found:20:tile64", "found:20"):
        runs = [Run("grpo", what, 1e-3, seed) for seed in (0, 1)]
        masks = []
        for run in runs:
            make_mask(world, run)
            masks.append(MaskSet.load(world.mask_file(run), model))
        assert masks[0].pattern == Trained.parse(what).pattern
        assert masks[0].density == pytest.approx(0.2, rel=0.15)  # tiles are a fifth of few units
        assert (masks[0] == masks[1]) == what.startswith("found")


@pytest.mark.parametrize(
    ("tried", "best", "expected"),
    [
        ([0.9e-5, 3e-5, 9e-5, 3e-4], 3e-4, [9e-4]),
        ([0.9e-5, 3e-5, 9e-5, 3e-4], 0.9e-5, [3e-6]),
        ([0.1, 0.3, 1, 3], 3, [10]),
        ([0.1, 0.3, 1, 3, 10], 10, [30]),
        ([0.1, 0.3, 1, 3], 0.1, [0.03]),
        ([0.1, 0.3, 1, 3], 1, []),
        ([1], 1, []),
    ],
)
def test_the_next_rate_lies_beyond_the_end_of_the_best(tried, best, expected):
    assert beyond(tried, best) == pytest.approx(expected)


class HereAndNow:
    """A pool that does the work when it is submitted."""

    def __init__(self, after):
        self.after = after
        self.done = []

    def submit(self, function, world, run):
        self.done.append(run)
        future = Future()
        future.set_result(measurements(run, self.after(run)))
        return future


def work_of(pool, deadline=float("inf")):
    return learning._Work(pool, 2, deadline)


def test_tuning_goes_on_past_an_end(results, tmp_path):
    # Best at 1e-2 for dense, whose grid ends at 1e-3; at 1e-4 for random, inside of its grid.
    peaks = {"dense": 1e-2, "lora": 1e-4}
    pool = HereAndNow(lambda run: -abs(torch.tensor(run.learning_rate / peaks[run.trained]).log().item()))
    rates = {("grpo", "dense"): 1e-4, ("grpo", "lora"): 1e-4}
    world = World(tmp_path, {}, "cpu")
    assert tune(work_of(pool), world, rates, [0.1, 1, 10], 3, results) == 0
    assert best_rate(results, "grpo", "dense") == 1e-2
    assert best_rate(results, "grpo", "lora") == 1e-4
    # Each rate once, past the peak by one to see it fall; all by the seed for tuning.
    assert sorted(run.learning_rate for run in pool.done if run.trained == "dense") == [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    assert sorted(run.learning_rate for run in pool.done if run.trained == "lora") == [1e-5, 1e-4, 1e-3]
    assert {run.seed for run in pool.done} == {TUNING_SEED}
    # A second call has nothing left to do.
    assert tune(work_of(HereAndNow(None)), world, rates, [0.1, 1, 10], 3, Results(results.path, HEADER)) == 0


def test_nothing_begins_after_the_deadline(results, tmp_path):
    pool = HereAndNow(lambda run: 0.5)
    runs = [Run("grpo", "dense", 1e-3, seed) for seed in (0, 1, 2)]
    world = World(tmp_path, {}, "cpu")
    assert do_runs(work_of(pool, deadline=0.0), world, runs, results) == 3
    assert not pool.done and not results.data["runs"]
    results.add(runs[1], measurements(runs[1], 0.5))
    assert do_runs(work_of(pool), world, runs, results) == 0
    assert [run.seed for run in pool.done] == [0, 2]


def test_the_file_holds_a_curve_a_line_and_goes_on(results):
    run, trial = Run("grpo", "dense", 1e-3, 0), Run("grpo", "dense", 1e-3, TUNING_SEED)
    results.add(run, measurements(run, 0.123456789, [0.123456789, -1.5e-7, 3]))
    results.add(trial, measurements(trial, 0.5))
    read = json.loads(results.path.read_text(encoding="utf-8"))
    assert read == results.data == Results(results.path, HEADER).data
    assert '"curve": [0.12346, -1.5e-07, 3.0],\n' in results.path.read_text(encoding="utf-8")
    assert read["runs"][run.name]["after"] == 0.123456789
    assert "curve" not in read["runs"][trial.name] and read["runs"][trial.name]["after"] == 0.5
    with pytest.raises(ConfigError, match="has runs of size small, expected large"):
        Results(results.path, {**HEADER, "size": "large"})
    with pytest.raises(ConfigError, match=r"has runs of other settings \(a, b\)"):
        Results(results.path, {**HEADER, "settings": {"a": 2, "b": 3}})


def test_lists_of_words_and_odd_strings_stay_as_json_has_them():
    data = {"words": ["a", "b"], "odd": "[\n1,\n2\n]", "empty": [], "mixed": [1, "a"], "numbers": [[1, 2.5], [-3e-9]]}
    written = json_text(data)
    assert json.loads(written) == data
    assert "[1, 2.5]" in written
    with pytest.raises(ValueError, match="Out of range"):
        json_text({"a": float("nan")})


def test_tables(results):
    afters = {"dense": (0.9, 0.94), "random:10:run32": (0.8, 0.9), "found:10": (0.95, 0.97)}
    rates = {"dense": 1e-4, "random:10:run32": 1e-3, "found:10": 3e-4}
    for what, ends in afters.items():
        for seed, after in zip(SEEDS, ends, strict=True):
            run = Run("grpo", what, rates[what], seed)
            results.add(run, measurements(run, after))
        for factor in (0.1, 1.0):
            trial = Run("grpo", what, rates[what] * factor, TUNING_SEED)
            results.add(trial, measurements(trial, 0.7 + factor / 100))
        results.choose("grpo", what, rates[what])
    # Of another rate than the chosen one, as an earlier call may have left it.
    results.add(Run("grpo", "dense", 1e-2, 0), measurements(Run("grpo", "dense", 1e-2, 0), 0.1))
    results.data["before"]["grpo"] = 0.5
    shown = pattern_text(results, "grpo", list(afters), SEEDS)
    cells = [line.split() for line in shown.splitlines()]
    assert ["dense", "0.0001", "0.920", "0.900", "0.940", "+0.420"] in cells
    assert ["random", "10", "run32", "9.97", "0.001", "0.850", "0.800", "0.900", "+0.350", "-0.070"] in cells
    assert ["found", "10", "element", "9.97", "0.0003", "0.960", "0.950", "0.970", "+0.460", "+0.040"] in cells
    # The best is the higher of the two that were tried.
    assert ["mask", "requested", "%", "element", "run32"] in cells
    assert ["random", "10", ">10"] in cells and ["found", "10", ">3"] in cells
    assert ["random:10:run32", "0.701", "0.710"] in cells
    assert "different models" not in shown
    assert ["grpo", "found:10", "0.0003", "0.500", "0.960", "0.950", "0.970", "+0.460", "3"] in [
        line.split() for line in text(results, ["grpo"], list(afters), SEEDS).splitlines()
    ]
    other = Run("grpo", "dense", 1e-4, 1)
    results.add(other, {**measurements(other, 0.94), "start": "s1"})
    assert "The runs started from 2 different models: s0, s1" in pattern_text(results, "grpo", list(afters), SEEDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "tiles", "--algorithms", "rlt"], "--algorithms rlt: size tiles has no settings for that"),
        (["--trained", "random:0"], "--trained random:0: 0 percent"),
        (["--seeds", "0", str(TUNING_SEED)], f"--seeds {TUNING_SEED}: this seed is used for tuning"),
        (["--tune", "0", "1"], "--tune 0 1: expected factors above 0"),
        (["--widen", "1"], "--widen is 1: expected at least 0, and above 0 only with two factors of --tune or more"),
        (["--n_processes", "0"], "--n_processes is 0, expected at least 1"),
        (["--stop", "3"], "unknown option 'stop' (from --stop); the nearest is 'stop_after'"),
    ],
)
def test_a_wrong_call_is_said_before_any_work(tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(learning, "make_world", None)
    with pytest.raises(ConfigError) as raised:
        learning.main(["--output_dir", str(tmp_path), *words])
    assert message in str(raised.value)


def test_seeds_of_their_own():
    assert TUNING_SEED != FINDING_SEED
