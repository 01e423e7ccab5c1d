"""Bound ops: the same bits as the functions of `sparse_opt.ops`, on every backend, and the same errors."""

import math

import pytest
import torch
from cases import LAYOUTS, assert_same_bits, make

from sparse_opt import ops


def bound_to(case, backend):
    return ops.bind(case.params, case.indices, case.starts, case.ends, **case.layout, backend=backend)


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
    with pytest.raises(ValueError, match="compact has"):
        bound.indexed_swap_(case.master[1:])
    with pytest.raises(ValueError, match=r"dense\[0\] has"):
        bound.masked_grad_gather_(case.grad, [case.dense_grads[0][1:].contiguous(), *case.dense_grads[1:]])
    assert_same_bits(case, before)
