"""The benchmark of GRPO next to vLLM: its rows. A run: tests/vllm_engine."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
pytest.importorskip("datasets", reason="needs datasets: pip install 'sparse-opt[train]'")

from sparse_opt.bench import grpo_engine, report
from sparse_opt.bench.rows import Run

OPTIONS = {"density": 0.025, "sleep": False, "shape": "3b"}
CASE = {"shape": "3b", "n_prompts": 32, "n_generations": 8, "max_new_tokens": 512}


def result(step_s: float) -> dict[str, object]:
    step = {
        "step_s": step_s,
        "section_s": {"sampling": step_s / 2, "synchronisation": 0.001, "training": step_s / 2 - 0.001},
        "logprob_error": {"mean": 0.01, "99.9 %": 0.1},
        "all tokens": True,
        "loss": 0.0,
    }
    first = step | {"step_s": 100.0}
    sizes = {"peak_bytes": 2**33, "gpu_bytes": 2**36, "copied_bytes": 0, "cache_tokens": 10**6}
    return {"steps": [first, step, step, step], "n_tiled": 2, **sizes}


def test_rows_are_compared_with_dense_and_lora():
    args = SimpleNamespace(**OPTIONS)
    machine = {"cpu": "", "gpu": {"name": "NVIDIA H200"}}
    run = Run({"machine": machine})
    for mode, step_s in (("dense", 20.0), ("lora", 20.5), ("tiles", 19.5)):
        assert not grpo_engine.wrong_results(result(step_s), mode)
        run.add(*grpo_engine.result_rows(result(step_s), {"mode": mode, **CASE}, args))
    (step,) = [row for row in run.matching(mode="tiles") if row.metric == "whole step"]
    assert (step.value, step.n) == (19.5e3, 3)
    assert [run.peer(step, name).value for name in step.peers] == [20e3, 20.5e3]
    assert [verdict.met for verdict in report.judge(run)] == [False, True, True, True]
    wrong = result(16.0) | {"n_tiled": 0}
    wrong["steps"][1] |= {"loss": float("nan"), "all tokens": False, "logprob_error": {"mean": 2.0, "99.9 %": 3.0}}
    assert len(grpo_engine.wrong_results(wrong, "tiles")) == 4


def test_vllm_gets_what_the_trainer_leaves():
    """And with sleep a step's part, too."""

    def needs(mode: str, **options: object) -> float:
        return grpo_engine.bytes_of_trainer(SimpleNamespace(**{**OPTIONS, "mode": mode, **options})) / 2**30

    assert needs("tiles") < needs("lora") < needs("dense")
    assert needs("dense", sleep=True) + 8 < needs("dense")
