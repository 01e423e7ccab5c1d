"""Checks that all ranks of a process group agree: on parameters, mask and options, on bits, and on the steps they made.

The first two are compared when an optimizer is built or loaded. Steps are compared by a few numbers that are averaged
with every reduction: each rank writes its numbers into its own row behind the gradients, and zeros into the others.
They are sent as integers below 64, which are still different in bf16 when they are divided by the number of ranks.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ...delta.digest import StateDigest
from ...masks.mask_set import MaskSet
from ..buckets import Bucket
from .group import require_same
from .sharding import Shard

# The arguments of an optimizer that must be the same on all ranks.
_ARGUMENTS = (
    "max_grad_norm",
    "state_dtype",
    "grad_dtype",
    "master_weights",
    "stochastic_rounding",
    "freeze_inactive",
    "keep_base_weights",
    "amp_scaling",
    "tile_backward",
)
MAX_STEPS = 2**24  # where a count in fp32 stops
_BITS, _DIGITS = 6, 4  # each number has 24 bits


def require_same_setup(optimizer: torch.optim.Optimizer, mask: MaskSet, group: dist.ProcessGroup) -> None:
    """Raise a RuntimeError unless all ranks have the same optimizer, options, parameters and mask."""
    entries: list[tuple[str, object]] = [("the optimizer", type(optimizer).__name__)]
    entries += [(name, str(getattr(optimizer, name))) for name in _ARGUMENTS]
    entries += _options(optimizer)
    for options in optimizer.param_groups:
        for name, param in zip(options["param_names"], options["params"], strict=False):
            entries.append((f"parameter {name!r}", f"{param.dtype} {list(param.shape)}"))
    entries.append(("the mask", f"{mask.pattern} {mask.digest}"))
    require_same(entries, group, optimizer.param_groups[0]["params"][0].device)


def _options(optimizer: torch.optim.Optimizer) -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for i, options in enumerate(optimizer.param_groups):
        for name in optimizer.defaults:
            value = options[name]
            entries.append((f"{name} of parameter group {i}", value.item() if isinstance(value, Tensor) else value))
    return entries


def require_same_weights(
    shards: Mapping[Parameter, Shard], named: Mapping[str, Parameter], group: dist.ProcessGroup
) -> None:
    """Raise a RuntimeError unless the ranks that store the same part of a weight have the same bits."""
    of_name = {name: shards[param] for name, param in named.items()}
    tensors = [(f"parameter {name!r}", shard.local.detach(), shard.number) for name, shard in of_name.items()]
    _require_same_bits(tensors, group, tensors[0][1].device)


def require_same_state(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
    """Raise a RuntimeError unless all ranks have the same options and optimizer state, bit for bit."""
    require_same(_options(optimizer), group, buckets[0].device)
    tensors = []
    for bucket in buckets:
        for i, name in enumerate(bucket.names):
            number = bucket.shards[i].number
            tensors += [(f"{key} of {name!r}", value, number) for key, value in bucket.parameter_state(i).items()]
    _require_same_bits(tensors, group, buckets[0].device)


def require_same_saved_state(
    states: Mapping[Parameter, Mapping[str, Tensor]],
    names: Mapping[Parameter, str],
    shards: Mapping[Parameter, Shard],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise a RuntimeError unless all ranks are about to load the same states of parameters, bit for bit."""
    tensors = [
        (f"{key} of {names[param]!r} in the saved state", value, shards[param].number)
        for param, state in states.items()
        for key, value in state.items()
        if key != "indices"  # those of the mask, which was compared
    ]
    _require_same_bits(tensors, group, device)


def _require_same_bits(
    tensors: Sequence[tuple[str, Tensor, int]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Compare (name, tensor, number of its shard); ranks with the same number must have the same bits."""
    digests = StateDigest.start([tensor for _, tensor, _ in tensors]).result()
    entries = [(name, f"digest {digest}") for (name, _, _), digest in zip(tensors, digests, strict=True)]
    require_same(entries, group, device, parts=[number for _, _, number in tensors])


class StepHistory:
    """How many steps this rank has made, and with which options and clipping."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, n_steps: int) -> None:
        """Continue from a state of `n_steps` steps; all ranks have loaded the same one."""
        self.n_steps = n_steps  # those that a GradScaler skips are counted
        self.last: list[bytes] = []  # what the last step has added to the checksum
        self._checksum, self._added = 0, self.last

    def require_countable(self) -> None:
        """Raise a RuntimeError if the counts of the steps, which are fp32, cannot be incremented any more."""
        if self.n_steps >= MAX_STEPS:
            raise RuntimeError(
                f"step: {self.n_steps} steps were made, and step counts are fp32: the next one would repeat the "
                "random bits of stochastic rounding; build a new optimizer with another seed"
            )

    def add_clipping(self, max_norm: float) -> None:
        self._add(struct.pack("d", max_norm))

    def add_options(self, groups: Iterable[Mapping[str, Any]], names: Collection[str]) -> None:
        """Add the options `names` of all parameter groups.

        A learning rate that is a tensor on a device is left out: reading it would wait for the device.
        """
        for group in groups:
            values = [group[name] for name in names if not (isinstance(group[name], Tensor) and not group[name].is_cpu)]
            floats = [float(n) for value in values for n in (value if isinstance(value, (tuple, list)) else (value,))]
            self._add(struct.pack(f"{len(floats)}d", *floats))

    def _add(self, data: bytes) -> None:
        self._checksum = zlib.crc32(data, self._checksum)
        self._added.append(data)

    def end_step(self) -> None:
        """Count a step, whose options and clipping were added."""
        self.n_steps += 1
        self.last, self._added = self._added, []

    def repeat(self, added: Iterable[bytes]) -> None:
        """Count a step that adds what an earlier one has added, its `last`."""
        for data in added:
            self._add(data)
        self.end_step()

    def progress(self) -> Progress:
        return Progress(self.n_steps % 2**24, self._checksum % 2**24)


class Progress(NamedTuple):
    """What all ranks have in common when they reduce their gradients: numbers below 2**24."""

    n_steps: int  # steps made so far
    history: int  # checksum of the options and of the clipping of all steps made so far


def n_elements(group: dist.ProcessGroup | None) -> int:
    """Return how many elements an `Agreement` of the group needs."""
    return 0 if group is None else group.size() * _DIGITS * len(Progress._fields)


class Agreement:
    """Sends this rank's progress with a reduction, and raises if the progress of another rank is different.

    Args:
        elements: [n_elements(group)], memory that the reduction averages.
        progress: returns the progress of this rank.
    """

    def __init__(self, elements: Tensor, group: dist.ProcessGroup, progress: Callable[[], Progress]) -> None:
        self._elements, self._progress = elements, progress
        self._ranks, self._own = dist.get_process_group_ranks(group), group.rank()
        self._on_gpu = elements.device.type == "cuda"
        self._numbers = torch.zeros_like(elements)  # of this rank, which a CUDA graph reads
        self._sending = False  # until the result is received
        self._results: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()  # not compared, and when they are there
        self._difference = ""  # found in the last result that was compared

    def write(self) -> None:
        """Write the progress to the memory that the next reduction reads, on the current stream."""
        self._difference = ""
        digits = [number >> (_BITS * i) & (2**_BITS - 1) for number in self._progress() for i in range(_DIGITS)]
        rows = torch.zeros(self._elements.shape, dtype=self._elements.dtype, device="cpu", pin_memory=self._on_gpu)
        rows.view(len(self._ranks), -1)[self._own] = torch.tensor(digits, dtype=rows.dtype, device="cpu")
        self._numbers.copy_(rows, non_blocking=True)

    def send(self) -> None:
        """Write the progress on the current stream, before the reduction. Call `compare` before.

        A capture reads what `write` has written before each replay.
        """
        if not self._is_capturing():
            self.write()
        self._elements.copy_(self._numbers)
        self._sending = True

    def receive(self) -> None:
        """Copy the result, if there is one, to the host, on the current stream, which has waited for the reduction.

        After a capture, call `received` after each replay.
        """
        if self._sending and not self._is_capturing():
            self.received()
        self._sending = False

    def received(self) -> None:
        """Copy a result to the host, on the current stream."""
        found, copied = self._elements, None
        if self._on_gpu:
            found = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
            found.copy_(self._elements, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._elements.device))
        self._results.append((found, copied))

    def _is_capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def compare(self, *, wait: bool, n_later: int = 0) -> None:
        """Compare the ranks in the results; without `wait` only if the host has them, but also a second time.

        Args:
            n_later: how many of the last results are left for later.

        Raises:
            RuntimeError: the ranks differ; names the first that differs from this one, and how.
        """
        is_new = False
        while len(self._results) > n_later and (wait or not self._on_gpu) and not self._difference:
            found, copied = self._results.popleft()
            if copied is not None:
                copied.synchronize()
            is_new, self._difference = True, self._find_difference(found)
        if self._difference and (is_new or not wait):
            raise RuntimeError(self._difference)

    def _find_difference(self, found: Tensor) -> str:
        rows = found.view(len(self._ranks), -1)
        if torch.equal(rows, rows[self._own].expand_as(rows)):
            return ""
        digits = (rows.double() * len(self._ranks)).round().long().view(len(self._ranks), -1, _DIGITS)
        of_ranks = [Progress(*(sum(d << (_BITS * i) for i, d in enumerate(n)) for n in row)) for row in digits.tolist()]
        own = of_ranks[self._own]
        i, other = next((i, progress) for i, progress in enumerate(of_ranks) if progress != own)
        if other.n_steps != own.n_steps:
            what = f"has made {other.n_steps} steps, and this one {own.n_steps}"
        else:
            what = "has made its steps with another learning rate, other options or other clipping than this one"
        return f"rank {self._ranks[self._own]}: the ranks differ: rank {self._ranks[i]} {what}"
