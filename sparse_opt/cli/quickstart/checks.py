"""Checks and measurements of the quickstart on the checkpoints of its runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...errors import SparseOptError
from ...tensors import as_bits

if TYPE_CHECKING:
    from ...masks.mask_set import MaskSet

# While the policy equals the reference, the log-probabilities of a completion differ only by the rounding of two ways
# to compute them: by less than 1e-4 for a few tokens in fp32. The loss changes by at most beta / 2 = 0.05 times that.
LN2_TOLERANCE = 5e-6


def first_loss_is_ln2(summary: dict[str, Any]) -> None:
    """Raise SparseOptError unless the first loss of a DPO run, before any update, is -log sigmoid(0)."""
    loss = summary["first"]["loss"]
    if not abs(loss - math.log(2)) <= LN2_TOLERANCE:
        raise SparseOptError(
            f"{summary['mode']} DPO: the first step's loss is {loss:.8f}, expected ln 2 = {math.log(2):.8f}"
        )


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, as stored on disk."""
    return load_file(checkpoint / "model.safetensors")


def same_bits(rebuilt: Path, saved: Path) -> int:
    """Check that two checkpoints are bit-identical, and return the number of compared elements.

    Raises:
        SparseOptError: a tensor differs or is missing in one of them; the message names it.
    """
    first, second = weights_of(rebuilt), weights_of(saved)
    if first.keys() != second.keys():
        odd = sorted(first.keys() ^ second.keys())[0]
        raise SparseOptError(f"{odd} is in one of the checkpoints {rebuilt} and {saved} alone")
    for name, tensor in first.items():
        other = second[name]
        found, expected = (f"{t.dtype} {list(t.shape)}" for t in (tensor, other))
        if found != expected:
            raise SparseOptError(f"{name} is {found} in {rebuilt}, {expected} in {saved}")
        if not torch.equal(as_bits(tensor), as_bits(other)):
            n_different = int((as_bits(tensor) != as_bits(other)).sum())
            raise SparseOptError(f"{name} differs in {n_different} elements between {rebuilt} and {saved}")
    return sum(tensor.numel() for tensor in first.values())


def n_changed(start: Path, end: Path) -> int:
    """The number of elements whose bits differ between two checkpoints of a model."""
    first, second = weights_of(start), weights_of(end)
    return sum(int((as_bits(first[name]) != as_bits(tensor)).sum()) for name, tensor in second.items())


def changed_inside_only(mask: MaskSet, start: Path, end: Path) -> None:
    """Raise SparseOptError, which names the tensor, if an element outside the mask has changed."""
    first, second = weights_of(start), weights_of(end)
    for name, tensor in second.items():
        outside = as_bits(first[name]) != as_bits(tensor)
        if name in mask:
            outside[mask[name].long()] = False
        if outside.any():
            raise SparseOptError(f"{name}: {int(outside.sum())} elements outside the mask changed")


def preference_accuracy(checkpoint: Path, pairs: Path, device: torch.device) -> float:
    """The share of preference pairs whose chosen completion has a higher probability than the rejected one."""
    from sparse_opt.trainers.data.encoding import collate, load_examples
    from sparse_opt.trainers.policy.logprobs import completion_logprobs
    from sparse_opt.trainers.policy.pretrained import load_causal_lm, load_tokenizer_from

    model, tokenizer = load_causal_lm(checkpoint, torch.float32), load_tokenizer_from(checkpoint)
    model.to(device).eval()
    examples, _ = load_examples("preference", str(pairs), "train", tokenizer, max_length=64)
    pad_id = tokenizer.pad_token_id
    with torch.no_grad():
        chosen, rejected = (
            completion_logprobs(model, collate(sequences, pad_id).to(device))
            for sequences in zip(*examples, strict=True)
        )
    return (chosen > rejected).double().mean().item()


def n_changed_bf16(start: Path, end: Path) -> int:
    """The number of elements that differ in bf16 between two checkpoints of a model, whatever their dtypes."""
    first, second = weights_of(start), weights_of(end)
    return sum(int((first[name].bfloat16() != tensor.bfloat16()).sum()) for name, tensor in second.items())
