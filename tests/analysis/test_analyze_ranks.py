from __future__ import annotations

import numpy as np
import pytest
import torch

from sparse_opt.analysis import (
    Concentration,
    get_effective_rank,
    get_layer_rank_stats,
    get_rank,
    get_stable_rank,
    measure_concentration,
    measure_ranks,
    rank_stats,
)
from sparse_opt.analysis.spectrum import METHODS, singular_values
from sparse_opt.errors import DataError


def with_spectrum(values: list[float] | np.ndarray, m: int, n: int, seed: int = 0) -> torch.Tensor:
    """An fp64 matrix [m, n] of these singular values, between random orthogonal factors."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((size, len(values))))[0] for size in (m, n))
    return torch.from_numpy(left @ np.diag(values) @ right.T)


def effective_rank(values: np.ndarray) -> float:
    p = values[values > 0] / values.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (50, 50), (1, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ranks_are_those_of_numpy(shape, dtype):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    values = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    assert get_rank(matrix) == np.linalg.matrix_rank(matrix.numpy()) == min(shape)
    # fp64 SVDs of the same matrix differ by a few times eps * s_1.
    assert get_effective_rank(matrix) == pytest.approx(effective_rank(values), rel=1e-12)
    assert get_stable_rank(matrix) == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 17])
def test_known_ranks(rank):
    matrix = with_spectrum(np.linspace(1, 2, rank), 40, 30)
    for dtype in (torch.float32, torch.float64):
        rounded = matrix.to(dtype)
        assert get_rank(rounded) == np.linalg.matrix_rank(rounded.numpy()) == rank
    assert get_rank(matrix, tolerance=1.51) == (np.linspace(1, 2, rank) > 1.51).sum()


def test_known_spectra():
    equal = with_spectrum([3.0] * 8, 20, 30)
    assert get_effective_rank(equal) == pytest.approx(8)
    assert get_stable_rank(equal) == pytest.approx(8)
    halves = with_spectrum([1.0, 0.5, 0.25, 0.25], 10, 10)
    assert get_effective_rank(halves) == pytest.approx(2 ** -(0.5 * -1 + 0.25 * -2 + 2 * 0.125 * -3))
    assert get_stable_rank(halves) == pytest.approx(1 + 0.25 + 2 * 0.0625)


def test_transposing_changes_nothing():
    matrix = torch.randn(30, 50, generator=torch.Generator().manual_seed(2)).double()
    for statistic in (get_rank, get_effective_rank, get_stable_rank):
        assert statistic(matrix) == pytest.approx(statistic(matrix.T), rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(80, 50), (50, 80)], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.5, 3.0], ids=lambda x: f"decay{x}")
def test_bounds_hold(method, shape, decay):
    true = 10.0 ** -(decay * np.arange(50) / 10)
    spectrum = singular_values(with_spectrum(true, *shape), method, k=20)
    assert spectrum.values.shape == (50,)
    assert (spectrum.lower.numpy() <= true).all()
    assert (true <= spectrum.upper.numpy()).all()
    assert spectrum.squared_norm == pytest.approx((true**2).sum(), rel=1e-12)
    stats = rank_stats(with_spectrum(true, *shape), method=method, k=20)
    for figure, exact in (
        (stats.effective_rank, effective_rank(true)),
        (stats.stable_rank, (true**2).sum() / true[0] ** 2),
        (stats.spectral_norm, true[0]),
    ):
        assert figure.low <= exact <= figure.high
    # fp64: values of 1e-14 s_1 cannot be found if squares have an error of 1e-16.
    assert stats.rank.low <= (true > max(shape) * np.finfo(np.float64).eps).sum() <= stats.rank.high


@pytest.mark.parametrize("method", ["exact", "gram"])
def test_bounds_are_narrow_where_a_method_is_said_to_be_good(method):
    stats = rank_stats(torch.randn(200, 300, generator=torch.Generator().manual_seed(3)) * 1e-6, method=method)
    assert stats.rank.low == stats.rank.high == 200
    assert stats.effective_rank.high - stats.effective_rank.low < 1e-4
    assert stats.stable_rank.high - stats.stable_rank.low < 1e-6


def test_lowrank_finds_updates_of_low_rank_and_bounds_its_error():
    low = rank_stats(with_spectrum(np.linspace(1, 2, 5), 100, 80).float(), method="lowrank", k=12)
    assert (low.rank.value, low.rank.low, low.rank.high) == (5, 5, 5)
    assert low.effective_rank.value == pytest.approx(effective_rank(np.linspace(1, 2, 5)), rel=1e-4)
    full = rank_stats(torch.randn(100, 80, generator=torch.Generator().manual_seed(4)), method="lowrank", k=12)
    assert (full.rank.low, full.rank.high) == (12, 80)
    assert full.effective_rank.low < 20 < 70 < full.effective_rank.high


def test_lowrank_is_the_same_each_time_and_leaves_the_generator_alone():
    matrix = torch.randn(60, 40, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second = (singular_values(matrix, "lowrank", k=8).values for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.rand(3), expected)


def test_a_gram_matrix_in_pieces_is_that_of_the_whole(monkeypatch):
    matrix = torch.randn(100, 30, generator=torch.Generator().manual_seed(6))
    whole = singular_values(matrix, "gram").values
    monkeypatch.setattr("sparse_opt.analysis.spectrum._ROWS", 7)
    torch.testing.assert_close(singular_values(matrix, "gram").values, whole, rtol=1e-12, atol=0)


def test_concentration_of_norms():
    norms = [0.5, 4.0, 0.0, 1.5, 2.0]
    found = measure_concentration(norms)
    differences = sum(abs(a - b) for a in norms for b in norms)
    assert found.gini == pytest.approx(differences / (2 * 5 * 8.0))
    p = np.array(norms)[np.array(norms) > 0] / 8.0
    assert found.entropy == pytest.approx(-(p * np.log(p)).sum() / np.log(5))
    assert (found.top_share, found.n_changed) == (7.5 / 8, 4)
    assert measure_concentration([2.0] * 4) == Concentration(0.0, pytest.approx(1.0), 0.75, 4)
    assert measure_concentration([0.0, 3.0]) == Concentration(0.5, 0.0, 1.0, 1)
    assert np.isnan(measure_concentration([0.0, 0.0]).gini) and np.isnan(measure_concentration([1.0]).entropy)


@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_that_did_not_change_has_no_rank(method):
    stats = rank_stats(torch.zeros(6, 4), method=method)
    assert [f.value for f in (stats.rank, stats.effective_rank, stats.stable_rank)] == [0, 0, 0]
    assert (stats.rank.high, stats.frobenius_norm, stats.share_above, stats.share_large) == (0, 0, 0, 0)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(odd):
    matrix = torch.ones(3, 3)
    matrix[1, 1] = odd
    for statistic in (get_rank, get_effective_rank, get_stable_rank):
        with pytest.raises(DataError, match="1 of 9 elements are NaN or infinite"):
            statistic(matrix)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (0, 3)], ids=str)
def test_tensors_other_than_matrices_are_refused(shape):
    with pytest.raises(DataError, match="expected two dimensions with elements"):
        get_rank(torch.ones(shape))


def test_shares_are_those_of_numpy():
    delta = torch.randn(300, 70, generator=torch.Generator().manual_seed(8)) ** 3 * 1e-6
    sizes = delta.abs().numpy().astype(np.float64)
    stats = rank_stats(delta, tau=1e-6, method="gram")
    assert stats.share_above == (sizes > 1e-6).mean()
    assert stats.share_large == (sizes > sizes.mean() + 2 * sizes.std(ddof=1)).mean()
    assert stats.frobenius_norm == pytest.approx(np.linalg.norm(sizes), rel=1e-12)


def test_a_models_matrices_are_found_and_measured(tiny_llama):
    model = tiny_llama(tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weight = model.model.layers[1].mlp.up_proj.weight
    update = with_spectrum([1e-2, 1e-3], *weight.shape).float()
    with torch.no_grad():
        weight += update
    stats = get_layer_rank_stats(model, before, tolerance=1e-5)
    assert "model.embed_tokens.weight" in stats
    assert "lm_head.weight" not in stats  # tied
    assert not any("norm" in name for name in stats)
    assert all(s.rank.value == 0 for name, s in stats.items() if name != "model.layers.1.mlp.up_proj.weight")
    delta = (weight.detach() - before["model.layers.1.mlp.up_proj.weight"]).numpy()
    found = stats["model.layers.1.mlp.up_proj.weight"]
    assert found.shape == tuple(weight.shape)
    assert found.rank.value == np.linalg.matrix_rank(delta)
    assert found.share_above == (np.abs(delta) > np.float32(1e-5)).mean()
    assert found.stable_rank.value == pytest.approx(1.01, rel=1e-3)
    del before["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(DataError, match=r"init_state has no model\.layers\.1\.mlp\.up_proj\.weight"):
        get_layer_rank_stats(model, before)


def test_conv1d_weights_of_gpt2_have_the_ranks_of_their_transposes():
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    before = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    stats = get_layer_rank_stats(model, before)
    fused = stats["transformer.h.0.attn.c_attn.weight"]
    assert fused.shape == (16, 48)
    assert fused.full_rank == 16
    assert fused.stable_rank.value == pytest.approx(get_stable_rank(model.transformer.h[0].attn.c_attn.weight.T))


def test_experts_are_matrices_of_their_own(make_log):
    name = "model.layers.0.mlp.experts.down_proj"
    base = torch.zeros(2, 6, 5)
    now = torch.stack([with_spectrum([1.0], 6, 5), with_spectrum([2.0, 1.0, 1.0], 6, 5)]).float()
    stats = measure_ranks(make_log([{name: base}, {name: now}]))
    assert {key: s.rank.value for key, s in stats.items()} == {f"{name}[0]": 1, f"{name}[1]": 3}


def test_a_log_gives_what_its_states_give(make_log, random_states):
    history = random_states(torch.bfloat16)
    log = make_log(history)
    assert measure_ranks(log) == get_layer_rank_stats(history[3], history[0])
    assert measure_ranks(log, 10, method="gram", tau=1e-5) == get_layer_rank_stats(
        history[1], history[0], 1e-5, method="gram"
    )


def test_refusals_name_the_tensor(make_log):
    name = "model.layers.0.mlp.up_proj.weight"
    base, now = torch.zeros(2, 3, 3)
    now[0, 0] = float("nan")
    log = make_log([{name: base, "model.norm.weight": torch.ones(3)}, {name: now, "model.norm.weight": torch.ones(3)}])
    with pytest.raises(DataError, match=f"the change of {name}: 1 of 9 elements"):
        measure_ranks(log)
    with pytest.raises(DataError, match="no weight matrix"):
        measure_ranks(log, include=["*norm*"])
    with pytest.raises(DataError, match="method is 'svd'"):
        measure_ranks(log, method="svd")
    with pytest.raises(DataError, match="k is 0"):
        measure_ranks(log, method="lowrank", k=0)
    with pytest.raises(DataError, match="tau is -1"):
        measure_ranks(log, tau=-1)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_finds_the_same(method):
    matrix = torch.randn(500, 300, generator=torch.Generator().manual_seed(9)) * 1e-5
    here, there = rank_stats(matrix, method="exact"), rank_stats(matrix.cuda(), method=method, k=300)
    assert there.rank.value == here.rank.value
    for name in ("effective_rank", "stable_rank", "spectral_norm"):
        assert getattr(there, name).value == pytest.approx(getattr(here, name).value, rel=1e-6)
    assert (there.share_above, there.share_large) == (here.share_above, here.share_large)
