import numpy as np
import pytest
import torch

from sparse_opt.analysis import (
    chosen_names,
    get_layer_rank_stats,
    measure_concentration,
    measure_ranks,
    rank_stats,
    singular_values,
)
from sparse_opt.errors import ConfigError, DataError


def with_spectrum(values: list[float] | np.ndarray, m: int, n: int, seed: int = 0) -> torch.Tensor:
    """An fp64 matrix [m, n] of these singular values, between random orthogonal factors."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((size, len(values))))[0] for size in (m, n))
    return torch.from_numpy(left @ np.diag(values) @ right.T)


@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (50, 50), (1, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ranks_are_those_of_numpy(shape, dtype):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    values = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    p = values / values.sum()
    stats = rank_stats(matrix)
    assert stats.rank == np.linalg.matrix_rank(matrix.numpy()) == min(shape) == stats.full_rank
    # Of a Gram matrix in fp64, the error is (m + n) eps norm(A)^2 on each square.
    assert stats.effective_rank == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-9)
    assert stats.stable_rank == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-9)
    assert stats.spectral_norm == pytest.approx(values[0], rel=1e-12)
    assert stats.frobenius_norm == pytest.approx(np.linalg.norm(values), rel=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 17])
def test_known_ranks(rank):
    matrix = with_spectrum(np.linspace(1, 2, rank), 40, 30)
    for dtype in (torch.float32, torch.float64):
        rounded = matrix.to(dtype)
        assert rank_stats(rounded).rank == np.linalg.matrix_rank(rounded.numpy()) == rank


def test_a_gram_matrix_of_a_tall_matrix_is_summed_in_pieces():
    matrix = torch.randn(9000, 20, generator=torch.Generator().manual_seed(6))
    for tensor in (matrix, matrix.T):
        torch.testing.assert_close(singular_values(tensor), torch.linalg.svdvals(tensor.double()), rtol=1e-12, atol=0)


def test_concentration_of_norms():
    norms = [0.5, 4.0, 0.0, 1.5, 2.0]
    found = measure_concentration(norms)
    differences = sum(abs(a - b) for a in norms for b in norms)
    assert found["gini"] == pytest.approx(differences / (2 * 5 * 8.0))
    p = np.array(norms)[np.array(norms) > 0] / 8.0
    assert found["entropy"] == pytest.approx(-(p * np.log(p)).sum() / np.log(5))
    assert (found["top_share"], found["n_changed"]) == (7.5 / 8, 4)
    assert list(measure_concentration([0.0, 3.0]).values()) == [0.5, 0.0, 1.0, 1]
    assert np.isnan(measure_concentration([0.0, 0.0])["gini"]) and np.isnan(measure_concentration([1.0])["entropy"])


def test_a_matrix_that_did_not_change_has_no_rank():
    stats = rank_stats(torch.zeros(6, 4))
    assert (stats.rank, stats.effective_rank, stats.stable_rank, stats.frobenius_norm) == (0, 0, 0, 0)
    assert (stats.share_above, stats.share_large) == (0, 0)


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        (torch.tensor([[1.0, float("nan")], [float("inf"), 1.0]]), "2 of 4 elements are NaN or infinite"),
        (torch.ones(3), "expected two dimensions with elements"),
        (torch.ones(0, 3), "expected two dimensions with elements"),
    ],
    ids=["nan", "vector", "empty"],
)
def test_what_has_no_singular_values_is_refused(matrix, said):
    with pytest.raises(DataError, match=said):
        rank_stats(matrix)


def test_shares_are_those_of_numpy():
    delta = torch.randn(300, 70, generator=torch.Generator().manual_seed(8)) ** 3 * 1e-6
    sizes = delta.abs().numpy().astype(np.float64)
    stats = rank_stats(delta, tau=1e-6)
    assert stats.share_above == (sizes > 1e-6).mean()
    assert stats.share_large == (sizes > sizes.mean() + 2 * sizes.std(ddof=1)).mean()


def test_a_models_matrices_are_found_and_measured(tiny_llama):
    model = tiny_llama(tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight += with_spectrum([1e-2, 1e-3], *weight.shape).float()
    stats = get_layer_rank_stats(model, before, tolerance=1e-5)
    assert "model.embed_tokens.weight" in stats
    assert "lm_head.weight" not in stats  # tied
    assert not any("norm" in name for name in stats)
    assert [key for key, s in stats.items() if s.rank] == [name]
    delta = (weight.detach() - before[name]).numpy()
    assert stats[name].rank == np.linalg.matrix_rank(delta)
    assert stats[name].share_above == (np.abs(delta) > np.float32(1e-5)).mean()
    del before[name]
    with pytest.raises(DataError, match=f"init_state has no {name}"):
        get_layer_rank_stats(model, before)


def test_experts_are_matrices_of_their_own(make_log):
    name = "model.layers.0.mlp.experts.down_proj"
    base = torch.zeros(2, 6, 5)
    now = torch.stack([with_spectrum([1.0], 6, 5), with_spectrum([2.0, 1.0, 1.0], 6, 5)]).float()
    stats = measure_ranks(make_log([{name: base}, {name: now}]))[10]
    assert {key: s.rank for key, s in stats.items()} == {f"{name}[0]": 1, f"{name}[1]": 3}


def test_a_log_gives_what_its_states_give(make_log, random_states):
    history = random_states(torch.bfloat16)
    log = make_log(history)
    assert measure_ranks(log) == {30: get_layer_rank_stats(history[3], history[0])}
    found = measure_ranks(log, [30, 10], tau=1e-5)
    assert list(found) == [10, 30]
    assert found[10] == get_layer_rank_stats(history[1], history[0], 1e-5)


def test_refusals_name_the_tensor(make_log):
    name = "model.layers.0.mlp.up_proj.weight"
    base, now = torch.zeros(2, 3, 3)
    now[0, 0] = float("nan")
    log = make_log([{name: base, "model.norm.weight": torch.ones(3)}, {name: now, "model.norm.weight": torch.ones(3)}])
    for error, said, call in (
        (DataError, f"the change of {name}: 1 of 9 elements", lambda: measure_ranks(log)),
        (DataError, "no weight matrix", lambda: measure_ranks(log, names=chosen_names(log, ["*norm*"]))),
        (ConfigError, "tau is -1", lambda: measure_ranks(log, tau=-1)),
    ):
        with pytest.raises(error, match=said):
            call()


@pytest.mark.gpu
def test_a_gpu_finds_the_same():
    matrix = torch.randn(500, 300, generator=torch.Generator().manual_seed(9)) * 1e-5
    here, there = rank_stats(matrix), rank_stats(matrix.cuda())
    assert there.rank == here.rank
    for name in ("effective_rank", "stable_rank", "spectral_norm"):
        assert getattr(there, name) == pytest.approx(getattr(here, name), rel=1e-6)
    assert (there.share_above, there.share_large) == (here.share_above, here.share_large)
