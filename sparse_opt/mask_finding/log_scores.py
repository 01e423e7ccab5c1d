"""Scores of elements from a log of states, by the size, direction or variance of each weight's changes in training.

With delta_i = W_i - W_0, W_0 the first logged state, v_i = W_i - W_{i-1} for consecutive logged states, and t the
target step:

| method | score |
|---|---|
| magnitude | abs(delta_t) |
| momentum, window w | abs(m) * (1 + abs(m) / s), m = mean(v), s = std(v) + 1e-8, v of the last w logged steps up to t |
| fisher | Var(delta) + abs(mean(delta)) over the logged steps up to t, without W_0 |
| oracle | abs(delta) at the last logged step |

Variances divide by one less than the number of values. `fisher` is a proxy for use without gradients; the diagonal
Fisher itself is fisher_gradient in `mask_finding.model_scores`.

magnitude and oracle subtract in float32 (float64 weights in float64), the others in float64 throughout; scores are
rounded to float32 at the end. All operations are elementwise, with one rounding each: CPU and GPU give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..delta.state import TensorSpec
from ..delta.state_log import StateLog, require_logged
from ..errors import MaskError
from .topk import positions

LogMethod = Literal["magnitude", "momentum", "fisher", "oracle"]
LOG_METHODS: tuple[LogMethod, ...] = ("magnitude", "momentum", "fisher", "oracle")
# Default window of momentum, if as many velocities are logged.
DEFAULT_WINDOW = 25

# Elements processed at a time, which bounds the scratch memory to some 100 MB.
_CHUNK = 2**22
_EPSILON = 1e-8


@dataclass(frozen=True)
class ScorePlan:
    """The states that a score is computed from: ascending logged steps.

    momentum takes each state's difference to the one before it; all other methods take it to the first one.
    """

    method: LogMethod
    steps: tuple[int, ...]

    @property
    def step(self) -> int:
        """The target step."""
        return self.steps[-1]

    @property
    def window(self) -> int | None:
        """Number of velocities of a momentum score, None for the other methods."""
        return len(self.steps) - 1 if self.method == "momentum" else None


def plan_scores(
    log: StateLog, method: LogMethod, *, target_step: int | None = None, momentum_window: int | None = None
) -> ScorePlan:
    """Determine which steps of a log a method reads.

    Args:
        target_step: t, a logged step; the last one by default. oracle takes the last one only.
        momentum_window: w, 2 or more; by default 25, or all velocities up to t if fewer are logged.

    Raises:
        MaskError: an argument is out of range, or the method needs more logged steps than there are.
        DeltaLogError: the target step is not logged.
    """
    if method not in LOG_METHODS:
        raise MaskError(f"method is {method!r}, expected one of {', '.join(LOG_METHODS)}")
    if momentum_window is not None and method != "momentum":
        raise MaskError(f"momentum_window is {momentum_window}, expected None for the method {method}")
    if momentum_window is not None and momentum_window < 2:
        raise MaskError(f"momentum_window is {momentum_window}, expected 2 or more velocities")
    logged = log.steps
    step = logged[-1] if target_step is None else target_step
    require_logged(log.directory, step, logged)
    if method == "oracle" and step != logged[-1]:
        raise MaskError(f"target_step is {step}, expected {logged[-1]} for oracle, which scores the last logged step")
    upto = logged[: logged.index(step) + 1]
    after = len(upto) - 1
    if after == 0:
        raise MaskError(
            f"{log.directory}: no element of step {step} has changed since step {logged[0]}: it is the first logged "
            "step, expected a later one"
        )
    if method in ("magnitude", "oracle"):
        return ScorePlan(method, (upto[0], step))
    if method == "fisher":
        if after < 2:
            raise MaskError(_too_few(log, method, 2, after, step))
        return ScorePlan(method, upto)
    window = min(DEFAULT_WINDOW, max(2, after)) if momentum_window is None else momentum_window
    if after < window:
        raise MaskError(_too_few(log, f"momentum with window {window}", window, after, step))
    return ScorePlan(method, upto[-window - 1 :])


def _too_few(log: StateLog, what: str, needed: int, found: int, step: int) -> str:
    return (
        f"{log.directory}: {what} needs {needed} logged steps after the first, step {log.steps[0]}; "
        f"up to step {step} there {'is' if found == 1 else 'are'} {found}: log more steps, as with --delta_log_steps "
        "every:1, or choose the method magnitude"
    )


class LogScores:
    """Computes the scores of a log's tensors by one plan, one tensor at a time, on each request.

    Holds one tensor's statistics: the score, 4 bytes per element; two states; for momentum and fisher, two sums of 8
    bytes per element.

    Args:
        specs: the tensors to score.
        device: where the scores are computed and returned.
    """

    def __init__(self, log: StateLog, plan: ScorePlan, specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        self._log, self._plan, self._device = log, plan, device
        self.shapes: dict[str, tuple[int, ...]] = {name: spec.shape for name, spec in specs.items()}
        self.score_name = f"{plan.method} score"

    def bits(self, name: str) -> Tensor:
        """Return the bits of one tensor's float32 scores: [numel] int32."""
        plan = self._plan
        before: Tensor | None = None
        moments: _Moments | None = None
        bits = torch.empty(0, dtype=torch.int32, device=self._device)
        for _, state in self._log.tensor_states(name, plan.steps):
            after = state.reshape(-1)
            if before is None:
                # Copied: a state is valid only until the next one is requested.
                before = after.to(self._device, copy=True)
            elif plan.method in ("magnitude", "oracle"):
                bits = change_bits(before, after)
            else:
                if moments is None:
                    moments = _Moments(after.numel(), self._device)
                moments.add(before, after)
                if plan.method == "momentum":
                    before.copy_(after)
        if moments is None:
            return bits
        return moments.score_bits(_momentum if plan.method == "momentum" else _fisher)


def change_bits(before: Tensor, after: Tensor) -> Tensor:
    """Return the bits of float32 abs(after - before) of two flat tensors: [numel] int32, on the device of `before`.

    float64 is subtracted in float64, since its change may be lost in float32; all other dtypes are exact in float32. A
    NaN score has bits above those of infinity, 0x7F800000.
    """
    wide = torch.float64 if after.dtype == torch.float64 else torch.float32
    bits = torch.empty(after.numel(), dtype=torch.int32, device=before.device)
    for out, old, new in zip(*(t.split(_CHUNK) for t in (bits, before, after)), strict=True):
        out.view(torch.float32).copy_((new.to(before.device).to(wide) - old.to(wide)).abs_())
    return bits


class _Moments:
    """Sum and sum of squares of differences of states, in float64."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._sum = torch.zeros(numel, dtype=torch.float64, device=device)
        self._squares = torch.zeros(numel, dtype=torch.float64, device=device)
        self._n = 0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Add the differences of two flat states; `before` is on the moments' device."""
        self._n += 1
        for total, squares, old, new in zip(
            *(t.split(_CHUNK) for t in (self._sum, self._squares, before, after)), strict=True
        ):
            new = new.to(old.device)
            # Most elements do not change in a step, and adding their zeros would have no effect.
            at = positions(new != old)
            change = new[at].double() - old[at].double()
            total.index_add_(0, at, change)
            # A multiplication and an addition, each rounded: a fused operation would give other bits.
            squares.index_add_(0, at, change * change)

    def score_bits(self, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the bits of the float32 scores: `score` of mean and variance."""
        bits = torch.zeros(self._sum.numel(), dtype=torch.int32, device=self._sum.device)
        # Multiplied by the reciprocal, as GPUs divide by a scalar, so that CPUs give the same bits.
        per_value, per_freedom = 1.0 / self._n, 1.0 / (self._n - 1)
        for out, totals, all_squares in zip(*(t.split(_CHUNK) for t in (bits, self._sum, self._squares)), strict=True):
            # The score of an element that never changed is zero.
            at = positions(all_squares != 0)
            total, squares = totals[at], all_squares[at]
            mean = total * per_value
            variance = ((squares - total * mean) * per_freedom).clamp_(min=0.0)
            out.view(torch.float32)[at] = score(mean, variance).float()
        return bits


def _fisher(mean: Tensor, variance: Tensor) -> Tensor:
    return variance + mean.abs()


def _momentum(mean: Tensor, variance: Tensor) -> Tensor:
    size = mean.abs()
    return size * (1.0 + size / (variance.sqrt_() + _EPSILON))
