"""The end-to-end benchmark's report: what limits a step, what is compared, and which results are wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sparse_opt.bench.training.baseline.report import (
    SHARED_NORM_RTOL,
    ratio_lines,
    ratios,
    shared_ratios,
    summary,
    text,
    wrong_results,
)


def gpu_result(mode: str, host_s: float, peak: int, kernel_s: float | None = None) -> dict:
    step = {
        "loss": math.log(2),
        "grad_norm": 1.0,
        "step_s": 0.11,
        "host_s": host_s,
        "section_s": {"forward": 0.08, "step": 0.02},
        "section_host_s": {"forward": host_s, "step": 0.001},
    }
    return {
        "mode": mode,
        "n_trained": 2 * 10**9,
        "n_tiled": 0,
        "data_digest": "d",
        "peak_memory_bytes": peak,
        "peak_reserved_bytes": peak,
        "bytes": {"weights": 2**32, "grad": 2**31, "base": 0},
        "kernel_s": kernel_s,
        "steps": [{**step, "step_s": 9.0}, *({**step, "step_s": 0.1 + 0.01 * i} for i in range(3))],
    }


def test_what_limits_and_what_is_compared():
    rows = [
        summary(gpu_result("dense", host_s=0.03, peak=2**34, kernel_s=0.09), n_warmup=1),
        summary(gpu_result("sparse", host_s=0.079, peak=2**33, kernel_s=0.06), n_warmup=1),
    ]
    assert [row["limit"] for row in rows] == ["GPU", "host"]
    assert [row["host_bound_share"] for row in rows] == [0, pytest.approx(0.8)]
    assert rows[0]["step_s"] == pytest.approx(0.11)  # the warm-up step is left out
    assert rows[0]["sections_s"] == pytest.approx(0.1)
    assert ratios(rows) == {"sparse": {"step": 1.0, "peak_memory": 0.5, "kernels": pytest.approx(2 / 3)}}
    assert ratios(rows[1:]) == {}
    report = {
        "algorithm": "dpo",
        "environment": {"machine": {"cpu": "c", "gpu": {"name": "g"}}},
        "settings": {
            "modes": ["dense", "sparse"],
            "batch_size": 1,
            "sequence_length": 8,
            "gradient_checkpointing": True,
        },
        "mask": {"nnz": 10},
        "numel": 400,
        "ratios": ratios(rows),
        "rows": rows,
    }
    lines = text(report).splitlines()
    assert lines[0].startswith("400 bf16 weights, 2.50% active") and lines[0].endswith("checkpointed; g")
    assert lines[1].split()[-5:] == ["kernels", "peak", "GiB", "reserved", "limit"]
    assert lines[4].split() == [
        "sparse",
        "80.0",
        "20.0",
        "110.0",
        "104.0",
        "-",
        "116.0",
        "79.0",
        "60.0",
        "8.00",
        "8.00",
        "host",
    ]
    assert [cell.strip() for cell in lines[6].split("  ") if cell] == [
        "held, GiB",
        "weights",
        "grad",
        "activations and scratch at the peak",
        "values trained",
    ]
    assert lines[8].split() == ["dense", "4.00", "2.00", "10.00", "2.00", "B"]
    assert lines[9].split() == ["sparse", "4.00", "2.00", "2.00", "2.00", "B"]
    assert "sparse/dense: step 1.00, peak memory 0.50, kernels 0.67" in lines


def test_mode_tiles_has_to_compute_tiles():
    rows = [summary(gpu_result(mode, host_s=0.01, peak=1), n_warmup=1) for mode in ("sparse", "tiles")]
    rows[1]["n_tiled"] = 14
    assert wrong_results("dpo", rows) == []
    rows[1]["n_tiled"] = 0
    assert wrong_results("dpo", rows) == [
        "mode tiles computes no weight gradient by tiles: its optimizer's tiled_parameters are empty"
    ]


def test_shared_prompts_are_compared_with_separate_rows():
    names = ("dense", "dense, shared prompts", "tiles", "tiles, shared prompts", "lora, shared prompts")
    rows = [summary(gpu_result(name, host_s=0.01, peak=2**30 + 2**28 * i), n_warmup=1) for i, name in enumerate(names)]
    for row in rows[2:4]:
        row["n_tiled"] = 1
    rows[3]["step_s"] = rows[2]["step_s"] * 0.6
    found = shared_ratios(rows)
    assert found == {
        "dense": {"step": 1.0, "peak_memory": 1.25},
        "tiles": {"step": pytest.approx(0.6), "peak_memory": pytest.approx(7 / 6)},
    }
    lines = ratio_lines({"ratios": ratios(rows), "shared_ratios": found})
    assert lines[-1] == "tiles, shared prompts/separate rows: step 0.60, peak memory 1.17"
    assert lines[0] == "dense, shared prompts/dense: step 1.00, peak memory 1.25" and len(lines) == 6
    assert wrong_results("dpo", rows) == []
    rows[1]["first"]["grad_norm"] = 1 + 2 * SHARED_NORM_RTOL
    rows[3]["n_tiled"] = 0
    assert wrong_results("dpo", rows) == [
        "mode tiles, shared prompts computes no weight gradient by tiles: its optimizer's tiled_parameters are empty",
        "mode dense, shared prompts begins with a gradient norm of 1.04, expected 1.0",
    ]
    rows[3]["n_tiled"] = 1
    # Of a pair with the loss -log sigmoid(x), the norm is proportional to sigmoid(-x): 0.5 and 0.52.
    rows[1]["first"] |= {"loss": -math.log(0.48), "grad_norm": 1.04}
    assert wrong_results("dpo", rows, compiled=True) == []
    rows[1]["first"]["grad_norm"] = 1.0
    (wrong,) = wrong_results("dpo", rows, compiled=True)
    assert wrong.startswith("mode dense, shared prompts begins with a gradient norm of 1.0, expected 1.0")
    for loss in (0.0, -800.0, math.inf, math.nan):
        rows[1]["first"]["loss"] = loss
        assert wrong_results("dpo", rows)[0].startswith(f"mode dense, shared prompts begins at a DPO loss of {loss}")


@pytest.mark.parametrize(
    ("algorithm", "first", "message"),
    [
        ("dpo", {"loss": float("nan")}, "begins at a DPO loss of nan"),
        ("dpo", {"grad_norm": 0.0}, "has a gradient norm of 0 in step 1"),
        ("grpo", {"ratio_error": 0.1, "k3": 0.0}, "begins with ratios off by 0.1, expected 1"),
        ("grpo", {"ratio_error": 0.0, "k3": 0.1}, "begins at a divergence of 0.1, expected 0"),
    ],
)
def test_wrong_first_steps(algorithm, first, message):
    result = gpu_result("sparse", host_s=0.01, peak=1)
    result["steps"][0] |= first
    (line,) = wrong_results(algorithm, [summary(result, n_warmup=1)])
    assert line.startswith("mode sparse ") and message in line


def test_a_plot_shows_every_section_and_the_peak(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    from matplotlib.figure import Figure

    from sparse_opt.bench.training.baseline.plot import plot

    drawn = []

    class Kept(Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            drawn.append(self)

    rows = [summary(gpu_result(mode, host_s=0.03, peak=2**34), n_warmup=1) for mode in ("dense", "sparse")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure", Kept)
        plot({"algorithm": "dpo", "rows": rows}, Path(tmp_path / "plot.png"), "a title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["dense", "sparse"]
    assert axes.get_ylabel() == "ms a step, median"
    texts = [item.get_text() for item in axes.texts]
    assert texts.count("110.0 ms\npeak 16.0 GiB") == 2
    assert texts.count("80.0") == 2  # forward
    tops = [sum(bar.get_height() for bar in axes.patches[i::2]) for i in range(2)]
    assert tops == pytest.approx([110.0, 110.0])
