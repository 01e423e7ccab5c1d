"""Peers: absent, wrong and failing ones are listed with the reason, and timed ones are checked."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from sparse_opt.bench.kernels import peers
from sparse_opt.bench.kernels.bounds import Rates
from sparse_opt.bench.kernels.cases import WrongResult
from sparse_opt.bench.kernels.optimizers import LR, WEIGHT_DECAY, parameters
from sparse_opt.bench.kernels.recorder import Recorder
from sparse_opt.bench.kernels.weights import WeightRows
from sparse_opt.bench.rows import Run

SHAPES = {"a": (70, 30), "b": (100,)}


def weights(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def peer_that(monkeypatch: pytest.MonkeyPatch, step, device: str = "cpu") -> peers.Peer:
    """A peer of a package that is there, whose optimizer does ``step(params)``."""

    class Optimizer(torch.optim.Optimizer):
        def __init__(self, params, lr, weight_decay, **options):
            super().__init__(params, {"lr": lr, **options})

        @torch.no_grad()
        def step(self):
            step([p for group in self.param_groups for p in group["params"]])

    module = types.ModuleType("a_peer")
    module.Optimizer = Optimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_peer", module)
    monkeypatch.setattr(peers.Peer, "why_absent", lambda self, device: "")
    return peers.adamw("a peer", "torch", "a_peer", "Optimizer")


def test_a_package_that_is_missing_or_made_for_a_gpu_is_named():
    missing = peers.adamw("x", "no_such_package", "no_such_package", "X")
    assert missing.why_absent(torch.device("cuda")) == "not installed (no_such_package)"
    there = peers.adamw("x", "torch", "torch.optim", "AdamW")
    assert there.why_absent(torch.device("cuda")) == ""
    assert there.why_absent(torch.device("cpu")) == "made for cuda, this is cpu"
    assert there.version() == f"torch {torch.__version__}"


def test_a_step_that_moves_the_weights_is_timed(monkeypatch):
    peer = peer_that(monkeypatch, lambda params: torch._foreach_sub_(params, 0.1))
    named = parameters(dict(zip(SHAPES, weights(), strict=True)))
    peers.peer_step(peer, named, weights(1))()
    for param, start in zip(named.values(), weights(), strict=True):
        torch.testing.assert_close(param.detach(), start - 0.2)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda params: None, "a step left the first elements of a as they were"),
        (lambda params: params[1].fill_(float("nan")), "a step left the first elements of a|b is not finite"),
        (lambda params: torch._foreach_mul_(params, float("inf")), "a is not finite"),
    ],
)
def test_a_wrong_step_is_refused(monkeypatch, step, message):
    peer = peer_that(monkeypatch, step)
    with pytest.raises(WrongResult, match=message):
        peers.peer_step(peer, parameters(dict(zip(SHAPES, weights(), strict=True))), weights(1))


def test_an_error_of_a_peer_is_shown_and_the_bench_goes_on(monkeypatch):
    def fail(params):
        raise TypeError("no kernel for this\nsecond line")

    run = Run({})
    bench = Recorder(run, torch.device("cpu"), [], n_rounds=1, rates=Rates(1e9, {}))
    rows = WeightRows(bench, {"a": (70, 30)}, torch.Generator(), (), (), 0.0, 0, True)
    rows.peer(peer_that(monkeypatch, fail))
    assert run.notes == ["not timed: a peer: FAILED: TypeError: no kernel for this"]
    rows.peer(peer_that(monkeypatch, lambda params: None))
    assert "FAILED: WrongResult: a peer: a step left" in run.notes[-1]
    assert run.rows == []
    rows.peer(peer_that(monkeypatch, lambda params: torch._foreach_sub_(params, 0.1)))
    assert [row.case["work"] for row in run.rows] == ["a peer"]
    assert run.rows[0].peers == {"bound": pytest.approx(1e3 * 70 * 30 * (3 * 2 + 4 * 1) / 1e9)}
    assert run.wrong == []  # they are of what this package computes


def test_masked_adamw_is_adamw_with_masked_gradients():
    masks = [torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.3 for shape in SHAPES.values()]
    named = parameters(dict(zip(SHAPES, weights(), strict=True)))
    step = peers.masked_adamw_step(named, weights(1), masks)
    expected = [torch.nn.Parameter(weight) for weight in weights()]
    plain = torch.optim.AdamW(expected, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    for param, grad, mask in zip(expected, weights(1), masks, strict=True):
        param.grad = torch.where(mask, grad, 0.0)
    for _ in range(3):
        step()
        plain.step()
    for found, value in zip(named.values(), expected, strict=True):
        assert torch.equal(found, value)
