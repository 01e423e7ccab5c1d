"""LostUpdates: counts, in one early step, the updates of 16-bit weights that rounding discards, and warns once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from .buckets import Bucket

# By then Adam's updates have their usual size, and a run has cost little.
CHECKED_STEP = 10
# A sample of 1024 weights knows a share to 3 % (two standard deviations).
_MAX_PARAMS, _MAX_SLOTS = 16, 64


class LostUpdates:
    """The sampled active weights of 16-bit parameters, from before a step until their counts are on the host.

    The step does not wait for the device: a later one reads the counts when an event shows that they have arrived.

    Args:
        buckets: 16-bit parameters without master weights, on one device.
        has_gradient: for each bucket and each of its parameters, whether this step updates it.
        dense: whether the gradients are in `param.grad`.
    """

    def __init__(self, buckets: Sequence[Bucket], has_gradient: Sequence[Sequence[bool]], *, dense: bool) -> None:
        self._device, self._dtype = buckets[0].device, buckets[0].dtype
        self._event: torch.cuda.Event | None = None
        # (parameter, positions, values before the step, whether they have an update)
        self._samples: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        updated = [(b, i) for b, flags in zip(buckets, has_gradient, strict=True) for i, has in enumerate(flags) if has]
        for bucket, i in updated[:: -(-len(updated) // _MAX_PARAMS)]:
            param, start = bucket.params[i], bucket.starts[i]
            positions = bucket.positions(i, at_most=_MAX_SLOTS).long()
            if dense:
                grad = param.grad.reshape(-1)[positions]  # type: ignore[union-attr]  # it has one
            else:
                grad = bucket.local_grad()[start : start + positions.numel()]
            # A weight without a gradient, such as an unused row of an embedding, has no update that could be lost.
            self._samples.append((param, positions, param.view(-1)[positions], (grad != 0) & (bucket.lr != 0)))

    def count(self, found_inf: Tensor | None) -> None:
        """Count after the step; `found_inf` is not 0 if a GradScaler has skipped it."""
        lost = torch.cat([param.view(-1)[at] == before for param, at, before, _ in self._samples])
        updated = torch.cat([flags for *_, flags in self._samples])
        if found_inf is not None:
            updated = updated & (found_inf.to(self._device) == 0)
        counts = torch.stack([(lost & updated).sum(), updated.sum()])
        self._samples.clear()
        self._counts = counts.to("cpu", non_blocking=True)
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    def warn_if_counted(self) -> bool:
        """Return whether the counts have arrived; then warn if more than half of the updates were lost."""
        if self._event is not None and not self._event.query():
            return False
        lost, updated = self._counts.tolist()
        if 2 * lost > updated:
            warnings.warn(
                f"step {CHECKED_STEP} has changed {updated - lost} of {updated} sampled {self._dtype} weights: "
                f"{lost / updated:.0%} of the updates are below half a unit in the last place, and are lost; pass "
                "stochastic_rounding=True or master_weights=True",
                stacklevel=6,  # the caller of `step`, which torch wraps twice
            )
        return True
