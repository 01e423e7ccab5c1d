"""`sparse-opt bench profiles`: what is measured, what counts as held accuracy, and one small run."""

from typing import Any

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install 'sparse-opt[train]'")

from sparse_opt.bench import report, rows
from sparse_opt.bench.training import profiles
from sparse_opt.cli.main import main


@pytest.fixture
def bench(capfd, monkeypatch, tmp_path):
    """`bench("--repeats", 1)` -> exit code, stdout and stderr; JSON goes to tmp_path, and jobs run in this process."""
    monkeypatch.delenv("SPARSE_OPT_DEBUG", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(profiles, "run_in_process", lambda module, name, job, folder: profiles.run(job))

    def call(*words: object) -> tuple[int, str, str]:
        output = ("--device", "cpu", "--output", tmp_path / "profiles.json")
        code = main(["bench", "profiles", *map(str, (*output, *words))])
        return code, *capfd.readouterr()

    return call


@pytest.mark.parametrize(
    ("accuracy", "plain", "n", "holds"), [(0.4, 0.5, 200, True), (0.4, 0.5, 1000, False), (1, 1, 9, True)]
)
def test_accuracy_may_fall_by_three_binomial_errors(accuracy, plain, n, holds):
    results = {
        name: [{"stages": {"test": {"accuracy": a, "n_prompts": n}}}] for name, a in (("plain", plain), ("x", accuracy))
    }
    assert (profiles.wrong_accuracy("x", results) == []) == holds
    # p = 0.45: 3 * sqrt(2 * 0.45 * 0.55 / 1000)
    assert holds or "the tolerance is 0.0667" in profiles.wrong_accuracy("x", results)[0]


WORDS = ("--model_name_or_path", "m", "--dataset_name", "d", "--test_dataset_name", "t", "--max_completion_length", 8)


@pytest.fixture
def measured(monkeypatch):
    """The commands of each job, which takes the seconds and has the accuracy of `found[name]`."""
    jobs: list[tuple[str, dict[str, Any]]] = []
    found: dict[str, tuple[float, float] | None] = {}

    def run(module, name, job, folder):
        jobs.append((name, dict(job["commands"])))
        if found.get(name, (1.0, 0.5)) is None:
            return None
        seconds, accuracy = found.get(name, (1.0, 0.5))
        numbers = {"work_s": seconds, "tokens_per_s": 100 / seconds, "peak_memory_bytes": None}
        numbers |= {"accuracy": accuracy, "n_prompts": 100}
        return {"stages": dict.fromkeys(profiles.STAGES, numbers)}

    monkeypatch.setattr(profiles, "run_in_process", run)
    return jobs, found


def test_each_profile_is_compared_with_plain(bench, measured, tmp_path):
    jobs, found = measured
    found |= {"plain": (2.0, 0.9), "aggressive": (1.0, 0.6)}
    code, out, err = bench(*WORDS, "--repeats", 2, "--learning_rate", 1e-3)
    assert code == 1
    assert "accuracy of aggressive is 0.6000, 0.3000 below plain; the tolerance is 0.1837" in err
    names = ["plain", "conservative", "balanced", "aggressive"]
    assert [name for name, _ in jobs] == ["start", *names, *names[1:], names[0]]  # none is always the first
    commands = dict(jobs)
    assert "profile" not in commands["plain"]["train"] and commands["plain"]["train"]["bf16"] == "False"
    assert commands["balanced"]["train"]["profile"] == "balanced" == commands["balanced"]["test"]["profile"]
    assert float(commands["aggressive"]["train"]["learning_rate"]) == pytest.approx(1e-3 * 0.1**-0.75)
    run = rows.read(tmp_path / "profiles.json")
    found = {row.metric: row for row in run.matching(profile="conservative")}
    assert (found["all"].value, found["all"].n, found["train, tokens"].value) == (3.0, 2, 100)
    assert report.ratio(run, found["all"], "plain") == 0.5
    assert "conservative" in out


def test_a_configuration_that_failed_is_named(bench, measured):
    _, found = measured
    found["balanced"] = None
    code, _, err = bench(*WORDS, "--profiles", "balanced", "--repeats", 1)
    assert code == 1 and "balanced ran 0 times, expected 1" in err
    found["start"] = None
    assert "the model that all configurations start from could not be made or tested" in bench(*WORDS)[2]


@pytest.mark.slow
def test_a_small_comparison(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(profiles, "ARITHMETIC", {"max_operand": 9, "n_train": 80, "n_test": 20, "p_right": 0.5})
    small = ["--n_prompts", 32, "--train_steps", 3, "--n_test", 16, "--start_steps", 100, "--hidden_size", 64]
    code, out, err = bench("--profiles", "conservative", "--repeats", 1, *small)
    assert code == 0, err
    run = rows.read(tmp_path / "profiles.json")
    for profile in ("plain", "conservative"):
        found = {row.metric: row for row in run.matching(profile=profile)}
        assert found["all"].value == pytest.approx(sum(found[stage].value for stage in profiles.STAGES))
        assert all(found[stage].value > 0 for stage in profiles.STAGES) and found["datagen, tokens"].value > 0
    assert "conservative" in out
