"""Which weights two dense runs have both changed, from a sample of positions that is small enough to keep of every run.

A run's file in the folder `changed` has a bit for each sampled position, 1 % of the elements of a large tensor and all
of a small one, and the number of changed weights by tensor and exponent: 0.48 MB for SmolLM2. The positions are those
of a random mask with a fixed seed, so that files of different machines can be compared. Of what two runs have in
common, only the number of weights that both changed is an estimate; how many each changed, and what chance would give,
is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAMPLED = 0.01
# Tensors of at most so many elements are taken whole.
WHOLE = 4096
_SEED = 0
_COUNTS = "n_by_exponent"


def positions_of(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The sampled positions in each flattened tensor, ascending; the same for the same names and shapes everywhere."""
    import torch

    from sparse_opt.masks.mask_set import MaskSet

    large = {name: shape for name, shape in shapes.items() if math.prod(shape) > WHOLE}
    drawn = MaskSet.random(large, density=SAMPLED, seed=_SEED)
    return {
        name: drawn[name].long() if name in large else torch.arange(math.prod(shape)) for name, shape in shapes.items()
    }


def sample_file(folder: Path, name: str) -> Path:
    """The file of a run."""
    return folder / f"{name}.safetensors"


def overlaps_with(folder: Path, name: str, masks: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """Keep a sample of the changed weights of a run in a folder, and compare it with those kept before.

    Of two runs that end at once, at least one finds the other's file, because both write first.

    Args:
        masks: the changed weights, bool tensors.
        start: the weights that all runs start from.

    Returns:
        Name of the other run -> n and n_other, the numbers of changed weights; n_both, an estimate of the number that
        both changed, and n_both_stderr, its standard error; expected, the number that two random sets have in common
        which have as many weights of each tensor and each exponent (of the start's bf16 weights); and
        expected_by_tensor, of each tensor alone.
    """
    import torch
    from safetensors.torch import load_file, save_file

    names = sorted(masks)
    positions = positions_of({key: tuple(masks[key].shape) for key in names})
    ours, of_all, of_ours = {}, [], []
    for key in names:
        mask, exponents = masks[key].flatten(), _exponents(start[key])
        ours[key] = mask[positions[key].to(mask.device)].cpu()
        of_all.append(torch.bincount(exponents, minlength=256).cpu())
        of_ours.append(torch.bincount(exponents[mask], minlength=256).cpu())
    of_start, counts = torch.stack(of_all), torch.stack(of_ours)
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{name}.tmp"
    save_file({**{key: pack(mask) for key, mask in ours.items()}, _COUNTS: counts.int()}, aside)
    aside.replace(sample_file(folder, name))

    numel = torch.tensor([masks[key].numel() for key in names], dtype=torch.float64)
    sampled = torch.tensor([positions[key].numel() for key in names], dtype=torch.float64)
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.stem == name:
            continue
        content = load_file(file)
        theirs = content[_COUNTS].long()
        both = [int((ours[key] & unpack(content[key], ours[key].numel())).sum()) for key in names]
        share = torch.tensor(both, dtype=torch.float64) / sampled
        # Of a sample without replacement.
        variance = numel**2 * share * (1 - share) / sampled * (1 - sampled / numel)
        found[file.stem] = {
            "n": int(counts.sum()),
            "n_other": int(theirs.sum()),
            "n_both": float((numel * share).sum()),
            "n_both_stderr": float(variance.sum().sqrt()),
            "expected": float((counts.double() * theirs / of_start.clamp(min=1)).sum()),
            "expected_by_tensor": float((counts.sum(1).double() * theirs.sum(1) / numel).sum()),
        }
    return found


def _exponents(weights: Any) -> Any:
    """The exponent bits of the bf16 values: [numel] int64, 0 to 255."""
    import torch

    return ((weights.to(torch.bfloat16).view(torch.int16) >> 7) & 0xFF).flatten().long()


def pack(mask: Any) -> Any:
    """The values of a bool tensor as bits: [ceil(numel / 8)] uint8, the first in the highest bit."""
    import torch

    flat = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (flat << _shifts(mask.device)).sum(dim=1, dtype=torch.uint8)


def unpack(bits: Any, numel: int) -> Any:
    """The bool values [numel] of `pack`."""
    return ((bits[:, None] >> _shifts(bits.device)) & 1).flatten()[:numel].bool()


def _shifts(device: Any) -> Any:
    import torch

    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
