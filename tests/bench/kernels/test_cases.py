"""The checks before every timed result pass right results and find wrong ones."""

import itertools
import re
from pathlib import Path

import pytest
import sanitize_ops
import torch

from sparse_opt import backends
from sparse_opt.bench.kernels import cases
from sparse_opt.bench.kernels.cases import WrongResult, check
from sparse_opt.ops import STEP_OPS

SHAPES = {"matrix": (17, 33), "vector": (70,), "empty": (0,), "one": (1,)}


def case_of(op: str, density: float = 0.3, dtype: torch.dtype = torch.bfloat16, **options: bool) -> cases.Case:
    return cases.random_case(op, SHAPES, dtype, density, torch.Generator().manual_seed(0), **options)


@pytest.mark.parametrize("backend", backends.available("cpu"))
@pytest.mark.parametrize("op", backends.OPS)
def test_every_op_agrees_with_the_reference(op, backend):
    for density in (0.0, 0.3, 1.0):
        check(case_of(op, density), backend)
    if op in STEP_OPS:
        check(case_of(op, dense_grads=False), backend)


def test_random_active_elements_are_sorted_unique_and_as_many_as_asked_for():
    dense = [torch.empty(100, 1000), torch.empty(0), torch.empty(5000)]
    active = cases.random_active(dense, 0.1, torch.Generator().manual_seed(0))
    assert active.indices.dtype == torch.int32
    assert active.starts[0] == 0
    assert active.starts[1:] == active.ends[:-1]
    assert active.ends[-1] == active.nnz
    for tensor, start, end in zip(dense, active.starts, active.ends, strict=True):
        segment = active.indices[start:end]
        assert torch.equal(segment, segment.unique())
        assert end == start or 0 <= segment[0] <= segment[-1] < tensor.numel()
    # Binomial: five standard deviations.
    assert active.nnz == pytest.approx(10_500, abs=5 * (105_000 * 0.1 * 0.9) ** 0.5)


def spoil(monkeypatch: pytest.MonkeyPatch, op: str, spoiled) -> None:
    """Let the op on any backend but the reference end with ``spoiled``, whose tuple, if any, replaces the result."""
    true_op = getattr(cases.ops, op)

    def run(*args, backend, **kwargs):
        result = true_op(*args, backend="reference", **kwargs)
        changed = None if backend == "reference" else spoiled(result, *args, **kwargs)
        return changed if isinstance(changed, tuple) else result

    monkeypatch.setattr(cases.ops, op, run)


def flip(tensor: torch.Tensor, at: int) -> None:
    tensor.view(-1).view(torch.int16)[at] ^= 1


def test_one_wrong_bit_outside_the_mask_is_found(monkeypatch):
    case = case_of("indexed_swap_")
    of_first = slice(case.arguments["starts"][0], case.arguments["ends"][0])
    active = case.arguments["indices"][of_first].int() + case.arguments["index_bases"][0]
    outside = min(set(range(case.arguments["dense"][0].numel())) - set(active.tolist()))
    spoil(monkeypatch, "indexed_swap_", lambda result, dense, *rest, **options: flip(dense[0], outside))
    message = rf"indexed_swap_ on backend fast: dense\[0\]: 1 of 561 elements.* at {outside} "
    with pytest.raises(WrongResult, match=message):
        check(case, "fast")


def test_one_wrong_bit_of_a_moment_is_found(monkeypatch):
    case = case_of("indexed_adamw_")

    def spoiled(result, params, indices, starts, ends, exp_avg, exp_avg_sq, *rest, **kwargs):
        exp_avg_sq.view(torch.int32)[3] ^= 1

    spoil(monkeypatch, "indexed_adamw_", spoiled)
    with pytest.raises(WrongResult, match=r"exp_avg_sq\[0\]: 1 of"):
        check(case, "fast")


@pytest.mark.parametrize("value", [float("nan"), 1.001])
def test_an_unwritten_or_wrong_sum_is_found(monkeypatch, value):
    spoil(monkeypatch, "masked_grad_gather_", lambda result, *args, sum_sq, **kwargs: sum_sq.mul_(value))
    with pytest.raises(WrongResult, match=r"sum_sq\[0\]: found"):
        check(case_of("masked_grad_gather_"), "fast")


def test_a_missing_change_is_found(monkeypatch):
    spoil(monkeypatch, "delta_encode", lambda result, **arguments: (result[0][:-1], result[1][:-1], result[2]))
    with pytest.raises(WrongResult, match="indices is torch.int32 of shape"):
        check(case_of("delta_encode"), "fast")


def is_aligned(case: cases.Case) -> bool:
    return all(t.shape[1] % 8 == 0 for t in (*case.arguments["grad_outputs"], *case.arguments["inputs"]))


def cluster_rules() -> dict[int, list[tuple[int, float, int]]]:
    """Of tile_weight_grad.cu, by tile size: blocks, most tiles for each multiprocessor, least tokens, first match."""
    source = (Path(__file__).parents[3] / "csrc/tiles/tile_weight_grad.cu").read_text()
    found = {}
    for tile_size, rules in re.findall(r"constexpr SplitRule kRules(\d+)\[\] = \{(.*?)\};", source, re.DOTALL):
        rows = re.findall(r"\{(\d+), ([\d.]+), (\d+)\}", rules)
        found[int(tile_size)] = [(int(blocks), float(tiles), int(tokens)) for blocks, tiles, tokens in rows]
    return found


@pytest.mark.parametrize("multiprocessors", [114, 132])
def test_the_sanitized_clusters_are_of_every_size(multiprocessors, monkeypatch):
    """By the rules of the CUDA kernel, on H100 PCIe and H200; on a GPU the program queries the kernel."""
    rules, tokens, seen = cluster_rules(), sanitize_ops.CLUSTER_TOKENS, set()
    monkeypatch.setattr(sanitize_ops, "CLUSTER_TOKENS", 1)  # the operands take time to draw, and are not multiplied
    for dtype in sanitize_ops.DTYPES[:2]:
        for blocks, case in sanitize_ops.cluster_cases(dtype, multiprocessors):
            tile_size, tiles = case.arguments["tile_size"], len(case.arguments["tiles"]) / multiprocessors
            matching = [n for n, most, least in rules[tile_size] if tiles <= most and tokens >= least]
            assert matching[0] == blocks
            seen.add((tile_size, blocks, is_aligned(case)))
    assert seen == set(itertools.product((64, 128), (2, 3, 4, 8), (False, True)))


@pytest.mark.gpu
def test_a_gpu_takes_the_sanitized_clusters():
    if "cuda" not in backends.available(torch.device("cuda")):
        pytest.skip("needs backend cuda: the extension with code for this GPU")
    assert sanitize_ops.find_wrong_clusters(torch.device("cuda")) == []


def test_the_sanitized_set_runs_and_reports(monkeypatch, capsys):
    names = [name for name in backends.available("cpu") if name != "reference"]
    if not names:
        pytest.skip("needs a backend besides the reference: the extension, or TRITON_INTERPRET=1")
    assert sanitize_ops.main("cpu") == 0
    # tile_weight_grad_ runs twice, with aligned operands and with ragged ones; a step also with either form of known
    # weights, a sparse one of them with dense gradients and with compact ones.
    n_of_each_density = len(backends.OPS) + 1 + 2 * len(STEP_OPS)
    n_cases = len(sanitize_ops.DENSITIES) * n_of_each_density + 2 * len(STEP_OPS)
    n_calls = n_cases * len(sanitize_ops.DTYPES) * len(names)
    assert f"{n_calls} calls of {len(backends.OPS)} ops on {', '.join(names)}: 0 wrong" in capsys.readouterr().out

    spoil(monkeypatch, "indexed_swap_", lambda result, dense, *rest, **options: dense[0].zero_())
    assert sanitize_ops.main("cpu") == 1
