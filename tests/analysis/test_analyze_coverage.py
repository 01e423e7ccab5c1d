from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparse_opt.analysis import measure_coverage, states
from sparse_opt.errors import DataError

TAUS = (0.0, 1e-7, 1e-5, 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_sets_of_active_elements(make_log, random_states, dtype, monkeypatch):
    monkeypatch.setattr(states, "_BLOCK", 50)
    history = random_states(dtype, steps=4)
    found = measure_coverage(make_log(history), taus=TAUS)
    base = flat(history[0])
    assert found.steps == (10, 20, 30, 40)
    assert found.numel == base.size
    for i, tau in enumerate(TAUS):
        sets = [set(np.flatnonzero(np.abs(flat(state) - base) > tau)) for state in history[1:]]
        assert found.active[i] == tuple(map(len, sets))
        assert found.coverage(i) == pytest.approx([len(s & sets[-1]) / len(sets[-1]) for s in sets])
        assert found.density(i) == pytest.approx([len(s) / base.size for s in sets])
        assert found.coverage(i)[-1] == 1.0


def flat(state: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([tensor.float().view(-1) for tensor in state.values()]).numpy()


def test_the_last_of_the_given_steps_is_the_final_one(make_log):
    log = make_log([{"w.weight": torch.tensor([[float(x) for x in row]])} for row in ("0000", "1100", "0110", "0011")])
    found = measure_coverage(log, [20, 10], taus=[0.5])
    assert found.steps == (10, 20)
    assert (found.active, found.shared) == (((2, 2),), ((1, 2),))
    assert found.coverage(0) == (0.5, 1.0)


def test_odd_numbers_are_active_where_their_bits_changed(make_log):
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, nan, inf, 1.0, 1.0, 0.0], [-0.0, nan, inf, nan, inf, 1.0], [0.0, nan, inf, nan, 1.0, nan]]
    found = measure_coverage(make_log([{"w.weight": torch.tensor([row])} for row in rows]), taus=[0.0])
    assert (found.active, found.shared) == (((3, 2),), ((2, 2),))


def test_nothing_active_has_no_coverage(make_log):
    found = measure_coverage(make_log([{"w.weight": torch.ones(2, 2)}, {"w.weight": torch.ones(2, 2)}]), taus=[0.0])
    assert found.density(0) == (0.0,)
    assert math.isnan(found.coverage(0)[0])


@pytest.mark.parametrize(("taus", "said"), [([], "no tau"), ([-1e-6], "tau is -1e-06"), ([float("nan")], "tau is nan")])
def test_refuses_taus(make_log, random_states, taus, said):
    with pytest.raises(DataError, match=said):
        measure_coverage(make_log(random_states(torch.bfloat16)), taus=taus)
