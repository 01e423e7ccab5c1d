"""Bound ops: the same bits as the functions of `sparse_opt.ops`, on every backend, and the same errors."""

import math

import pytest
import torch
from cases import LAYOUTS, VARIANTS, assert_same_bits, make, run_step, step_call

from sparse_opt import ops
from sparse_opt.ops import STEP_OPS

CALLS = [*((name, {}) for name in STEP_OPS), *VARIANTS]


def bound_to(case, backend):
    return ops.bind(case.params, case.indices, case.starts, case.ends, **case.layout, backend=backend)


def run_bound(op, bound, case, **how):
    """Call a step op of `bound`, which has the segments of `case`."""
    (_, _, _, _, *own), keywords = step_call(op, case, **how)
    getattr(bound, op)(*own, **{name: value for name, value in keywords.items() if name not in case.layout})


@pytest.mark.parametrize(("layout", "compact"), [("narrow", True), ("run16", False)], ids=["narrow", "run16-dense"])
@pytest.mark.parametrize(("op", "options"), CALLS, ids=[f"{op}-{'-'.join(options)}" for op, options in CALLS])
def test_steps(op, options, compact, layout, any_place):
    device, backend = any_place
    case = make(torch.device(device), dtype=torch.bfloat16, layout=layout)
    how = {**options, "compact": compact, "master": True, "seed": 7}
    expected, got = case.clone(), case.clone()
    bound = bound_to(got, backend)
    for _ in range(2):  # the second call uses what the first one has prepared
        run_step(op, expected, backend, **how)
        run_bound(op, bound, got, **how)
        for c in (expected, got):
            c.steps += 1
    assert_same_bits(got, expected)
    assert not torch.equal(got.params[0], case.params[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("of", ["gradients", "tensors"])
def test_gather(of, accumulate, layout, any_place):
    case = make(torch.device(any_place[0]), layout=layout)
    case.grad[case.starts[0]] = math.inf
    expected, got = case.clone(), case.clone()
    results = []
    for c, bound in ((expected, None), (got, bound_to(got, any_place[1]))):
        extra = {
            "scale": torch.tensor([0.3], device=any_place[0]),
            "sum_sq": torch.full((len(c.params),), math.nan, device=any_place[0]),
            "found_inf": torch.zeros(1, device=any_place[0]),
            "accumulate": accumulate,
        }
        if bound is not None:
            bound.masked_grad_gather_(c.grad, c.dense_grads if of == "gradients" else None, **extra)
        else:
            dense = c.dense_grads if of == "gradients" else c.params
            where = (c.indices, c.starts, c.ends)
            ops.masked_grad_gather_(c.grad, dense, *where, **extra, **c.layout, backend=any_place[1])
        results.append((extra["sum_sq"], extra["found_inf"]))
    assert_same_bits(got, expected)
    for (a, b), (x, y) in [results]:
        torch.testing.assert_close(a, x, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(b, y) and b.isinf().item() == accumulate


def test_errors_leave_everything_as_it_was(any_place):
    case = make(torch.device(any_place[0]))
    before, bound = case.clone(), bound_to(case, any_place[1])
    states = (case.exp_avg, case.exp_avg_sq, case.lr, case.steps)
    for arguments, options in (
        (states, {}),
        (states, {"dense_grads": case.dense_grads[1:]}),
        ((case.exp_avg[1:], *states[1:]), {"grad": case.grad}),
    ):
        with pytest.raises(ValueError, match="grad|exp_avg"):
            bound.indexed_adamw_(*arguments, **options)
    with pytest.raises(ValueError, match="compact has"):
        bound.indexed_swap_(case.master[1:])
    with pytest.raises(ValueError, match=r"dense\[0\] has"):
        bound.masked_grad_gather_(case.grad, [case.dense_grads[0][1:].contiguous(), *case.dense_grads[1:]])
    assert_same_bits(case, before)


def test_arguments_that_a_step_does_not_have_are_named():
    case = make(torch.device("cpu"))
    bound, states = bound_to(case, "reference"), (case.exp_avg, case.exp_avg_sq, case.lr)
    for arguments, options, name in (((*states, case.steps), {"beta": 0.9}, "beta"), (states, {}, "steps")):
        with pytest.raises(TypeError, match=name):
            bound.indexed_adamw_(*arguments, **options)
