"""Mixtures of experts under masks: training, logs and deltas, in transformers' own models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import FAMILIES, moe_model, tokens_of

from sparse_opt import DeltaLog, MaskSet, SparseAdamW, SparseDelta
from sparse_opt.analysis import measure_sparsity

STEPS, LR, EPS = 8, 1e-2, 1e-3
CHOSEN = {1: [0, 3]}


def mask_of(model: Any, kind: str) -> MaskSet:
    if kind == "experts":
        return MaskSet.experts(model, CHOSEN)
    return MaskSet.random(model, density=0.4, pattern=kind, seed=1)


def backward(model: Any, step: int) -> None:
    tokens = tokens_of(step)
    model(input_ids=tokens, labels=tokens).loss.backward()


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def bits_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().view(torch.int32) for name, p in model.named_parameters()}


def assert_same_bits(model: Any, expected: dict[str, torch.Tensor]) -> None:
    for name, bits in bits_of(model).items():
        assert torch.equal(bits, expected[name]), name


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "element"), *((family, "experts") for family in FAMILIES)])
def test_training_equals_dense_adamw_with_masked_gradients(family: str, kind: str) -> None:
    dense, sparse = moe_model(family), moe_model(family)
    mask = mask_of(sparse, kind)
    options = {"lr": LR, "eps": EPS, "weight_decay": 0.1}
    ours = SparseAdamW(sparse, mask, **options)
    theirs = torch.optim.AdamW(dense.parameters(), **options)
    start = {name: p.detach().clone() for name, p in dense.named_parameters()}
    active = {name: mask.bool(name) if name in mask else torch.zeros_like(p).bool() for name, p in start.items()}
    for step in range(STEPS):
        backward(dense, step)
        for name, p in dense.named_parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad * active[name]
        theirs.step()
        theirs.zero_grad()
        with torch.no_grad():
            for name, p in dense.named_parameters():
                p.copy_(torch.where(active[name], p, start[name]))
    train(sparse, ours, range(STEPS))
    # A step moves a weight by lr g / (sqrt(v) + eps), so that an error of g counts lr / eps times. Gradients are sums
    # of 24 tokens, below 1, whose roundings add up to less than 2**-20.
    tolerance = STEPS * LR / EPS * 2**-20
    for name, p in sparse.named_parameters():
        torch.testing.assert_close(p, dense.get_parameter(name), rtol=0, atol=tolerance)
        assert torch.equal(p[~active[name]], start[name][~active[name]])
    moved = {name: (p - start[name]).abs().amax() for name, p in sparse.named_parameters() if active[name].any()}
    assert all(distance > 0.2 * LR for distance in moved.values())
    routers = [name for name in start if ".gate." in name or ".router." in name]
    assert routers and not any(sparse.get_parameter(name).requires_grad for name in routers)


@pytest.mark.parametrize("kind", ["tile64", "experts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_base_weights_and_a_resumed_run_have_the_same_bits(family: str, kind: str) -> None:
    model, resumed = moe_model(family), moe_model(family)
    start, mask = bits_of(model), mask_of(model, kind)
    optimizer, other = (SparseAdamW(m, mask, lr=LR) for m in (model, resumed))
    train(model, optimizer, range(2))
    assert not all(torch.equal(bits, start[name]) for name, bits in bits_of(model).items())
    with optimizer.base_weights():
        assert_same_bits(model, start)
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for each, its in ((model, optimizer), (resumed, other)):
        train(each, its, range(2, 4))
    assert_same_bits(resumed, bits_of(model))
    with other.base_weights():
        assert_same_bits(resumed, start)


@pytest.mark.parametrize("family", FAMILIES)
def test_logged_shared_and_analyzed_by_expert(family: str, tmp_path: Path) -> None:
    model, base = moe_model(family), moe_model(family)
    start = bits_of(base)
    mask = mask_of(model, "experts")
    optimizer = SparseAdamW(model, mask, lr=LR)
    with DeltaLog.create(tmp_path / "log", model, mask=mask) as log:
        for step in range(1, 3):
            train(model, optimizer, range(step, step + 1))
            log.append(step)
    log = DeltaLog.open(tmp_path / "log")
    assert log.verify() == []
    state = log.load(2)
    assert all(torch.equal(state[name], p) for name, p in model.named_parameters())

    (changes,) = measure_sparsity(log, [2])
    assert {expert for expert, counts in changes.experts.items() if counts.changed} == {(1, 0), (1, 3)}
    of_experts = [counts for name, counts in changes.stored.items() if ".experts." in name]
    assert sum(c.changed for c in changes.experts.values()) == sum(c.changed for c in of_experts) > 0.9 * mask.nnz
    assert sum(c.numel for c in changes.experts.values()) == sum(c.numel for c in of_experts)

    SparseDelta.from_models(base, model).save_pretrained(tmp_path / "delta")
    delta = SparseDelta.from_pretrained(tmp_path / "delta")
    delta.apply_(base)
    assert_same_bits(base, bits_of(model))
    delta.remove_(base)
    assert_same_bits(base, start)
