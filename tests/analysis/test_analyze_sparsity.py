from __future__ import annotations

import numpy as np
import pytest
import torch

from sparse_opt.analysis import ChangeCounts, count_changes, measure_sparsity, states, sum_changes
from sparse_opt.analysis.sparsity import TOLERANCES, changes_by_component, changes_by_layer
from sparse_opt.errors import DataError, DeltaLogError

INF, NAN = float("inf"), float("nan")


def test_counts_bits_and_distances_of_odd_numbers():
    base = torch.tensor([0.0, 1.0, 1.0, 1.0, NAN, INF, 1.0, INF])
    now = torch.tensor([-0.0, 1.0, 1.5, 1.001, NAN, INF, NAN, 1.0])
    # -0 is a change of bits but of no distance; what was NaN or inf and still is did not change.
    assert count_changes(base, now, [0.0, 0.01, 1.0]) == ChangeCounts(numel=8, changed=5, above=(4, 3, 2), flipped=0)


def test_flips_go_from_one_side_of_zero_to_the_other():
    base = torch.tensor([1.0, -1.0, 1e-30, 0.0, 1.0, -INF, NAN, 1.0, -2.0])
    now = torch.tensor([-1.0, 1.0, -1e-30, 1.0, 0.0, INF, -1.0, NAN, -1.0])
    assert count_changes(base, now, []).flipped == 4


def test_small_steps_of_bf16_are_measured_in_fp32():
    base = torch.tensor([1.0, 256.0], dtype=torch.bfloat16)
    now = torch.tensor([1.0078125, 258.0], dtype=torch.bfloat16)  # one unit in the last place each
    assert count_changes(base, now, [0.0078, 0.0079, 1.9]).above == (2, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_counted_by_its_values(dtype):
    base, now = torch.tensor([1.0, -1.0, 2.0, 0.5]).to(dtype), torch.tensor([-1.0, -1.0, 2.5, -0.5]).to(dtype)
    assert count_changes(base, now, [0.75, 1.5]) == ChangeCounts(4, 3, (2, 1), 2)


def test_dtypes_that_differ_are_compared_in_the_wider_one():
    base = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert count_changes(base, torch.tensor([1.0, 2.0001]), [1e-5]) == ChangeCounts(2, 1, (1,))


def test_empty_tensors_have_share_zero():
    empty = count_changes(torch.empty(0), torch.empty(0), [1e-6])
    assert (empty.share, empty.shares_above) == (0.0, (0.0,))
    assert sum_changes([empty, ChangeCounts(4, 2, (1,))]).share == 0.5


def test_blocks_give_what_the_whole_gives(monkeypatch):
    base, now = torch.randn(2, 1001, generator=torch.Generator().manual_seed(0))
    whole = count_changes(base, now, TOLERANCES)
    monkeypatch.setattr(states, "_BLOCK", 64)
    assert count_changes(base, now, TOLERANCES) == whole
    assert whole.flipped == int((base * now < 0).sum()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_log_is_counted_as_numpy_counts_it(make_log, random_states, dtype):
    history = random_states(dtype)
    found = measure_sparsity(make_log(history))
    assert [step.step for step in found] == [10, 20, 30]
    for step, now in zip(found, history[1:], strict=True):
        assert list(step.stored) == list(now)
        for name, counts in step.stored.items():
            assert counts == by_hand(history[0][name], now[name])
        wide = dtype in (torch.float32, torch.float64)
        assert (step.rounded is not None) == wide
        for name, counts in (step.rounded or {}).items():
            assert counts == by_hand(history[0][name].bfloat16(), now[name].bfloat16())
    if dtype == torch.float32:
        # Most of these changes are too small for bf16.
        last = found[-1]
        assert sum_changes(last.rounded.values()).share < sum_changes(last.stored.values()).share


def by_hand(base: torch.Tensor, now: torch.Tensor) -> ChangeCounts:
    wide = np.float64 if base.dtype == torch.float64 else np.float32
    a, b = (t.to(torch.float64).numpy().astype(wide) for t in (base, now))
    distance = np.abs(b - a)
    above = tuple(int((distance > tolerance).sum()) for tolerance in TOLERANCES)
    return ChangeCounts(a.size, int((a != b).sum()), above, int((a * b < 0).sum()))


def test_parts_add_up(make_log, random_states):
    counts = measure_sparsity(make_log(random_states(torch.bfloat16)), [30], tolerances=[1e-5])[0].stored
    components, layers = changes_by_component(counts), changes_by_layer(counts)
    assert list(components) == ["embeddings", "attention q", "MLP up", "norms"]
    assert list(layers) == ["0", "1", "none"]
    assert sum_changes(components.values()) == sum_changes(layers.values()) == sum_changes(counts.values())
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
    assert components["MLP up"] == sum_changes(counts[name] for name in names)


def test_refuses_what_cannot_be_compared(make_log, random_states):
    log = make_log(random_states(torch.bfloat16))
    with pytest.raises(DeltaLogError, match="step 15 is not logged; 4 are, 0 to 30; the nearest is 10"):
        measure_sparsity(log, [10, 15])
    with pytest.raises(DataError, match="step 0 is the base"):
        measure_sparsity(log, [0])
    with pytest.raises(DataError, match="tolerance is -1.0"):
        measure_sparsity(log, tolerances=[-1.0])
    with pytest.raises(DataError, match="no tensor"):
        measure_sparsity(log, include=["nothing*"])


def test_a_log_of_the_base_alone_is_refused(make_log):
    with pytest.raises(DataError, match="no step after 0"):
        measure_sparsity(make_log([{"w.weight": torch.zeros(4, 4)}]))


def test_damage_is_reported_and_not_measured(make_log, random_states):
    log = make_log(random_states(torch.bfloat16))
    (file,) = log.directory.glob("step_00000020.*")
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DeltaLogError, match="20"):
        measure_sparsity(log)
