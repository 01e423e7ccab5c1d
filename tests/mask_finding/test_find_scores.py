"""Scores of a log's methods against their formulas in numpy, the steps that each reads, and the masks of magnitudes."""

import json
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.delta.state import StateLayout, TensorSpec
from sparse_opt.errors import DeltaLogError, MaskError
from sparse_opt.mask_finding import log_scores as mask_scores
from sparse_opt.mask_finding.find import find_from_log
from sparse_opt.mask_finding.log_scores import LOG_METHODS, LogScores, plan_scores
from sparse_opt.masks.parameters import select_names

State = dict[str, Tensor]
SHAPES = {"model.layers.0.mlp.up": (31, 40), "model.layers.0.norm": (40,), "scalar": (), "none": (0, 3)}
STEPS = (0, 2, 5, 6, 9, 10)


class MemoryLog:
    """A log of states that is no DeltaLog, and hands out one tensor that it overwrites."""

    directory = Path("memory")

    def __init__(self, states: dict[int, State]) -> None:
        self.states = states
        self.metadata: dict[str, str] = {}
        first = next(iter(states.values()))
        specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in first.items()]
        self.layout = StateLayout(tuple(specs), {}, frozenset())

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.states)

    def digest(self, step: int) -> str:
        return f"{step:032x}"

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        assert list(steps) == sorted(set(steps))
        shared = torch.empty_like(self.states[0][name])
        for step in steps:
            yield step, shared.copy_(self.states[step][name])
            shared.fill_(123)


def training(dtype: torch.dtype, steps: Sequence[int] = STEPS, share: float = 0.4) -> dict[int, State]:
    generator = torch.Generator().manual_seed(7)
    state = {n: (0.02 * torch.randn(s, generator=generator)).to(dtype) for n, s in SHAPES.items()}
    states = {steps[0]: state}
    for step in steps[1:]:
        moved = {n: torch.rand(s, generator=generator) < share for n, s in SHAPES.items()}
        noise = {n: 1e-4 * (0.5 + torch.randn(s, generator=generator)) for n, s in SHAPES.items()}
        state = {n: torch.where(moved[n], (t.double() + noise[n]).to(dtype), t) for n, t in state.items()}
        states[step] = state
    return states


def numpy_score(states: dict[int, State], name: str, method: str, upto: int, window: int | None) -> np.ndarray:
    """The formulas of `mask_finding.log_scores`, in float64 over all states at once."""
    steps = [step for step in states if step <= upto]
    weights = np.stack([states[step][name].double().numpy() for step in steps])
    deltas = weights[1:] - weights[0]
    if method in ("magnitude", "oracle"):
        return np.abs(deltas[-1])
    if method == "fisher":
        return np.var(deltas, axis=0, ddof=1) + np.abs(np.mean(deltas, axis=0))
    velocities = np.diff(weights, axis=0)
    velocities = velocities if window is None else velocities[-window:]
    mean, deviation = np.mean(velocities, axis=0), np.std(velocities, axis=0, ddof=1) + 1e-8
    return np.abs(mean) * (1 + np.abs(mean) / deviation)


def scores_of(log: MemoryLog, device: torch.device, **arguments: object) -> tuple[LogScores, mask_scores.ScorePlan]:
    plan = plan_scores(log, **arguments)  # type: ignore[arg-type]
    return LogScores(log, plan, {spec.name: spec for spec in log.layout.tensors}, device), plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("method", "step", "window"),
    [
        ("magnitude", 6, None),
        ("oracle", 10, None),
        ("fisher", 10, None),
        ("fisher", 5, None),
        ("momentum", 10, None),
        ("momentum", 9, 2),
        ("momentum", 10, 3),
    ],
)
def test_scores_are_those_of_the_formulas(
    method: str, step: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    states = training(dtype)
    scores, plan = scores_of(MemoryLog(states), device, method=method, target_step=step, momentum_window=window)
    assert plan.step == step
    for name, shape in SHAPES.items():
        expected = numpy_score(states, name, method, step, window)
        found = scores.bits(name).cpu().view(torch.float32).numpy().reshape(shape)
        # One rounding to float32, and the error of variances in float64: sums of squares differ by 1e-15 of v^2, and
        # s + 1e-8 with it by 1e-15 v^2 / 1e-8 at the most.
        np.testing.assert_allclose(found, expected, rtol=2**-23, atol=0)
        assert ((found == 0) == (expected == 0)).all()


def test_steady_changes_score_by_the_epsilon_alone() -> None:
    """Velocities that are all the same have no deviation: the score is abs(m) (1 + abs(m) / 1e-8)."""
    states = {step: {"w": torch.tensor([0.25, 2.0]) * step} for step in range(5)}
    scores, _ = scores_of(MemoryLog(states), torch.device("cpu"), method="momentum")
    found = scores.bits("w").view(torch.float32)
    assert found.tolist() == pytest.approx([0.25 * (1 + 0.25e8), 2.0 * (1 + 2e8)], rel=2**-23)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", LOG_METHODS)
def test_a_gpu_gives_the_same_bits_and_the_same_mask(method: str, dtype: torch.dtype) -> None:
    log = MemoryLog(training(dtype, steps=tuple(range(30))))
    here, _ = scores_of(log, torch.device("cpu"), method=method)
    there, _ = scores_of(log, torch.device("cuda"), method=method)
    for name in SHAPES:
        assert torch.equal(here.bits(name), there.bits(name).cpu())
    # One unit fits: the matrix is smaller than a tile, and no more than 640 of its 641 elements are expected.
    for pattern, sparsity in (("element", 50), ("run16", 50), ("tile64", 1)):
        masks = [
            find_from_log(log, method=method, sparsity=sparsity, pattern=pattern, min_tensor_keep=0, device=device).mask  # type: ignore[arg-type]
            for device in ("cpu", "cuda")
        ]
        assert masks[0].digest == masks[1].digest


def test_counting_in_chunks_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog(training(torch.float32))
    for method in LOG_METHODS:
        scores, _ = scores_of(log, torch.device("cpu"), method=method)
        whole = {name: scores.bits(name) for name in SHAPES}
        with monkeypatch.context() as patched:
            patched.setattr(mask_scores, "_CHUNK", 17)
            assert all(torch.equal(scores.bits(name), bits) for name, bits in whole.items())


@pytest.mark.parametrize("method", ["momentum", "fisher"])
def test_weights_that_became_infinite_have_no_variance(method: str, device: torch.device) -> None:
    states = {step: {"w": torch.tensor([0.0, step, math.inf if step else 0.0])} for step in range(4)}
    with pytest.raises(MaskError, match=f"the {method} score of w is NaN at 1 of 3 elements"):
        find_from_log(MemoryLog(states), method=method, sparsity=50, min_tensor_keep=0, device=device)  # type: ignore[arg-type]


# Steps


def test_steps_that_each_method_reads() -> None:
    log = MemoryLog(training(torch.float32))

    def steps(**arguments: object) -> tuple[int, ...]:
        return plan_scores(log, **arguments).steps  # type: ignore[arg-type]

    assert steps(method="magnitude") == (0, 10)
    assert steps(method="magnitude", target_step=5) == (0, 5)
    assert steps(method="oracle", target_step=10) == (0, 10)
    assert steps(method="fisher", target_step=9) == (0, 2, 5, 6, 9)
    # A window of w velocities takes the state before the first of them too.
    assert steps(method="momentum", target_step=9, momentum_window=2) == (5, 6, 9)
    assert steps(method="momentum", momentum_window=5) == STEPS
    assert steps(method="momentum") == STEPS
    assert plan_scores(log, "momentum", momentum_window=3).window == 3
    many = MemoryLog({step: {"w": torch.zeros(1)} for step in range(40)})
    assert plan_scores(many, "momentum").steps == tuple(range(14, 40))
    assert plan_scores(many, "momentum", target_step=25).window == 25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "momentum", "momentum_window": 6}, "window 6 needs 6 logged steps after the first, .* there are 5"),
        (
            {"method": "momentum", "target_step": 2},
            "window 2 needs 2 logged .* step 2 there is 1: log more steps, as with --delta_log_steps every:1",
        ),
        ({"method": "momentum", "momentum_window": 1}, "momentum_window is 1, expected 2 or more velocities"),
        ({"method": "oracle", "target_step": 9}, "target_step is 9, expected 10 for oracle, which scores"),
        ({"method": "snip"}, "method is 'snip', expected one of magnitude, momentum, fisher, oracle"),
    ],
)
def test_too_few_steps_and_wrong_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(MaskError, match=message):
        find_from_log(MemoryLog(training(torch.float32)), sparsity=50, **arguments)  # type: ignore[arg-type]


# Whole masks


@pytest.mark.parametrize("method", LOG_METHODS)
def test_delta_log_and_memory_give_the_mask_of_the_sorted_formula(tmp_path: Path, method: str) -> None:
    states = training(torch.bfloat16)
    with DeltaLog.create(tmp_path / "log", states[0], metadata={"model": "tiny"}) as log:
        for step in STEPS[1:]:
            log.append(step, states[step])
    masks = [
        find_from_log(source, method=method, sparsity=90, min_tensor_keep=0).mask  # type: ignore[arg-type]
        for source in (DeltaLog.open(tmp_path / "log"), MemoryLog(states))
    ]
    assert masks[0] == masks[1]
    assert masks[0].metadata["model"] == "tiny"
    expected = np.concatenate([numpy_score(states, n, method, 10, None).reshape(-1) for n in SHAPES]).astype(np.float32)
    order = np.argsort(-expected, kind="stable")[: masks[0].nnz]
    starts = dict(zip(SHAPES, np.cumsum([0, *(int(np.prod(s)) for s in SHAPES.values())]), strict=False))
    found = np.concatenate([masks[0][n].numpy() + starts[n] for n in SHAPES])
    assert np.array_equal(found, np.sort(order))


def test_metadata_says_how_a_mask_was_made() -> None:
    log = MemoryLog(training(torch.bfloat16))
    found = find_from_log(
        log, method="momentum", sparsity=50, momentum_window=3, target_step=9, pattern="run16", exclude=["*.norm"]
    )
    metadata = found.mask.metadata
    assert metadata["method"] == "momentum"
    assert (metadata["step"], metadata["base_step"], metadata["steps_read"]) == ("9", "2", "4")
    assert metadata["momentum_window"] == "3"
    assert (metadata["log_digest"], metadata["base_digest"]) == (log.digest(9), log.digest(2))
    assert json.loads(metadata["exclude"]) == ["*.norm"]
    assert "include" not in metadata
    assert found.mask.pattern == "run16"


def log_of(directory: Path, before: State, after: State, **metadata: str) -> DeltaLog:
    log = DeltaLog.create(directory, before, metadata=metadata)
    log.append(50, after)
    log.close()
    return log


def find_magnitude(log: DeltaLog, **options: Any) -> MaskSet:
    return find_from_log(log, **options).mask


def test_unchanged_elements_are_never_kept(tmp_path: Path) -> None:
    before = {"a": torch.zeros(100), "still": torch.zeros(100)}
    after = {"a": torch.zeros(100), "still": torch.zeros(100)}
    after["a"][[3, 97]] = torch.tensor([1.0, -2.0])
    # The bits of a zero changed, its value did not.
    after["still"][5] = -0.0
    log = log_of(tmp_path / "log", before, after)
    for pool in ("global", "tensor"):
        with pytest.warns(
            UserWarning, match=r"only 2 elements have a magnitude score above zero, 20 were requested: .* keeps 2"
        ):
            mask = find_magnitude(log, sparsity=90, min_tensor_keep=0.04, pool=pool)
        assert mask["a"].tolist() == [3, 97]
        assert mask["still"].tolist() == []
        assert mask.metadata["sparsity"] == "90.0"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_magnitude(log, sparsity=99.5, min_tensor_keep=0).nnz == 1


def test_a_step_without_changes_an_unknown_step_and_no_tensor_are_refused(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log", {"w": torch.zeros(300)}, {"w": torch.ones(300)})
    with pytest.raises(MaskError, match="no element of step 0 has changed since step 0: it is the first logged step"):
        find_magnitude(log, sparsity=90, target_step=0)
    with pytest.raises(MaskError, match="no tensor of .* is chosen"):
        find_magnitude(log, sparsity=90, include=["v*"])
    with pytest.raises(DeltaLogError, match="step 7 is not logged"):
        find_magnitude(log, sparsity=90, target_step=7)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mlp = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_parameters_take_part_and_buffers_do_not(tmp_path: Path) -> None:
    model = Block()
    with DeltaLog.create(tmp_path / "log", model) as log:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor += 3
            log.append(1)
    mask = find_magnitude(log, sparsity=50)
    assert mask.names == ("embed.weight", "mlp.weight", "mlp.bias", "norm.weight", "norm.bias")
    assert mask.resolve(model) == mask
    assert find_magnitude(log, sparsity=50, mlp_only=True).names == ("mlp.weight", "mlp.bias")


def test_select_names() -> None:
    names = [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "h.0.attn.weight",
        "mlpx.weight",
    ]
    names += ["decoder.fc1.bias", "x.block_sparse_moe.w1", "MLP.weight"]
    assert select_names(names) == names
    assert select_names(names, include=["model.*"], exclude=["*norm*"]) == names[:1]
    assert select_names(names, mlp_only=True) == [names[0], names[4], names[5]]
    assert select_names(names, include=["*.weight", "*.w1"], mlp_only=True) == [names[0], names[5]]
    assert select_names(names, include=[]) == []
