"""The backward pass with gathering hooks, on a small model."""

from __future__ import annotations

import pytest
import torch

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.bench.kernels import backward
from sparse_opt.bench.kernels.cases import WrongResult
from sparse_opt.bench.kernels.recorder import Recorder
from sparse_opt.bench.rows import Run

SIZES = {
    "hidden": 64,
    "intermediate": 160,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "vocab": 512,
}


@pytest.fixture(autouse=True)
def needs_transformers():
    pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")


def test_both_passes_run_again_and_again():
    assert backward.why_absent() == ""
    run = Run({})
    backward.time_rows(Recorder(run, torch.device("cpu"), [], n_rounds=2), SIZES, 0.05, 0)
    gathering, plain = run.rows
    assert gathering.value > 0 and run.wrong == []
    assert run.peer(gathering, "plain backward") is plain


def test_a_gradient_that_is_wrong_or_not_gathered_is_found():
    model = backward.llama(SIZES, torch.device("cpu"), 0)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert all(param.dim() == 2 for param in params.values())
    mask = MaskSet.random({name: tuple(param.shape) for name, param in params.items()}, density=0.05)
    seen, _ = backward._watch(model)
    optimizer = SparseAdamW(model, mask, keep_base_weights=False)
    with pytest.raises(WrongResult, match="was not gathered"):
        backward.check_gathered(optimizer, params, seen, mask)
    tokens = torch.randint(512, (2, 16))
    step = backward.BackwardPass(model, tokens, optimizer.zero_grad)
    step.forward()
    step.backward()
    backward.check_gathered(optimizer, params, seen, mask)
    first = next(iter(params))
    seen[params[first]].view(-1)[int(mask[first][3])] += 1
    with pytest.raises(WrongResult, match=f"compact gradient of {first}: 1 of"):
        backward.check_gathered(optimizer, params, seen, mask)
