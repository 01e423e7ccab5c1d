"""The change of one tensor in a `SparseDelta`: a patch over the whole tensor, or over the runs in which it changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import ops
from ..tensors import as_bits
from . import codec
from .codec import Patch, PatchError
from .state import TensorSpec

RUN_LENGTHS = (64, 32, 16)


@dataclass(frozen=True)
class Change:
    """What turns the bits of one tensor into others, on the CPU.

    Attributes:
        patch: of the tensor's elements or, with `runs`, of the elements of those runs, one after the other.
        runs: uint32 [n] ascending: run i is the elements [runs[i] * run_length, (runs[i] + 1) * run_length).
        run_length: 1 without `runs`.
    """

    patch: Patch
    runs: Tensor | None = None
    run_length: int = 1

    @classmethod
    def between(cls, old: Tensor, new: Tensor) -> Change:
        """Encode a change that is not empty, on the tensors' device: contiguous ones of one dtype and size."""
        positions, _, _ = ops.delta_encode([as_bits(old)], [as_bits(new)])
        runs, run_length = _runs(positions.to(torch.int64), old.numel())
        if runs is not None:
            among = expanded(runs, run_length)
            old, new = (as_bits(tensor)[among].view(tensor.dtype) for tensor in (old, new))
            runs = runs.cpu().to(torch.uint32)
        patch = codec.encode([old.view(-1)], [new.view(-1)])
        patch = replace(patch, sizes=patch.sizes.cpu(), records=patch.records.cpu())
        return cls(patch, runs, run_length)

    @property
    def changed(self) -> int:
        """Number of elements whose bits differ."""
        return int(self.patch.counts[0])

    def apply_(self, tensor: Tensor) -> None:
        """Change a contiguous tensor in place. After a PatchError its contents are undefined."""
        if self.runs is None:
            codec.apply_([tensor], self.patch)
            return
        among = self.among(tensor.device)
        elements = as_bits(tensor)[among].view(tensor.dtype)
        codec.apply_([elements], self.patch)
        as_bits(tensor)[among] = as_bits(elements)

    def among(self, device: torch.device) -> Tensor:
        """Return the positions of the elements of the runs: int64 [n * run_length]."""
        assert self.runs is not None
        return expanded(self.runs.to(torch.int64).to(device), self.run_length)

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors to store in a file: those of the patch, and the runs."""
        if self.runs is None:
            return self.patch.parts()
        length = torch.tensor([self.run_length], dtype=torch.uint8, device="cpu")
        return {**self.patch.parts(), "runs": self.runs, "run_length": length}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor], spec: TensorSpec) -> Change:
        """Build the change of a tensor from a file's tensors. Checks everything that does not require decoding.

        Raises:
            PatchError: the parts are not those of a change of this tensor.
        """
        rest, numel, runs, run_length = dict(parts), spec.numel, None, 1
        if {"runs", "run_length"} & rest.keys():
            runs, length = rest.pop("runs", None), rest.pop("run_length", None)
            if runs is None or length is None or runs.dtype != torch.uint32 or length.dtype != torch.uint8:
                raise PatchError("it has runs without their run_length, or in another dtype")
            run_length = int(length[0]) if length.numel() == 1 else 0
            starts = runs.to(torch.int64)
            if run_length not in RUN_LENGTHS or runs.dim() != 1 or not len(runs) or numel % run_length:
                raise PatchError(f"its runs have the length {run_length}, expected one of {RUN_LENGTHS}")
            if bool((starts.diff() <= 0).any()) or int(starts[-1]) >= numel // run_length:
                raise PatchError("its runs do not ascend within the tensor")
            numel = len(runs) * run_length
        return cls(Patch.from_parts(rest, spec.torch_dtype, [numel]), runs, run_length)


def _runs(positions: Tensor, numel: int) -> tuple[Tensor | None, int]:
    """Return the aligned runs that contain the changes, and their length, if they make the patch smaller."""
    chosen: tuple[Tensor | None, int] = (None, 1)
    fewest = _position_bytes(len(positions), numel)
    for length in RUN_LENGTHS:
        if numel % length == 0:
            runs = (positions // length).unique_consecutive()
            size = 4 * len(runs) + _position_bytes(len(positions), len(runs) * length)
            if size < fewest:
                chosen, fewest = (runs, length), size
    return chosen


def _position_bytes(changed: int, numel: int) -> float:
    """Return the entropy of the positions of `changed` elements among `numel`."""
    shares = (changed / numel, 1 - changed / numel)
    return -numel * sum(share * math.log2(share) for share in shares if share > 0) / 8


def expanded(runs: Tensor, run_length: int) -> Tensor:
    """Return the positions of the elements of runs [n]: [n * run_length]."""
    return (runs[:, None] * run_length + torch.arange(run_length, device=runs.device)).view(-1)
