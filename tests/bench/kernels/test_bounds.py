"""The minimum byte counts that measurements are compared with."""

import math

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.bench.kernels import bounds
from sparse_opt.bench.kernels.bounds import Rates, Traffic
from sparse_opt.bench.kernels.cases import random_case
from sparse_opt.ops import STEP_OPS

H200_COPY_RATE = 4275e9  # bytes a second, measured


@pytest.mark.parametrize("itemsize", [2, 4])
def test_touched_bytes_agree_with_a_count(itemsize):
    numel, per_granule = 1 << 20, bounds.GRANULE_BYTES // itemsize
    active = torch.rand(numel, generator=torch.Generator().manual_seed(0)) < 0.025
    granules = active.view(-1, per_granule).any(dim=1)
    # The count is binomial over the granules: five standard deviations. Drawing each element leaves nnz itself to
    # chance, which the estimate takes as given: it only tightens the bound.
    share = bounds.touched_bytes(numel, 0.025 * numel, itemsize) / (numel * itemsize)
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
    found = bounds.swap_traffic(dense.numel(), mask.nnz, itemsize=2, pattern=pattern)
    # run16: two runs may share a granule, by chance; the others fill whole ones, and the count is exact.
    allowed = 5 * 64 * math.sqrt(dense.numel() / 32 * 0.19 * 0.81) if pattern == "run16" else 0.5
    assert found.copied == pytest.approx(64 * granules + 4 * n_units + mask.nnz * 4, abs=allowed)
    # Every write is a whole run or a whole row of a tile.
    written = dense.view(-1, width).any(dim=1)
    assert written.sum().item() * width == mask.nnz
    assert found.scattered == pytest.approx(2 * mask.nnz)
    assert (found.unit, found.share) == (2 * width, pytest.approx(written.float().mean().item()))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("density", [0.01, 0.1])
def test_the_time_of_a_step_agrees_with_a_count_of_granules_and_sectors(density, itemsize):
    numel = 1 << 20
    generator = torch.Generator().manual_seed(0)
    active = torch.rand(numel, generator=generator) < density
    changed = active & (torch.rand(numel, generator=generator) < 0.5)
    nnz, n_changed = int(active.sum()), int(changed.sum())
    granules = active.view(-1, 64 // itemsize).any(dim=1)
    sectors = changed.view(-1, 32 // itemsize).any(dim=1)
    # The parameter and the dense gradient, two fp32 moments read and written, a 4-byte index.
    read = 2 * 64 * int(granules.sum()) + nnz * (16 + 4)
    # The rate rises from 1 to 3 bytes a second with the share of sectors that are written; a copy has 10.
    rates = Rates(10.0, {32: [(0.0, 1e-9), (1.0, 3e-9)]})
    share = sectors.float().mean().item()
    counted = read / 10 + 32 * int(sectors.sum()) / (1 + 2 * share)
    found = bounds.step_traffic(
        numel,
        nnz,
        states=2,
        param_itemsize=itemsize,
        grad_itemsize=itemsize,
        dense_grads=True,
        changed=n_changed / nnz,
    )
    # Five standard deviations of the two counts, as shares of them; the rate's own change makes the time vary less.
    spread = [5 * math.sqrt((1 - x.float().mean().item()) / int(x.sum())) for x in (granules, sectors)]
    assert found.share == pytest.approx(share, rel=spread[1])
    assert found.seconds(rates) == pytest.approx(counted, rel=max(spread))


def test_scattered_writes_cost_as_much_as_a_copy_only_where_their_rate_is_unknown():
    traffic = Traffic(600.0, 300.0, 64, 0.5)
    assert traffic.bytes == 900
    unknown, known = Rates(100.0, {}), Rates(100.0, {32: [(1.0, 1e-8)], 64: [(1.0, 5e-8)]})
    assert traffic.seconds(unknown) == 9.0
    assert traffic.seconds(known) == pytest.approx(6.0 + 6.0)
    assert Traffic(600.0).seconds(known) == 6.0


def test_where_nothing_dense_is_read_indices_and_copies_count_where_elements_change():
    numel, n = 1 << 20, 1 << 14
    sizes = {"states": 2, "param_itemsize": 2, "grad_itemsize": 4, "index_itemsize": 2, "dense_grads": False}
    known = {**sizes, "reads_params": False}
    few = bounds.step_traffic(numel, n, **known, weights_itemsize=2, changed=0.01)
    index, sectors = bounds.touched_bytes(n, 0.01 * n, 2), bounds.touched_bytes(n, 0.01 * n, 2, size=32)
    assert few.copied == pytest.approx(n * (16 + 4 + 2) + index + sectors)
    assert 0 < sectors < index < 2 * n
    masters = bounds.step_traffic(numel, n, **known, master_itemsize=4, changed=0.01)
    assert masters.copied == pytest.approx(n * (16 + 4 + 8) + index)
    assert bounds.step_traffic(numel, n, **known, weights_itemsize=2, changed=0.0).copied == n * (16 + 4 + 2)
    everywhere = bounds.step_traffic(numel, n, **known, weights_itemsize=2)
    assert everywhere.copied == n * (16 + 4 + 2 + 2 + 2)
    dense = bounds.step_traffic(numel, n, **{**known, "dense_grads": True}, weights_itemsize=2, changed=0.01)
    assert dense.copied == pytest.approx(bounds.touched_bytes(numel, n, 4) + n * (16 + 2 + 2) + sectors)
    replaced = bounds.replace_traffic(numel, n, itemsize=2, index_itemsize=2, changed=0.01)
    assert replaced == few._replace(copied=pytest.approx(n * 4 + index))


def test_each_op_counts_what_it_reads_and_writes_when_all_is_active():
    n, half, compact = 1000, {"param_itemsize": 2}, {"grad_itemsize": 4, "dense_grads": False}
    everywhere = Traffic(0.0, 2 * n, 32, 1.0)  # of 2-byte elements
    step = bounds.step_traffic(n, n, states=2, **half, grad_itemsize=2, dense_grads=True)
    assert step == everywhere._replace(copied=n * (2 + 2 + 4 + 16))
    step = bounds.step_traffic(n, n, states=2, **half, **compact)
    assert step == everywhere._replace(copied=n * (2 + 4 + 4 + 16))
    with_master = bounds.step_traffic(n, n, states=2, **half, **compact, state_itemsize=2, master_itemsize=4)
    assert with_master == everywhere._replace(copied=n * (2 + 4 + 4 + 8 + 8))
    fp32 = bounds.step_traffic(n, n, states=1, param_itemsize=4, grad_itemsize=4, dense_grads=True)
    assert fp32 == Traffic(n * (4 + 4 + 4 + 8), 4 * n, 32, 1.0)
    assert bounds.swap_traffic(n, n, itemsize=2) == everywhere._replace(copied=n * (2 + 4 + 4))
    assert bounds.gather_traffic(n, n, itemsize=2) == Traffic(n * (2 + 4 + 4))
    assert bounds.apply_traffic(n, n, itemsize=2) == everywhere._replace(copied=n * (2 + 6))


@pytest.mark.parametrize("op", STEP_OPS)
def test_the_bound_of_a_step_op_follows_from_its_states(op):
    generator = torch.Generator().manual_seed(0)
    case = random_case(op, {"w": (100, 32)}, torch.float32, 1.0, generator, dense_grads=False)
    # The weight and each fp32 state are read and written; the fp32 gradient and the 2-byte index are read.
    assert case.traffic.bytes == 3200 * (2 * 4 + 2 * 4 * len(STEP_OPS[op].states) + 4 + 2)
