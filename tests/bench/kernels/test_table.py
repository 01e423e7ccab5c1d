"""The table of `sparse-opt bench kernels`: its command, and the rows of optimizers."""

import contextlib

import pytest
import torch

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.bench import rows as results
from sparse_opt.bench.kernels import cases, optimizers, table, weights
from sparse_opt.bench.kernels.bounds import Rates
from sparse_opt.bench.kernels.cases import WrongResult
from sparse_opt.bench.kernels.optimizers import check_base_weights, parameters, sparse_adamw
from sparse_opt.bench.kernels.recorder import Recorder
from sparse_opt.bench.rows import Run

WORDS = "--device cpu --numel 100000 --delta_numel 5000 --n_rounds 1 --output".split()


def test_parts_of_the_table_are_timed_by_several_calls(tmp_path, capsys, needs_extension):
    path = tmp_path / "kernels.json"
    assert table.main([*WORDS, str(path), "--only", "weights"]) == 0
    assert table.main([*WORDS, str(path), "--only", "deltas", "--resume"]) == 0
    run = results.read(path)
    assert run.completed and run.wrong == []
    assert {row.case["part"] for row in run.rows} == {"copy", "weights", "deltas"}
    (step,) = run.matching(work="SparseAdamW.step, dense gradients", density=0.025)
    assert run.peer(step, "fused AdamW").case["work"] == "torch.optim.AdamW(fused=True).step"
    assert len(run.matching(work="indexed_swap_", density=0.1)) == 1
    assert all(any(name.startswith("bound") for name in row.peers) for row in run.matching(part="deltas"))
    assert "SparseAdamW.step, dense gradients" in capsys.readouterr().out


def test_a_wrong_op_is_not_timed(tmp_path, capsys, needs_extension, monkeypatch):
    true_case = table.cases.delta_apply_case

    def wrong_case(*arguments):
        case = true_case(*arguments)
        case.arguments["values"][:] = float("nan")
        true_run = case.run
        case.run = lambda backend: true_run(backend) if backend == "reference" else None
        return case

    monkeypatch.setattr(table.cases, "delta_apply_case", wrong_case)
    path = tmp_path / "kernels.json"
    assert table.main([*WORDS, str(path), "--only", "deltas"]) == 1
    run = results.read(path)
    assert run.matching(work="delta_apply_") == [] != run.matching(work="delta_encode")
    assert len(run.wrong) == len(table.DELTA_DENSITIES)
    assert "WRONG RESULT: delta_apply_" in capsys.readouterr().err


def test_base_weights_are_checked_inside_and_outside(monkeypatch):
    def optimizer() -> tuple[SparseAdamW, optimizers.Named]:
        named = {name: torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) for name in "ab"}
        grads = {name: torch.ones(40, 50) for name in "ab"}
        params = parameters(named)
        return sparse_adamw(params, grads, MaskSet.random(named, density=0.1), "dense", keep_base_weights=True), params

    check_base_weights(*optimizer())
    wrong, params = optimizer()
    true_swap = wrong.base_weights

    @contextlib.contextmanager
    def wrong_swap():
        with true_swap():
            yield
        params["b"].detach().view(-1)[7] += 1

    monkeypatch.setattr(wrong, "base_weights", wrong_swap)
    with pytest.raises(WrongResult, match="base_weights: b outside again: 1 of 2000"):
        check_base_weights(wrong, params)


def test_timed_steps_change_the_share_of_weights_that_their_bounds_say(monkeypatch):
    """Also those of a small rate, in turns with optimizers that move the same weights far."""
    rows = weights.WeightRows(
        Recorder(Run({}), torch.device("cpu"), [], rates=Rates(1e9, {})),
        {"a": (300, 200)},
        torch.Generator().manual_seed(0),
    )
    active = cases.random_active(rows.params, 0.5, rows.generator)
    masked = weights.Masked(optimizers.mask_of(rows._named(rows.params), active), active, 0.5)
    counted, timed = [], []
    true_share = weights.changed_share
    monkeypatch.setattr(weights, "changed_share", lambda *args: counted.append(true_share(*args)) or counted[-1])

    def in_turns(works, n_rounds=None):
        for _ in range(30):
            for i, work in enumerate(works[: len(counted)]):
                work.call.before()
                before = rows.params[0].clone()
                work.call()
                timed.append((work.case["work"], counted[i], (rows.params[0] != before).sum().item() / active.nnz))

    monkeypatch.setattr(rows.recorder, "time", lambda works: in_turns(works) if len(works) > 1 else None)
    rows._optimizers(masked, [])
    assert any(weights.SMALL in name and 0.005 < share < 0.05 for name, share, _ in timed)
    for name, share, found in timed:
        assert found == pytest.approx(share, rel=0.3), name
