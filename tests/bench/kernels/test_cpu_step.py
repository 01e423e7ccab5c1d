"""The CPU benchmark of the optimizer step, at a size that takes no time."""

from __future__ import annotations

import pytest
import torch

from sparse_opt import SparseAdamW, backends
from sparse_opt.bench import rows
from sparse_opt.bench.kernels import cpu_step

BACKEND = next(name for name in ("cpu", "reference") if name in backends.available("cpu"))
SMALL = ["--numel", "100000", "--backend", BACKEND, "--n_rounds", "3"]


def test_steps_are_checked_timed_compared_printed_and_written(tmp_path, capsys):
    threads = torch.get_num_threads()
    path = tmp_path / "new" / "cpu_step.json"
    assert cpu_step.main([*SMALL, "--output", str(path)]) == 0
    assert torch.get_num_threads() == threads

    run = rows.read(path)
    steps = ["SparseAdamW, dense gradients", "SparseAdamW, compact gradients", "torch.optim.AdamW(fused=True)"]
    assert [row.case["work"] for row in run.rows] == steps
    dense = run.rows[-1]
    for row in run.rows:
        assert row.p20 <= row.value <= row.p80
        assert row.n == 3
        assert row is dense or run.peer(row, "fused AdamW") is dense
    assert set(run.environment) == {"date", "commit", "machine", "versions"}

    out = capsys.readouterr().out
    assert all(step in out for step in steps)


def test_a_step_outside_the_mask_is_not_timed(monkeypatch, capsys):
    true_step = SparseAdamW.step

    def step(self):
        true_step(self)
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[:200] += 1e-3

    monkeypatch.setattr(SparseAdamW, "step", step)
    assert cpu_step.main(SMALL) == 1
    assert "WRONG RESULT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cuda"], "runs on cuda tensors"),
        (["--numel", "1"], "the random mask is empty: density 0.025 is less than one"),
    ],
)
def test_a_wrong_call_ends_with_2_and_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cpu_step.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
