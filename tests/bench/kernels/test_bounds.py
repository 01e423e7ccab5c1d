"""The minimum byte counts that measurements are compared with."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.bench.common.shapes import LLAMA_3_2_3B, total_numel
from sparse_opt.bench.kernels import bounds
from sparse_opt.bench.kernels.inputs import random_case
from sparse_opt.ops import STEP_OPS

H200_COPY_RATE = 4275e9  # bytes a second, measured


@pytest.mark.parametrize(("density", "share"), [(0.01, 0.28), (0.025, 0.56), (0.1, 0.97)])
def test_random_masks_touch_most_granules_of_bf16(density, share):
    assert bounds.hit(density) == pytest.approx(share, abs=0.005)


def test_a_mask_of_whole_granules_touches_no_more_than_its_density():
    assert bounds.hit(0.025, run=32) == pytest.approx(0.025)
    assert bounds.hit(0.025, run=128) == pytest.approx(0.025)
    assert bounds.hit(0.025, run=16) == pytest.approx(1 - 0.975**2)


def test_fp32_has_half_as_many_elements_in_a_granule():
    assert bounds.hit(0.025, itemsize=4) == pytest.approx(1 - 0.975**16)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_touched_bytes_agree_with_a_count(itemsize):
    numel, per_granule = 1 << 20, bounds.GRANULE_BYTES // itemsize
    active = torch.rand(numel, generator=torch.Generator().manual_seed(0)) < 0.025
    granules = active.view(-1, per_granule).any(dim=1)
    # The count is binomial over the granules: five standard deviations. Drawing each element leaves nnz itself to
    # chance, which the estimate takes as given: it only tightens the bound.
    share = bounds.hit(0.025, itemsize=itemsize)
    spread = 5 * bounds.GRANULE_BYTES * math.sqrt(len(granules) * share * (1 - share))
    counted = float(bounds.GRANULE_BYTES * granules.sum().item())
    assert bounds.touched_bytes(numel, int(active.sum()), itemsize) == pytest.approx(counted, abs=spread)


@pytest.mark.parametrize("pattern", ["run16", "run32", "tile64"])
def test_the_bytes_of_a_pattern_agree_with_a_count_on_a_mask(pattern):
    shape = (1024, 2048)
    mask = MaskSet.random({"w": shape}, density=0.1, pattern=pattern, seed=0)
    dense = mask.bool("w").view(-1)
    height, width = {"run16": (1, 16), "run32": (1, 32), "tile64": (64, 64)}[pattern]
    n_units = mask.nnz // (height * width)
    assert bounds.index_bytes(mask.nnz, 4, pattern) == 4 * n_units
    granules = dense.view(-1, 32).any(dim=1).sum().item()
    counted = 2 * 64 * granules + 4 * n_units + mask.nnz * 4
    found = bounds.swap_bytes(dense.numel(), mask.nnz, itemsize=2, pattern=pattern)
    # run16: two runs may share a granule, by chance; the others fill whole ones, and the count is exact.
    allowed = 5 * 2 * 64 * math.sqrt(dense.numel() / 32 * 0.19 * 0.81) if pattern == "run16" else 0.5
    assert found == pytest.approx(counted, abs=allowed)


def test_the_bytes_of_tile_gradients_agree_with_a_count_on_masks():
    shape, tokens, counts, nnz = (1024, 2048), 100, [], 0
    for seed in range(30):
        mask = MaskSet.random({"w": shape}, density=0.1, pattern="tile64", seed=seed)
        tiles, nnz = mask.bool("w")[::64, ::64], mask.nnz
        hit = 64 * (tiles.any(dim=1).sum().item() + tiles.any(dim=0).sum().item())
        counts.append(tokens * hit * 2 + nnz * 4)
    found = bounds.tile_weight_grad_bytes(tokens, *shape, nnz, tile_size=64, itemsize=2)
    # The count's own spread shows how far the mean of 30 may be off: five standard errors, and a percent for drawing
    # the tiles without replacement.
    allowed = 5 * statistics.stdev(counts) / math.sqrt(len(counts)) + 0.01 * found
    assert found == pytest.approx(statistics.mean(counts), abs=allowed)
    assert bounds.tile_weight_grad_bytes(tokens, *shape, 0, tile_size=64, itemsize=2) == 0
    everything = bounds.tile_weight_grad_bytes(10, 70, 30, 70 * 30, tile_size=128, itemsize=4, out_itemsize=2)
    assert everything == 10 * (70 + 30) * 4 + 70 * 30 * 2


def test_a_ragged_last_unit_still_has_an_index():
    assert bounds.index_bytes(33, 4, "run32") == 8
    assert bounds.index_bytes(0, 4, "tile64") == 0
    assert bounds.index_bytes(33, 2) == 66


def test_the_step_bound_of_a_3b_model():
    numel = total_numel(LLAMA_3_2_3B)
    # 56 % of the granules of weights and gradients read, those of the weights written, 20 bytes an element
    nbytes = bounds.step_bytes(
        numel, round(0.025 * numel), states=2, param_itemsize=2, grad_itemsize=2, dense_grads=True
    )
    by_hand = numel * (3 * 2 * (1 - 0.975**32) + 0.025 * 20)
    assert nbytes == pytest.approx(by_hand)
    assert 1e3 * nbytes / H200_COPY_RATE == pytest.approx(2.9, abs=0.05)


def test_weights_whose_bits_stay_are_not_written():
    sizes = {"states": 2, "param_itemsize": 2, "grad_itemsize": 4, "dense_grads": False}
    all_change, few, none = (bounds.step_bytes(1 << 20, 1 << 14, **sizes, changed=share) for share in (1.0, 0.01, 0.0))
    assert all_change - none == pytest.approx(bounds.touched_bytes(1 << 20, 1 << 14, 2))
    assert few - none == pytest.approx(bounds.touched_bytes(1 << 20, 0.01 * (1 << 14), 2))


def test_each_op_counts_what_it_reads_and_writes_when_all_is_active():
    n, half = 1000, {"param_itemsize": 2}
    assert bounds.step_bytes(n, n, states=2, **half, grad_itemsize=2, dense_grads=True) == n * (2 + 2 + 2 + 4 + 16)
    assert bounds.step_bytes(n, n, states=2, **half, grad_itemsize=4, dense_grads=False) == n * (2 + 2 + 4 + 4 + 16)
    with_master = bounds.step_bytes(
        n, n, states=2, **half, grad_itemsize=4, dense_grads=False, state_itemsize=2, master_itemsize=4
    )
    assert with_master == n * (2 + 2 + 4 + 4 + 8 + 8)
    assert bounds.step_bytes(n, n, states=1, param_itemsize=4, grad_itemsize=4, dense_grads=True) == n * (8 + 4 + 4 + 8)
    assert bounds.gather_bytes(n, n, grad_itemsize=2) == n * (2 + 4 + 4)
    assert bounds.swap_bytes(n, n, itemsize=2) == n * (4 + 4 + 4)
    assert bounds.delta_encode_bytes(n, 10, itemsize=2) == n * 4 + 10 * 6
    assert bounds.delta_apply_bytes(n, n, itemsize=2) == n * (2 + 2 + 6)
    assert bounds.dense_adamw_bytes(n, param_itemsize=2) == n * 14
    assert bounds.dense_adamw_bytes(n, param_itemsize=2, mask_itemsize=1) == n * (14 + 1 + 4)
    assert bounds.dense_adamw_bytes(n, param_itemsize=2, state_itemsize=1) == n * (6 + 4)
    assert bounds.dense_clip_bytes(n, grad_itemsize=2) == n * 6


@pytest.mark.parametrize("op", STEP_OPS)
def test_the_bound_of_a_step_op_follows_from_its_states(op):
    generator = torch.Generator().manual_seed(0)
    case = random_case(op, {"w": (100, 32)}, torch.float32, 1.0, generator, dense_grads=False)
    # The weight and each fp32 state are read and written; the fp32 gradient and the 2-byte index are read.
    assert case.bound_bytes == 3200 * (2 * 4 + 2 * 4 * len(STEP_OPS[op].states) + 4 + 2)


def test_narrow_moments_and_indices_save_what_they_are_narrower():
    sizes = {"states": 2, "param_itemsize": 2, "grad_itemsize": 2, "dense_grads": True}
    wide = bounds.step_bytes(10_000, 500, **sizes)
    assert wide - bounds.step_bytes(10_000, 500, **sizes, state_itemsize=2) == pytest.approx(500 * 8)
    assert wide - bounds.step_bytes(10_000, 500, **sizes, index_itemsize=2) == pytest.approx(500 * 2)


def test_one_change_costs_its_granule_twice_and_itself():
    assert bounds.delta_apply_bytes(1 << 20, 1, itemsize=2) == pytest.approx(64 + 64 + 6, rel=1e-3)


def test_nothing_active_costs_nothing():
    assert bounds.swap_bytes(1000, 0, itemsize=2) == 0
    assert bounds.swap_bytes(0, 0, itemsize=2) == 0
    assert bounds.delta_apply_bytes(0, 0, itemsize=2) == 0
    assert bounds.delta_apply_bytes(1000, 0, itemsize=2) == 0
