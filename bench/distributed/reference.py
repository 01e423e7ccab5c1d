"""The update that one device makes on the global batch, and how far a variant's is from it.

On one device, the pairs of all ranks are micro-batches of one step, whose gradients add up in the compact buffer. Both
runs compute the same gradients of each pair, because they run the same kernels on the same weights, and deterministic
ones are required. They add the gradients in different orders and dtypes; the tolerances follow from these roundings.

- First moments. Each of the W ranks' values is rounded to the gradient's dtype, and so is each of W - 1 sums and the
  stored moment, each by at most u of the largest intermediate value (u = 2^-24 in fp32, 2^-9 in bf16). The intermediate
  values are at most the sum of the ranks' absolute values, whose norm is at most sqrt(W) times that of the sum if the
  gradients of different pairs are uncorrelated. The norm of the error is therefore at most (2 W) sqrt(W) u of the
  norm of the moments, for each of the two runs.
- Updates. AdamW's first update of an element is +-lr, with the sign of the gradient: it differs where the error of the
  gradient e, in units of the ranks' absolute values, is larger than the gradient itself, which has a probability of
  about e. A wrong sign is an error of 2 lr, so the norm of the error is at most sqrt(4 e) of the norm of the update.
  Gradients that are not communicated have wrong signs at a quarter or more of the elements: an error of 1 or more.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparse_opt import MaskSet

from .variants import Training

# Of the checked step: about eight units in the last place of the random weights, so that every update is visible.
CHECK_LR = 1e-3


@dataclass
class Reference:
    """Weights before and after one step on one device, and its first moments, at the active elements; all fp32."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    moments: dict[str, Tensor]

    @classmethod
    def of(cls, training: Training, mask: MaskSet, pairs: list[Tensor]) -> Reference:
        """Make the first step of a `local` training on the mean of the pairs' losses."""
        before = {
            name: p.detach().flatten()[mask[name].to(p.device, torch.int64)].float()
            for name, p in training.model.named_parameters()
            if name in mask and mask[name].numel()
        }
        # The sum of the losses has the ranks' gradients bit by bit, and AdamW's update is the same for any multiple of
        # the gradient and of eps.
        for group in training.optimizer.param_groups:
            group["eps"] *= len(pairs)
        first_step(training, pairs)
        values = list(training.active_values(mask))
        after = {name: weights for name, _, weights, _ in values}
        return cls(before, after, {name: moments / len(pairs) for name, _, _, moments in values})

    def check(self, training: Training, mask: MaskSet) -> dict[str, Any]:
        """The errors of a variant that has made its first step, their tolerances, and whether they are met.

        Sums run over what all ranks hold; a collective.
        """
        names = list(self.before)
        # Of each parameter the sums of squares: error of moments, moments, error of updates, updates.
        squares = torch.zeros(len(names), 4, dtype=torch.float64, device=self.before[names[0]].device)
        for name, slots, weights, moments in training.active_values(mask):
            expected, after = self.moments[name][slots], self.after[name][slots]
            parts = (moments - expected, expected, weights - after, after - self.before[name][slots])
            squares[names.index(name)] = torch.stack([part.double().square().sum() for part in parts])
        dist.all_reduce(squares)
        n = dist.get_world_size()
        u = 2.0**-24 if training.variant.grad_dtype == "fp32" else 2.0**-9  # dense gradients and moments are bf16
        found = compared(squares.sum(0), 2 * (2 * n) * n**0.5 * u)
        return {**found, "worst_parameter": names[int(squares[:, 0].argmax())]}


def compared(squares: Tensor, tolerance: float) -> dict[str, Any]:
    """The errors of first moments and updates, their tolerances (see above), and whether they are met.

    Args:
        squares: of all ranks the sums of squares: error of moments, moments, error of updates, updates.
        tolerance: of the moments.
    """
    moment_error, moment, update_error, update = squares.sqrt().tolist()
    found = {
        "moment_error": moment_error / moment,
        "moment_tolerance": tolerance,
        "update_error": update_error / update,
        "update_tolerance": (4 * tolerance) ** 0.5,
    }
    met = found["moment_error"] <= found["moment_tolerance"] and found["update_error"] <= found["update_tolerance"]
    return {**found, "met": met}


def wrong_line(check: Mapping[str, Any]) -> str:
    """The error of an update that is not that of one device."""
    return (
        f"first moments are off by {check['moment_error']:.2e}, expected at most {check['moment_tolerance']:.2e}; "
        f"updates by {check['update_error']:.2e}, expected at most {check['update_tolerance']:.2e}; most of "
        f"the former is in {check['worst_parameter']}"
    )


def first_step(training: Training, pairs: list[Tensor]) -> None:
    """A step at CHECK_LR with deterministic kernels.

    It does without torch.compile, which makes kernels for dense layers that round in another way than those for sparse
    ones.
    """
    training.set_lr(CHECK_LR)
    with _deterministic(), torch.compiler.set_stance("force_eager"):
        training.step(pairs)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic kernels where torch has them, without a warning where it has none.

    The fused attention kernels are not deterministic (flash attention is, but not with warn_only): one bit that differs
    in a query's gradient changes the gradients of all earlier layers.
    """
    with warnings.catch_warnings(), sdpa_kernel([SDPBackend.MATH]):
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
