"""The targets of each kind of row, on rows written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sparse_opt.bench.common.report import cells
from sparse_opt.bench.kernels.table import main as kernels
from sparse_opt.bench.kernels.table import peers, targets

# A row whose bound has the measured rate of its writes, and one for which that rate was not measured.
AT_WRITE_RATE = {"scattered_bytes": 5e8, "write_gb_per_s": 1560.0}
WITHOUT_RATE = {"scattered_bytes": 5e8, "write_gb_per_s": None}


def row(work: str, ms: float, **values: Any) -> dict[str, Any]:
    found = {
        "work": work,
        "backend": "cuda",
        "is_auto": True,
        "density": 0.025,
        "ms": ms,
        "p20_ms": ms,
        "p80_ms": ms,
        "host_ms": 0.05,
        "wall_ms": ms,
        "bytes": 1e9,
        "floor_ms": 1.0,
        "bytes_per_active": None,
        **values,
    }
    floor_ms = found["floor_ms"]
    return {**found, "share_of_floor": None if floor_ms is None else floor_ms / ms}


def peer(work: str, ms: float, density: float | None = None) -> dict[str, Any]:
    return row(work, ms, backend="torch", is_auto=False, density=density)


def judged(*rows: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    return {verdict.unit: (pytest.approx(verdict.found), verdict.met) for verdict in targets.judge(rows)}


def test_a_step_has_a_bound_a_host_time_and_a_dense_peer():
    fused = peer(peers.FUSED, 5.5)
    assert judged(row(targets.STEP_DENSE, 1.1), fused) == {
        "x bound": (1.1, True),
        "ms host": (0.05, True),
        "times as fast as fused AdamW": (5.0, True),
    }
    assert judged(row(targets.STEP_DENSE, 1.11, host_ms=0.11), fused) == {
        "x bound": (1.11, False),
        "ms host": (0.11, False),
        "times as fast as fused AdamW": (5.5 / 1.11, False),
    }
    # At 10 % the bound is nearer, and the dense step is no target.
    assert judged(row(targets.STEP_DENSE, 1.06, density=0.1), fused) == {
        "x bound": (1.06, False),
        "ms host": (0.05, True),
    }


def test_narrow_moments_have_to_save_what_their_bytes_say():
    wide = row(targets.STEP_DENSE, 2.0, bytes=4e9, density=0.1)
    narrow = row(targets.STEP_DENSE + targets.BF16, 1.5, bytes=3e9, density=0.1, bytes_per_active=8.0)
    unit = "time ratio / byte ratio"
    assert judged(wide, narrow)[unit] == (1.0, True)
    assert judged(wide, {**narrow, "ms": 1.6})[unit] == (1.6 / 1.5, False)


def test_with_scattered_writes_narrow_moments_have_to_save_what_their_bound_says():
    wide = row(targets.STEP_DENSE, 2.0, bytes=4e9, floor_ms=1.8, **AT_WRITE_RATE)
    narrow = row(targets.STEP_DENSE + targets.BF16, 1.8, bytes=3e9, floor_ms=1.6, **AT_WRITE_RATE)
    assert judged(wide, narrow)["time ratio / bound ratio"] == (0.9 / (1.6 / 1.8), True)
    assert judged(wide, {**narrow, "ms": 1.9})["time ratio / bound ratio"] == (0.95 / (1.6 / 1.8), False)
    assert "time ratio / byte ratio" not in judged(wide, narrow)
    assert not {unit for unit in judged(wide, {**narrow, **WITHOUT_RATE}) if unit.startswith("time ratio")}


@pytest.mark.parametrize(
    ("pattern", "units"),
    [
        ("run16", set()),
        ("run32", {"times as fast as fused AdamW"}),
        ("tile64", {"x bound", "times as fast as fused AdamW"}),
        ("tile128", set()),
    ],
)
def test_tiles_are_judged_by_their_bound_and_long_runs_by_the_dense_step(pattern, units):
    found = judged(row(f"{targets.STEP_DENSE}, {pattern}", 1.2), peer(peers.FUSED, 20.0))
    limits = {"x bound": (1.2, True), "times as fast as fused AdamW": (20 / 1.2, False)}
    assert found == {unit: limits[unit] for unit in units}


@pytest.mark.parametrize("fetches", ["", targets.FINE])
@pytest.mark.parametrize(
    ("work", "limit"), [(targets.STEP_COMPACT, 1.20), (targets.BASE_IN, 1.15), (targets.BASE_OUT, 1.15)]
)
def test_scattered_writes_of_2_5_percent_are_judged_by_their_measured_rate_alone(work, limit, fetches):
    assert "x bound" not in judged(row(work + fetches, 2.0))  # counted as contiguous writes in older results
    assert "x bound" not in judged(row(work + fetches, 2.0, **WITHOUT_RATE))
    assert judged(row(work + fetches, limit, **AT_WRITE_RATE))["x bound"] == (limit, True)
    assert judged(row(work + fetches, 1.01 * limit, **AT_WRITE_RATE))["x bound"] == (1.01 * limit, False)
    assert judged(row(work + fetches, 2.0, density=0.1))["x bound"] == (2.0, False)
    small = row(targets.STEP_COMPACT + targets.SMALL + fetches, 2.0)
    assert judged(small)["x bound"] == (2.0, False)  # few of them are written


@pytest.mark.parametrize("pattern", ["run16", "run32"])
def test_runs_have_a_bound_to_reach_at_the_measured_rate_of_their_writes(pattern):
    name = f"{targets.STEP_DENSE}, {pattern}"
    assert judged(row(name, 1.15, **AT_WRITE_RATE)) == {"x bound": (1.15, True)}
    assert judged(row(name, 1.16, **AT_WRITE_RATE)) == {"x bound": (1.16, False)}
    assert judged(row(name, 1.16, **WITHOUT_RATE)) == {}


def test_a_bound_that_takes_scattered_writes_for_copies_is_no_target():
    for work in (targets.SWAP, targets.STEP_DENSE, f"{targets.STEP_DENSE}, tile64", targets.APPLY):
        assert "x bound" in judged(row(work, 2.0))
        assert "x bound" in judged(row(work, 2.0, **AT_WRITE_RATE))
        assert "x bound" not in judged(row(work, 2.0, **WITHOUT_RATE))
    nothing_scattered = {"scattered_bytes": 0.0, "write_gb_per_s": None}
    assert "x bound" in judged(row(targets.GATHER, 2.0, **nothing_scattered))


def test_an_applied_delta_has_a_bound_to_reach_where_neighbours_are_written_together():
    found = {density: judged(row(targets.APPLY, 1.2, density=density)) for density in (0.01, 0.025, 0.1)}
    assert found == {0.01: {}, 0.025: {"x bound": (1.2, False)}, 0.1: {"x bound": (1.2, False)}}
    assert judged(row(targets.APPLY, 1.2, density=0.01, **AT_WRITE_RATE)) == {"x bound": (1.2, False)}


def test_an_encoder_is_judged_by_the_copy_rate_and_by_torch_at_the_same_density():
    rows = [
        row(targets.ENCODE, 1.1, density=0.01),
        peer(targets.TORCH_ENCODE, 4.4, 0.01),
        row(targets.ENCODE, 1.1, density=0.1),
        peer(targets.TORCH_ENCODE, 3.3, 0.1),
    ]
    found = {(v.density, v.unit): (v.found, v.met) for v in targets.judge(rows)}
    assert found == {
        (0.01, "of the copy rate"): (pytest.approx(1 / 1.1), False),
        (0.01, "times as fast as torch"): (pytest.approx(4.0), True),
        (0.1, "of the copy rate"): (pytest.approx(1 / 1.1), True),
        (0.1, "times as fast as torch"): (pytest.approx(3.0), False),
    }


def test_the_slower_backend_is_compared_with_the_faster():
    cuda, triton = row("indexed_swap_", 1.0), row("indexed_swap_", 1.2, backend="triton", is_auto=False)
    slower = [v for v in targets.judge([cuda, triton]) if v.unit == "x the faster backend"]
    assert [(v.backend, v.found, v.met) for v in slower] == [("triton", pytest.approx(1.2), False)]
    encoders = [{**r, "work": targets.ENCODE} for r in (cuda, triton)]
    assert [v for v in targets.judge(encoders) if v.unit == "x the faster backend"] == []
    slower_cuda = [{**encoders[0], "ms": 1.5}, encoders[1]]
    assert [v.backend for v in targets.judge(slower_cuda) if v.unit == "x the faster backend"] == ["cuda"]
    # A backend that `auto` does not select has no other target; the only backend has none of this kind.
    assert [v.unit for v in targets.judge([triton])] == []


def test_a_backward_pass_is_judged_by_the_gpu_and_by_the_wall():
    hooks = row(targets.BACKWARD_HOOKS, 41.0, wall_ms=52.0)
    plain = row(targets.BACKWARD_PLAIN, 40.0, wall_ms=50.0, is_auto=False, backend="torch")
    found = judged(hooks, plain)
    assert found["x the plain backward, GPU"] == (41 / 40, True)
    assert found["x the plain backward, wall"] == (52 / 50, False)


@pytest.mark.parametrize(
    ("pattern", "tokens", "limit"),
    [("tile64", 8192, 8.0), ("tile128", 8192, 5.0), ("tile64", 1024, 1.6), ("tile128", 1024, 1.2)],
)
def test_weight_gradients_by_tiles_have_a_time_to_reach_at_their_density(pattern, tokens, limit):
    name = targets.tile_gradient(pattern, tokens)
    assert judged(row(name, limit)) == {"ms": (limit, True)}
    assert judged(row(name, 1.01 * limit)) == {"ms": (1.01 * limit, False)}
    assert judged(row(name, 100.0, density=0.1), row(name + targets.A_CALL_A_MATRIX, 100.0)) == {}


def test_names_of_weight_gradients_say_their_tokens():
    for name in (targets.tile_gradient("tile64", 96), targets.dense_gradient(96), targets.gathered_gradient(96)):
        for calls in ("", targets.A_CALL_AN_INPUT):
            assert targets.is_weight_gradient(row(name + calls, 1.0))
            assert targets.tokens_of(row(name + calls, 1.0)) == 96
    assert not targets.is_weight_gradient(row(targets.GATHER, 1.0))


def test_what_cannot_be_measured_is_not_judged():
    assert judged(row(targets.BACKWARD_HOOKS, 41.0)) == {}
    assert judged(row(targets.GATHER, 1.0, floor_ms=None)) == {}


def test_a_line_of_the_table_says_met_only_if_all_targets_are():
    rows = [row(targets.STEP_DENSE, 1.05), row(targets.STEP_COMPACT, 1.05, density=0.1, host_ms=0.2)]
    verdicts = targets.judge(rows)
    lines = [cells(kernels.columns(verdicts), r) for r in rows]
    assert [line[-2] for line in lines] == ["met", "missed"]
    assert lines[0][-1] == "<= 1.1 x bound; <= 0.1 ms host"
    assert lines[0][-3] == "1.05"
    report = {"kernels": {"rows": rows}}
    assert [v.text for v in kernels.missed(report["kernels"])] == [
        "SparseAdamW.step, compact gradients at 10.0% (cuda): 0.2 ms host, expected <= 0.1 ms host"
    ]
