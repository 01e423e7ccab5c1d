import math

import numpy as np
import pytest
import torch

from sparse_opt.analysis import (
    ChangeCounts,
    chosen_names,
    count_changes,
    measure_coverage,
    measure_sparsity,
    sum_changes,
)
from sparse_opt.analysis.changes import TOLERANCES
from sparse_opt.analysis.records import change_records
from sparse_opt.errors import ConfigError, DataError, DeltaLogError

INF, NAN = float("inf"), float("nan")
TAUS = (0.0, 1e-7, 1e-5, 1e-3)


def test_counts_bits_and_distances_of_odd_numbers():
    base = torch.tensor([0.0, 1.0, 1.0, 1.0, NAN, INF, 1.0, INF])
    now = torch.tensor([-0.0, 1.0, 1.5, 1.001, NAN, INF, NAN, 1.0])
    # -0 is a change of bits but of no distance; what was NaN or inf and still is did not change.
    assert count_changes(base, now, [0.0, 0.01, 1.0]) == ChangeCounts(numel=8, changed=5, above=(4, 3, 2), flipped=0)


def test_flips_go_from_one_side_of_zero_to_the_other():
    base = torch.tensor([1.0, -1.0, 1e-30, 0.0, 1.0, -INF, NAN, 1.0, -2.0])
    now = torch.tensor([-1.0, 1.0, -1e-30, 1.0, 0.0, INF, -1.0, NAN, -1.0])
    assert count_changes(base, now, []).flipped == 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_counted_by_its_values(dtype):
    base, now = torch.tensor([1.0, -1.0, 2.0, 0.5]).to(dtype), torch.tensor([-1.0, -1.0, 2.5, -0.5]).to(dtype)
    assert count_changes(base, now, [0.75, 1.5]) == ChangeCounts(4, 3, (2, 1), 2)


def test_dtypes_that_differ_are_compared_in_the_wider_one():
    base = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert count_changes(base, torch.tensor([1.0, 2.0001]), [1e-5]) == ChangeCounts(2, 1, (1,))


def test_tensors_larger_than_a_block():
    base = torch.zeros((1 << 22) + 3)
    now = base.clone()
    now[torch.tensor([0, (1 << 22) - 1, 1 << 22, (1 << 22) + 2])] = 1.0
    assert count_changes(base, now, [0.5]) == ChangeCounts(base.numel(), 4, (4,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_log_is_counted_as_numpy_counts_it(make_log, random_states, dtype):
    history = random_states(dtype)
    found = measure_sparsity(make_log(history))
    assert [step.step for step in found] == [10, 20, 30]
    for step, now in zip(found, history[1:], strict=True):
        assert list(step.stored) == list(now)
        for name, counts in step.stored.items():
            assert counts == by_hand(history[0][name], now[name])
        assert (step.rounded is not None) == (dtype in (torch.float32, torch.float64))
        for name, counts in (step.rounded or {}).items():
            assert counts == by_hand(history[0][name].bfloat16(), now[name].bfloat16())


def by_hand(base: torch.Tensor, now: torch.Tensor) -> ChangeCounts:
    wide = np.float64 if base.dtype == torch.float64 else np.float32
    a, b = (t.to(torch.float64).numpy().astype(wide) for t in (base, now))
    distance = np.abs(b - a)
    above = tuple(int((distance > tolerance).sum()) for tolerance in TOLERANCES)
    return ChangeCounts(a.size, int((a != b).sum()), above, int((a * b < 0).sum()))


def test_components_and_layers_add_up(make_log, random_states):
    found = measure_sparsity(make_log(random_states(torch.bfloat16)), [30], tolerances=[1e-5])
    (total,) = change_records(found, [1e-5], "total")
    components = {record["component"]: record for record in change_records(found, [1e-5], "component")}
    layers = {record["layer"]: record for record in change_records(found, [1e-5], "layer")}
    assert list(components) == ["embeddings", "attention q", "MLP up", "norms"]
    assert list(layers) == ["0", "1", "none"]
    for of in (components, layers):
        assert sum(record["numel"] for record in of.values()) == total["numel"]
        changed = sum(record["numel"] * record["density_bits"] for record in of.values())
        assert changed / total["numel"] == pytest.approx(total["density_bits"])
    up = sum_changes(found[0].stored[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert (components["MLP up"]["density_above_1e-5"], components["MLP up"]["sparsity_at_1e-5"]) == (
        up.shares_above[0],
        1 - up.shares_above[0],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_coverage_is_that_of_sets_of_active_elements(make_log, random_states, dtype):
    history = random_states(dtype, steps=4)
    found = measure_coverage(make_log(history), taus=TAUS)
    base, *later = (torch.cat([t.float().view(-1) for t in state.values()]).numpy() for state in history)
    assert (found.steps, found.numel) == ((10, 20, 30, 40), base.size)
    for i, tau in enumerate(TAUS):
        sets = [set(np.flatnonzero(np.abs(state - base) > tau)) for state in later]
        assert found.active[i] == tuple(map(len, sets))
        assert found.coverage(i) == pytest.approx([len(s & sets[-1]) / len(sets[-1]) for s in sets])
        assert found.density(i) == pytest.approx([len(s) / base.size for s in sets])
        assert found.coverage(i)[-1] == 1.0


def test_the_last_of_the_given_steps_is_the_final_one(make_log):
    log = make_log([{"w.weight": torch.tensor([[float(x) for x in row]])} for row in ("0000", "1100", "0110", "0011")])
    found = measure_coverage(log, [20, 10], taus=[0.5])
    assert found.steps == (10, 20)
    assert (found.active, found.shared) == (((2, 2),), ((1, 2),))


def test_odd_numbers_are_active_where_their_bits_changed(make_log):
    rows = [[0.0, NAN, INF, 1.0, 1.0, 0.0], [-0.0, NAN, INF, NAN, INF, 1.0], [0.0, NAN, INF, NAN, 1.0, NAN]]
    found = measure_coverage(make_log([{"w.weight": torch.tensor([row])} for row in rows]), taus=[0.0])
    assert (found.active, found.shared) == (((3, 2),), ((2, 2),))


def test_nothing_active_has_no_coverage(make_log):
    found = measure_coverage(make_log([{"w.weight": torch.ones(2, 2)}, {"w.weight": torch.ones(2, 2)}]), taus=[0.0])
    assert found.density(0) == (0.0,)
    assert math.isnan(found.coverage(0)[0])


def test_refusals_say_what_was_expected(make_log, random_states):
    log = make_log(random_states(torch.bfloat16))
    for error, said, call in (
        (DeltaLogError, "step 15 is not logged", lambda: measure_sparsity(log, [15])),
        (DataError, "step 0 is the base", lambda: measure_sparsity(log, [0])),
        (ConfigError, "tolerance is -1.0", lambda: measure_sparsity(log, tolerances=[-1.0])),
        (ConfigError, "tau is nan", lambda: measure_coverage(log, taus=[NAN])),
        (ConfigError, "no tau given", lambda: measure_coverage(log, taus=[])),
        (DataError, "no tensor of .* is chosen", lambda: chosen_names(log, ["nothing*"])),
    ):
        with pytest.raises(error, match=said):
            call()
    (file,) = log.directory.glob("step_00000020.*")
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DeltaLogError, match="20"):
        measure_sparsity(log)
