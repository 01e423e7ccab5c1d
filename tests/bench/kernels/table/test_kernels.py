"""`sparse-opt bench kernels`: the table, which gpu_check also prints."""

from __future__ import annotations

import json

import pytest
import torch

from sparse_opt import MaskSet, backends
from sparse_opt.bench.common.timing import Prepared
from sparse_opt.bench.kernels import inputs, optimizers
from sparse_opt.bench.kernels.cases import Active, WrongResult
from sparse_opt.bench.kernels.optimizers import BaseWeightsSwap, check_base_weights, parameters, sparse_adamw
from sparse_opt.bench.kernels.table import main as kernels
from sparse_opt.bench.kernels.table import targets, weights
from sparse_opt.bench.kernels.table.recorder import Recorder

WORDS = [
    "--device",
    "cpu",
    "--numel",
    "2000000",
    "--delta_numel",
    "5000",
    "--n_rounds",
    "1",
    "--no_peers",
    "--no_tiles",
]


def test_the_table_is_printed_written_and_judged(tmp_path, capsys, monkeypatch):
    if "cpu" not in backends.available("cpu"):
        pytest.skip("needs the extension: " + backends.why_unavailable("cpu", "cpu"))
    monkeypatch.delenv("SPARSE_OPT_BACKEND", raising=False)
    path = tmp_path / "kernels.json"
    assert kernels.main([*WORDS, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["completed"]
    rows = {row["work"] for row in report["kernels"]["rows"]}
    assert "SparseAdamW.step, dense gradients, tile64" in rows
    assert report["kernels"]["left_out"] == {}
    narrow = [row for row in report["kernels"]["rows"] if "bf16 moments" in row["work"]]
    # Two bf16 moments and a two-byte index, and of its bases 1/64 and some for each matrix.
    assert all(6.0 < row["bytes_per_active"] < 6.05 for row in narrow)
    out = capsys.readouterr().out
    assert kernels.text(report) in out
    assert "targets, set for an H200" in out


def test_one_part_alone(tmp_path):
    path = tmp_path / "kernels.json"
    words = ["--device", "cpu", "--numel", "50000", "--n_rounds", "1", "--only", "tiles", "--json", str(path)]
    assert kernels.main(words) == 0
    found = json.loads(path.read_text())["kernels"]
    assert list(found["parts"]) == ["tiles"]
    assert found["rows"][0]["work"] == "copy"
    assert all(targets.is_weight_gradient(row) for row in found["rows"][1:])
    assert {row["density"] for row in found["rows"][1:]} == {None, 0.025, 0.1, 1.0}
    assert all(row["floor_ms"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "tile"], "--only tile: no part 'tile', expected some of weights,backward,tiles,deltas"),
        (["--numel", "-5"], "--numel is -5, expected at least 1"),
    ],
)
def test_a_wrong_option_is_refused(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--device", "cpu", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_gpu_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--device", "cuda"])
    assert stopped.value.code == 2
    assert "finds no CUDA device here" in capsys.readouterr().err


def swap_of_two_matrices() -> tuple[BaseWeightsSwap, optimizers.Named]:
    weights = {name: torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) for name in "ab"}
    grads = {name: torch.ones(40, 50) for name in "ab"}
    mask = MaskSet.random(weights, density=0.1)
    params = parameters(weights)
    return BaseWeightsSwap(sparse_adamw(params, grads, mask, "dense", keep_base_weights=True)), params


def test_base_weights_are_checked_inside_and_outside():
    check_base_weights(*swap_of_two_matrices())
    swap, params = swap_of_two_matrices()
    swap.be_inside()
    swap.be_inside()  # it is already
    swap.be_outside()
    true_leave = swap.leave

    def wrong_leave() -> None:
        true_leave()
        params["b"].detach().view(-1)[7] += 1

    swap.leave = wrong_leave  # type: ignore[method-assign]
    with pytest.raises(WrongResult, match="base_weights: b outside again: 1 of 2000"):
        check_base_weights(swap, params)


def test_a_step_that_does_nothing_proves_nothing_about_base_weights(monkeypatch):
    swap, params = swap_of_two_matrices()
    monkeypatch.setattr(swap.optimizer, "step", lambda: None)
    with pytest.raises(WrongResult, match="a step changed no weight"):
        check_base_weights(swap, params)


def fine_fetches(monkeypatch, setting):
    """The rows with fetches of 32 bytes, on a GPU that is not touched; `setting` replaces the library function."""
    monkeypatch.setattr(weights, "set_l2_fetch_granularity", setting)
    recorder = Recorder(torch.device("cuda"), [])
    rows = weights.WeightRows(recorder, {}, torch.Generator(), (), (), 0.0, 0, False)
    masked = weights.Masked(MaskSet({}, {}), Active(torch.empty(0, dtype=torch.int32), [], []), 0.025)
    rows.fine_fetches(masked, with_dense=False)
    return recorder


def test_a_gpu_without_smaller_fetches_leaves_their_rows_out(monkeypatch):
    def refuse(n_bytes, device):
        raise RuntimeError("CUDA error: limit is not supported\nand more")

    recorder = fine_fetches(monkeypatch, refuse)
    assert recorder.left_out == {"rows, 32-byte fetches": "CUDA error: limit is not supported"}
    assert recorder.rows == []


def test_fetches_are_as_they_were_after_an_error(monkeypatch):
    set_to = []

    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(weights.inputs, "gather_case", fail)
    monkeypatch.setattr(weights.inputs, "narrowed", lambda active: active)
    with pytest.raises(RuntimeError, match="out of memory"):
        fine_fetches(monkeypatch, lambda n_bytes, device: set_to.append(n_bytes) or 64)
    assert set_to == [32, 64]


def test_timed_steps_change_the_share_of_weights_that_their_rows_say(monkeypatch):
    """Also those of a small rate, in turns with optimizers that move the same weights far."""
    rows = weights.WeightRows(
        Recorder(torch.device("cpu"), []), {"a": (300, 200)}, torch.Generator().manual_seed(0), (), (), 0.0, 0, False
    )
    active = inputs.random_active(rows.params, 0.5, rows.generator)
    masked = weights.Masked(optimizers.mask_of(rows._named(rows.params), active), active, 0.5)
    timed = []

    def in_turns(works, n_rounds=None):
        for _ in range(30):
            for work in works:
                if isinstance(work.call, Prepared):
                    work.call.before()
                before = rows.params[0].clone()
                work.call()
                timed.append((work, (rows.params[0] != before).sum().item() / active.nnz))

    monkeypatch.setattr(rows.recorder, "time", in_turns)
    rows._optimizers(masked, [])
    steps = [(work, share) for work, share in timed if work.changed is not None]
    assert any(targets.SMALL in work.name and 0.005 < work.changed < 0.05 for work, _ in steps)
    for work, share in steps:
        assert share == pytest.approx(work.changed, rel=0.3), work.name


@pytest.mark.gpu
def test_a_call_that_waits_for_the_device_is_found():
    x = torch.ones(3, device="cuda")
    optimizers.check_no_sync("adding", lambda: x.add_(1), x.device)
    with pytest.raises(WrongResult, match="reading synchronized with the device"):
        optimizers.check_no_sync("reading", x.sum().item, x.device)


@pytest.mark.parametrize("gradients", ["dense", "compact"])
def test_a_timed_step_has_gradients_each_time(gradients):
    weights = {"a": torch.randn(40, 50, generator=torch.Generator().manual_seed(0))}
    mask, params = MaskSet.random(weights, density=0.5), parameters(weights)
    optimizer = sparse_adamw(params, {"a": torch.ones(40, 50)}, mask, gradients)
    assert [optimizers.changed_share(optimizer, params, mask.nnz) for _ in range(3)] == [1.0] * 3
