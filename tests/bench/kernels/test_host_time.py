"""The host's time: the output, and refused calls."""

from __future__ import annotations

import pytest
import torch

from sparse_opt.bench.kernels import host_time


def test_the_table_has_steps_passes_and_hooks(capsys):
    threads = torch.get_num_threads()
    try:
        assert host_time.main(["--device", "cpu", "--n_rounds", "2"]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "SparseAdamW.step, compact gradients, 197 tensors",
        "SparseAdamW.step, dense gradients, 197 tensors",
        "SparseAdamW.clip_grad_norm_",
        "ops.indexed_adamw_",
        "ops.bind(...).indexed_adamw_",
        "ops.indexed_swap_",
        "ops.bind(...).indexed_swap_",
        "ops.masked_grad_gather_",
        "ops.bind(...).masked_grad_gather_",
        "backward pass, no hooks",
        "backward pass, empty Python hooks",
        "backward pass, SparseAdamW's hooks",
        "one of empty Python hooks",
        "one of SparseAdamW's hooks",
    ]
    assert all(float(line.split()[-1]) > 0 for line in lines[2:14])


@pytest.mark.parametrize("words", [["--n_rounds", "0"], ["--device", "cuda"]])
def test_bad_options_are_refused(words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        host_time.main(words)
    assert stopped.value.code == 2
    assert words[0].strip("-") in capsys.readouterr().err
