"""Masks that take runs: one index for each run, and the bits that one index for each element gives."""

import copy
import os

import pytest
import torch
from small_runs import loss_of, same, same_state

from sparse_opt import MaskSet, SparseAdamW

RUN_LENGTH = {"run16": 16, "run32": 32, "tile64": 64, "tile128": 64}
# Under Triton's interpreter a step takes a tenth of a second.
N_STEPS = 4 if os.environ.get("TRITON_INTERPRET") == "1" else 15


def make_model(device, dtype=torch.float32, ragged=False):
    """Rows of 64 and 128 elements; a ragged one has rows of 40 besides, which hold no whole run of any kind."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 64), torch.nn.Tanh(), torch.nn.Linear(64, 40 if ragged else 64)]
    if ragged:
        layers += [torch.nn.Tanh(), torch.nn.Linear(40, 64, bias=False)]
    return torch.nn.Sequential(*layers).to(device, dtype)


def runs_mask(model, pattern, density=0.5, seed=0):
    mask = MaskSet.random(model, density=density, pattern=pattern, seed=seed)
    assert mask.nnz
    return mask


def elements_of(mask):
    """The same elements, as a mask of pattern 'element'."""
    return MaskSet(mask.indices, mask.shapes, pattern="element")


def train(model, optimizer, seeds):
    for seed in seeds:
        loss_of(model, seed).backward()
        loss_of(model, 1000 + seed).backward()
        optimizer.step()
        optimizer.zero_grad()


def agree(a, b, optimizers, device):
    """Bit for bit; on a GPU under clipping to rounding, as each layout adds up the squares in its own order."""
    if device.type == "cpu":
        return same(a, b) and same_state(*optimizers)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    return True


def run_lengths(optimizer):
    return sorted(buffer.run_length for buffer in optimizer.gradient_buffers)


# (pattern, dtype of the weights, options)
TRAINED = [
    *(
        (pattern, torch.float32, options)
        for pattern in ("run32", "tile64")
        for options in ({}, {"max_grad_norm": 0.01})
    ),
    ("run16", torch.bfloat16, {"master_weights": True}),
    ("run16", torch.bfloat16, {"state_dtype": torch.bfloat16, "stochastic_rounding": True}),
]


@pytest.mark.parametrize("grads", ["compact", "dense"])
@pytest.mark.parametrize(("pattern", "dtype", "options"), TRAINED, ids=str)
def test_many_steps_give_the_bits_of_the_same_elements(sparse_optimizer, pattern, dtype, options, grads, device):
    runs, elements, start = (make_model(device, dtype) for _ in range(3))
    mask = runs_mask(runs, pattern)
    a = sparse_optimizer(runs, mask, lr=1e-2, weight_decay=0.1, grads=grads, **options)
    b = sparse_optimizer(elements, elements_of(mask), lr=1e-2, weight_decay=0.1, grads=grads, **options)
    assert run_lengths(a) == [RUN_LENGTH[pattern]] and run_lengths(b) == [1]
    steps = range(N_STEPS if dtype == torch.float32 else min(N_STEPS, 5))
    train(runs, a, steps)
    train(elements, b, steps)
    assert not same(runs, start)
    if "max_grad_norm" in options:
        assert agree(runs, elements, (a, b), device)
        torch.testing.assert_close(a.grad_norm, b.grad_norm)
        assert a.grad_norm > 0.01
    else:
        assert same(runs, elements) and same_state(a, b)
    trained = copy.deepcopy(runs)
    with a.base_weights():
        assert same(runs, start)
    assert same(runs, trained)


@pytest.mark.parametrize("pattern", ["run16", "tile64"])
def test_states_load_across(pattern, device):
    """A file states which elements are active; it is the same for both optimizers."""
    models = [make_model(device, torch.bfloat16, ragged=True) for _ in range(4)]
    start = make_model(device, torch.bfloat16, ragged=True)
    mask = runs_mask(start, pattern)
    masks = [mask, elements_of(mask)]
    first = [SparseAdamW(m, k, lr=1e-2, master_weights=True) for m, k in zip(models[:2], masks, strict=True)]
    for model, optimizer in zip(models[:2], first, strict=True):
        train(model, optimizer, range(4))
    assert same_state(*first)
    resumed = [SparseAdamW(m, k, lr=1e-2, master_weights=True) for m, k in zip(models[2:], masks, strict=True)]
    for k, optimizer in enumerate(resumed):
        models[2 + k].load_state_dict(models[1 - k].state_dict())
        optimizer.load_state_dict(copy.deepcopy(first[1 - k].state_dict()))
    for model, optimizer in zip(models, [*first, *resumed], strict=True):
        train(model, optimizer, range(4, 8))
        assert same(model, models[0]) and same_state(optimizer, first[0])
        with optimizer.base_weights():
            assert same(model, start)


def test_set_mask_from_pattern_to_pattern(device):
    runs, elements, start = (make_model(device, torch.bfloat16, ragged=True) for _ in range(3))
    patterns = ["run32", "run32", "tile64", "element", "run16"]
    masks = [runs_mask(runs, pattern, seed=i) for i, pattern in enumerate(patterns)]
    a = SparseAdamW(runs, masks[0], lr=1e-2, master_weights=True)
    b = SparseAdamW(elements, elements_of(masks[0]), lr=1e-2, master_weights=True)
    for i, mask in enumerate(masks):
        if i:
            a.set_mask(mask)
            b.set_mask(elements_of(mask))
        assert run_lengths(a) == ([1] if mask.pattern == "element" else [1, RUN_LENGTH[mask.pattern]])
        train(runs, a, range(3 * i, 3 * i + 3))
        train(elements, b, range(3 * i, 3 * i + 3))
        assert same(runs, elements) and same_state(a, b)
        with a.base_weights():
            assert same(runs, start)
    assert not same(runs, start)


@pytest.mark.parametrize("pattern", RUN_LENGTH)
def test_indices_are_held_by_run(pattern, device):
    model = make_model(device, torch.bfloat16)
    mask = runs_mask(model, pattern)
    optimizer = SparseAdamW(model, mask, master_weights=True)
    nnz, runs = mask.nnz, mask.nnz // RUN_LENGTH[pattern]
    expected = {"state": 8 * nnz, "indices": 4 * runs, "grad": 4 * nnz, "base": 2 * nnz, "master": 4 * nnz}
    expected["compact_weights"] = 0
    assert optimizer.nbytes() == expected  # the base weights share the indices
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.nbytes() == expected
    optimizer.set_mask(mask)
    assert optimizer.nbytes() == expected
    if mask != (other := runs_mask(model, pattern, seed=1)):
        optimizer.set_mask(other)
        assert optimizer.nbytes()["base"] > expected["base"]  # of both masks, by indices of their own
        optimizer.set_mask(mask)
    state = optimizer.state_dict()["state"]
    shared = {s["indices"].untyped_storage().data_ptr() for s in state.values()}
    assert len(shared) == 1  # of one storage, which torch.save writes once
