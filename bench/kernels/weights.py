"""Rows of the kernel table on a model's weights: every op, SparseAdamW as users call it, and the peers.

The tensors take gigabytes, so no data stays in a cache between calls.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_opt import MaskSet
from sparse_opt.errors import MaskError
from sparse_opt.ops import STEP_OPS

from ..harness import Work, passes
from ..shapes import Shapes, total_numel
from ..timing import Prepared
from . import bounds, cases
from .cases import Active
from .optimizers import (
    LR,
    SMALL_LR,
    Gradients,
    active_of,
    changed_share,
    check_base_weights,
    check_first_step,
    check_norm,
    index_itemsize,
    mask_of,
    parameters,
    sparse_adamw,
    step_again,
    step_traffic,
    swapped_share,
    torch_adamw,
)
from .recorder import TORCH, Recorder

# Of the masks of single elements; and the run and tile masks, and their density.
DENSITIES = (0.025, 0.1)
PATTERNS, PATTERN_DENSITY = ("run16", "run32", "tile64", "tile128"), 0.025
# So large that the clip coefficient is 1: a timed clip does all its work without changing the gradients.
NO_CLIP = 1e30
# After so many steps a swap at SMALL_LR exchanges few weights.
FEW_STEPS = 10
# Names of works, and what follows them.
FUSED = "torch.optim.AdamW(fused=True).step"
STEP_DENSE, STEP_COMPACT = "SparseAdamW.step, dense gradients", "SparseAdamW.step, compact gradients"
SMALL = ", lr 1e-6"
KNOWN = ", compact weights"  # which are not read from the model
CLIP = "SparseAdamW.clip_grad_norm_"
BASE = "SparseAdamW.base_weights, in"
GATHER, SWAP, REPLACE = "masked_grad_gather_", "indexed_swap_", "indexed_replace_"
STEP_NAMES: dict[Gradients, str] = {"dense": STEP_DENSE, "compact": STEP_COMPACT}


class Masked(NamedTuple):
    """A mask over the weights, in both forms."""

    mask: MaskSet
    active: Active
    density: float


@dataclass
class WeightRows:
    """Times the works on weights and gradients of ``shapes``."""

    recorder: Recorder
    shapes: Shapes
    generator: torch.Generator
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.numel = total_numel(self.shapes)
        self.itemsize = self.dtype.itemsize
        self.params = cases.random_tensors(self.shapes, self.dtype, self.generator, scale=0.02)
        self.start = [param.clone() for param in self.params]
        self.grads = cases.random_tensors(self.shapes, self.dtype, self.generator, scale=1e-3)
        self.named_grads = self._named(self.grads)

    def run(self) -> None:
        """Time all rows."""
        for i, density in enumerate(DENSITIES):
            active = cases.random_active(self.params, density, self.generator)
            masked = Masked(mask_of(self._named(self.params), active), active, density)
            self._op_steps(masked)
            self._gather_and_swap(masked, [self._torch_clip()] if i == 0 else [])
            self._optimizers(masked, [self._fused_step()] if i == 0 else [])
            self.base_weights(masked)
            for compact_weights in (False, True):
                self.base_weights(masked, lr=SMALL_LR, n_steps=FEW_STEPS, compact_weights=compact_weights)
        for pattern in PATTERNS:
            self.step_under(pattern, "dense")

    def _op_steps(self, masked: Masked) -> None:
        active = cases.narrowed(masked.active)
        for op, kind in itertools.product(STEP_OPS, STEP_NAMES):
            self._restart()
            case = cases.step_case(op, self.params, self.grads, active, self.generator, dense_grads=kind == "dense")
            # Restart from the same weights: under a constant gradient they grow until a step no longer changes a bit.
            works = self.recorder.cases({f"{op}, {kind} gradients": case}, masked.density, self._restart)
            self.recorder.time(works)

    def _gather_and_swap(self, masked: Masked, others: Sequence[Work]) -> None:
        active, works_of = cases.narrowed(masked.active), self.recorder.cases
        self.recorder.time([*works_of({GATHER: cases.gather_case(self.grads, active)}, masked.density), *others])
        for name, make in ((SWAP, cases.swap_case), (REPLACE, cases.replace_case)):
            self.recorder.time(works_of({name: make(self.params, active, self.generator)}, masked.density))

    def _optimizers(self, masked: Masked, others: Sequence[Work]) -> None:
        """SparseAdamW as users call it, on the backend that `auto` selects."""
        works = []
        for kind, name in STEP_NAMES.items():
            works += self._step(name, masked, kind)
            works += self._step(name + SMALL, masked, kind, lr=SMALL_LR)
            works += self._step(name + SMALL + KNOWN, masked, kind, lr=SMALL_LR, compact_weights=True)
        self.recorder.time([*works, *others])

        optimizer = sparse_adamw(self._parameters(), self.named_grads, masked.mask, "compact")
        check = functools.partial(check_norm, optimizer, self.named_grads, masked.active)
        clip, backend = functools.partial(optimizer.clip_grad_norm_, NO_CLIP), self.recorder.auto()
        self.recorder.time([self.recorder.work(CLIP, backend, masked.density, clip, check=check)])

    def _step(
        self,
        name: str,
        masked: Masked,
        kind: Gradients,
        *,
        backend: str | None = None,
        lr: float = LR,
        compact_weights: bool = False,
    ) -> list[Work]:
        """The step of one SparseAdamW, if its first step is correct."""
        self._restart()
        named, mask = self._parameters(), masked.mask
        grads = self.named_grads
        optimizer = sparse_adamw(named, grads, mask, kind, backend, lr=lr, compact_weights=compact_weights)
        first_step = functools.partial(check_first_step, optimizer, named, grads, masked.active)
        if not passes(self.recorder.run, name, first_step):
            return []
        changed = changed_share(optimizer, named, mask.nnz)

        def prepare() -> None:
            # The optimizers of all rows write the same weights in turns: without a restart, those that step at LR would
            # make them so large that a step at SMALL_LR changes no bit.
            self._restart()
            if compact_weights:
                optimizer.sync_weights()

        traffic = step_traffic(optimizer, param_itemsize=self.itemsize, dense_grads=kind == "dense", changed=changed)
        call = Prepared(prepare, functools.partial(step_again, optimizer))
        peers = {"fused AdamW": {"work": FUSED, "backend": TORCH, "density": None}}
        backend = backend or self.recorder.auto()
        return [self.recorder.work(name, backend, masked.density, call, traffic, peers=peers)]

    def base_weights(self, masked: Masked, *, lr: float = LR, n_steps: int = 1, compact_weights: bool = False) -> None:
        """The swap to the base weights, after `n_steps` steps at this learning rate; the one back takes as long."""
        self._restart()
        named, mask = self._parameters(), masked.mask
        optimizer = sparse_adamw(
            named, self.named_grads, mask, "dense", keep_base_weights=True, lr=lr, compact_weights=compact_weights
        )
        if not passes(self.recorder.run, BASE, functools.partial(check_base_weights, optimizer, named)):
            return
        for _ in range(n_steps - 1):
            step_again(optimizer)
        changed = swapped_share(optimizer, named, mask.nnz)
        traffic_of, size = bounds.replace_traffic if compact_weights else bounds.swap_traffic, index_itemsize(optimizer)
        traffic = traffic_of(mask.numel, mask.nnz, itemsize=self.itemsize, index_itemsize=size, changed=changed)
        name = BASE + (SMALL if lr == SMALL_LR else "") + (KNOWN if compact_weights else "")
        with contextlib.ExitStack() as inside:
            call = Prepared(inside.close, lambda: inside.enter_context(optimizer.base_weights()))
            self.recorder.time([self.recorder.work(name, self.recorder.auto(), masked.density, call, traffic)])

    def step_under(self, pattern: str, kind: Gradients) -> None:
        """The step under a random mask of the pattern."""
        name = f"{STEP_NAMES[kind]}, {pattern}"
        try:
            seed = self.generator.initial_seed()
            mask = MaskSet.random(self.shapes, density=PATTERN_DENSITY, pattern=pattern, seed=seed)
        except MaskError as error:  # these small matrices have no unit
            self.recorder.run.note(f"not timed: {name}: {error}")
            return
        masked = Masked(mask, active_of(mask, self.recorder.device), PATTERN_DENSITY)
        works = []
        for backend in self.recorder.backends:
            works += self._step(name, masked, kind, backend=backend)
        self.recorder.time(works)

    # Peers

    def _torch_clip(self) -> Work:
        named = self._parameters()
        for param, grad in zip(named.values(), self.grads, strict=True):
            param.grad = grad
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(named.values()), NO_CLIP)
        # Gradients are read for the norm, then read and written for scaling.
        traffic = bounds.Traffic(3.0 * self.numel * self.itemsize)
        return self.recorder.work("torch.nn.utils.clip_grad_norm_", TORCH, None, clip, traffic)

    def _fused_step(self) -> Work:
        step = torch_adamw(self._parameters(), self.named_grads).step
        # The gradient is read; the parameter and both moments, of its dtype, are read and written.
        traffic = bounds.Traffic(7.0 * self.numel * self.itemsize)
        return self.recorder.work(FUSED, TORCH, None, step, traffic)

    def _restart(self) -> None:
        """Restore the initial weights: after many steps they are so large that a small step changes no bit."""
        for param, start in zip(self.params, self.start, strict=True):
            param.copy_(start)

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return parameters(self._named(self.params))

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.shapes, tensors, strict=True))
