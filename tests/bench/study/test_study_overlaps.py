"""Overlaps of changed weights from samples, and closeness to a dense run."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from sparse_opt.bench.study.measures import closeness
from sparse_opt.bench.study.overlaps import overlaps_with, positions_of


def test_overlaps_of_small_tensors_are_exact(tmp_path):
    generator = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(37, 5, generator=generator), "b": torch.ones(9)}
    masks = [{name: torch.rand(w.shape, generator=generator) < 0.3 for name, w in start.items()} for _ in range(2)]
    assert overlaps_with(tmp_path, "first", masks[0], start) == {}
    found = overlaps_with(tmp_path, "second", masks[1], start)["first"]
    joined = [torch.cat([mask["a"].flatten(), mask["b"]]) for mask in masks]
    assert found["n"] == joined[1].sum() and found["n_other"] == joined[0].sum()
    assert found["n_both"] == (joined[0] & joined[1]).sum() and found["n_both_stderr"] == 0
    of_tensors = sum(float(masks[0][name].sum() * masks[1][name].sum()) / start[name].numel() for name in start)
    assert found["expected_by_tensor"] == pytest.approx(of_tensors)
    # The weights of b are equal, so that their exponents say nothing; all exponents of a weigh in.
    exponents = torch.frexp(start["a"].bfloat16().float()).exponent
    of_a = sum(
        float((masks[0]["a"] & (exponents == e)).sum() * (masks[1]["a"] & (exponents == e)).sum())
        / int((exponents == e).sum())
        for e in exponents.unique()
    )
    assert found["expected"] == pytest.approx(of_a + float(masks[0]["b"].sum() * masks[1]["b"].sum()) / 9)


def test_overlaps_of_large_tensors_are_estimated_within_their_standard_error(tmp_path):
    """Of 20 pairs of runs; both change small weights more often, and have more in common besides."""
    generator = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(500, 800, generator=generator), "b": torch.randn(300, 200, generator=generator)}
    n_pairs, errors = 20, []
    for pair in range(n_pairs):
        common = {name: torch.rand(w.shape, generator=generator) < 0.1 for name, w in start.items()}
        masks = [
            {
                name: common[name] | (torch.rand(w.shape, generator=generator) > w.abs() + 0.3)
                for name, w in start.items()
            }
            for _ in range(2)
        ]
        folder = tmp_path / str(pair)
        overlaps_with(folder, "first", masks[0], start)
        found = overlaps_with(folder, "second", masks[1], start)["first"]
        exact = sum(int((masks[0][name] & masks[1][name]).sum()) for name in start)
        assert found["n"] == sum(int(mask.sum()) for mask in masks[1].values())
        assert 0 < found["n_both_stderr"] < 0.1 * exact
        errors.append((found["n_both"] - exact) / found["n_both_stderr"])
    # The mean of 20 squares of standard normal numbers has the standard deviation sqrt(2 / 20) = 0.32.
    assert abs(sum(errors) / n_pairs) < 3 / n_pairs**0.5
    assert sum(error**2 for error in errors) / n_pairs == pytest.approx(1, abs=3 * 0.32)


def test_a_sample_is_small_and_the_same_everywhere(tmp_path):
    start = {"w": torch.zeros(1000, 1000), "norm": torch.zeros(10)}
    overlaps_with(tmp_path, "run", {name: w == 0 for name, w in start.items()}, start)
    # 1 % of a million positions and ten, in bits; 256 counts of 4 bytes for each tensor; and the header.
    assert (tmp_path / "run.safetensors").stat().st_size < 10_000 / 8 + 2 + 2 * 1024 + 400
    positions = positions_of({"w": (1000, 1000), "norm": (10,)})
    assert positions["norm"].tolist() == list(range(10)) and positions["w"].numel() == 10_000
    assert positions["w"][:5].tolist() == [93, 130, 200, 222, 289]


def test_closeness_to_a_dense_run(tmp_path):
    start = torch.zeros(4)
    for name, weights in (("start", start), ("final", torch.tensor([1.0, 2.0, 0.0, 0.0]))):
        (tmp_path / name).mkdir()
        save_file({"w": weights}, tmp_path / name / "model.safetensors")
    save_file({"w": torch.tensor([1.00005, 0.0, 0.0, 0.0])}, tmp_path / "dense.safetensors")
    found = closeness(tmp_path / "start", tmp_path / "dense.safetensors", tmp_path / "final", "cpu")
    assert (found["within_1e-5"], found["within_1e-4"]) == (0.0, 1.0)
    assert found["distance"] == pytest.approx(2, rel=1e-3) and found["cosine"] == pytest.approx(5**-0.5, rel=1e-3)
