"""The byte counts that figures are set beside."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_opt.bench import floors
from sparse_opt.bench.shapes import LLAMA_3_2_3B, total_numel

H200_COPY_RATE = 4275e9  # bytes a second, measured


@pytest.mark.parametrize(("density", "share"), [(0.01, 0.28), (0.025, 0.56), (0.1, 0.97)])
def test_random_masks_touch_most_granules_of_bf16(density, share):
    assert floors.hit(density) == pytest.approx(share, abs=0.005)


def test_a_mask_of_whole_granules_touches_no_more_than_its_density():
    assert floors.hit(0.025, run=32) == pytest.approx(0.025)
    assert floors.hit(0.025, run=128) == pytest.approx(0.025)
    assert floors.hit(0.025, run=16) == pytest.approx(1 - 0.975**2)


def test_fp32_has_half_as_many_elements_in_a_granule():
    assert floors.hit(0.025, itemsize=4) == pytest.approx(1 - 0.975**16)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_touched_bytes_agree_with_a_count(itemsize):
    numel, per_granule = 1 << 20, 64 // itemsize
    active = torch.rand(numel, generator=torch.Generator().manual_seed(0)) < 0.025
    granules = active.view(-1, per_granule).any(dim=1)
    counted = 64.0 * granules.sum().item()
    # The count is binomial over the granules: five standard deviations.
    share = floors.hit(0.025, itemsize=itemsize)
    spread = 5 * 64 * math.sqrt(len(granules) * share * (1 - share))
    # Drawing each element leaves nnz itself to chance, which the estimate takes as given: it only tightens the bound.
    assert floors.touched_bytes(numel, int(active.sum()), itemsize) == pytest.approx(counted, abs=spread)


@pytest.mark.parametrize(("density", "ms"), [(0.025, 2.9), (0.1, 5.9)])
def test_the_step_floor_of_a_3b_model(density, ms):
    numel = total_numel(LLAMA_3_2_3B)
    nbytes = floors.adamw_bytes(numel, round(density * numel), param_itemsize=2, grad_itemsize=2, dense_grads=True)
    assert 1e3 * nbytes / H200_COPY_RATE == pytest.approx(ms, abs=0.05)


def test_each_op_counts_what_it_reads_and_writes_when_all_is_active():
    n = 1000
    assert floors.adamw_bytes(n, n, param_itemsize=2, grad_itemsize=2, dense_grads=True) == n * (2 + 2 + 2 + 4 + 16)
    assert floors.adamw_bytes(n, n, param_itemsize=2, grad_itemsize=4, dense_grads=False) == n * (2 + 2 + 4 + 4 + 16)
    with_master = floors.adamw_bytes(
        n, n, param_itemsize=2, grad_itemsize=4, dense_grads=False, moment_itemsize=2, master_itemsize=4
    )
    assert with_master == n * (2 + 2 + 4 + 4 + 8 + 8)
    assert floors.sgd_bytes(n, n, param_itemsize=4, grad_itemsize=4, dense_grads=True) == n * (8 + 4 + 4 + 8)
    assert floors.gather_bytes(n, n, grad_itemsize=2) == n * (2 + 4 + 4)
    assert floors.swap_bytes(n, n, itemsize=2) == n * (4 + 4 + 4)
    assert floors.delta_encode_bytes(n, 10, itemsize=2) == n * 4 + 10 * 6
    assert floors.delta_apply_bytes(n, n, itemsize=2) == n * (4 + 6)
    assert floors.dense_adamw_bytes(n, param_itemsize=2) == n * 14
    assert floors.dense_clip_bytes(n, grad_itemsize=2) == n * 6


def test_nothing_active_costs_nothing():
    assert floors.swap_bytes(1000, 0, itemsize=2) == 0
    assert floors.swap_bytes(0, 0, itemsize=2) == 0
