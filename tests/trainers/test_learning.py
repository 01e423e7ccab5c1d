"""Every loop that reinforces learns, on a CPU, with three seeds. Minutes of training: `make test-learning`."""

from __future__ import annotations

import json
import os
from statistics import mean

import pytest

pytestmark = pytest.mark.skipif(
    "SPARSE_OPT_LEARNING" not in os.environ, reason="trains for minutes: make test-learning"
)

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    from sparse_opt.bench.training.learning import main as learning

    folder = tmp_path_factory.mktemp("learning")
    words = ["--output_dir", str(folder), "--device", "cpu", "--n_processes", "2", "--trained", "dense", "random:10"]
    assert learning.main(words) == 0
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("trained", ["dense", "random:10"])
@pytest.mark.parametrize(("algorithm", "gain"), [("grpo", 0.12), ("ppo", 0.15), ("rlt", 2.0)])
def test_the_reward_rises(results, algorithm, gain, trained, seed):
    # A step's reward is the mean of 128 completions. The standard error of the difference of two means of six steps'
    # verified answers is 0.026 at most. The teacher's reward is in nats, and begins near -13.
    curve = run_of(results, algorithm, trained, seed)["curve"]
    assert mean(curve[-6:]) - mean(curve[:6]) > gain


@pytest.mark.parametrize("trained", ["dense", "random:10"])
def test_accuracy_rises_by_rejection_sampling(results, trained):
    # 320 held-out answers before, and as many after for each seed: a difference's standard error is 0.04 at most.
    gains = [run_of(results, "rft", trained, seed)["after"] - results["before"]["rft"] for seed in SEEDS]
    assert min(gains) > 0
    assert mean(gains) > 0.1


def run_of(results, algorithm, trained, seed):
    expected = (algorithm, trained, seed)
    (run,) = (r for r in results["runs"].values() if (r["algorithm"], r["trained"], r["seed"]) == expected)
    return run
