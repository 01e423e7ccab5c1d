"""A large tensor: its round trip, and the length of its patch. docs/formats.md has the forms that bound them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from patch_words import bits, trained_words

from sparse_opt.delta.codec import LEVELS, apply_, encode


def test_bytes_for_each_changed_weight(place):
    old, new = (tensor.to(place) for tensor in trained_words(np.random.default_rng(13), 2**24, scale=3.0e-7))
    bytes_each = {}
    for level in LEVELS:
        patch = encode([old], [new], level, backend="native")
        dense = old.clone()
        apply_([dense], patch, backend="native")
        assert torch.equal(bits(dense), bits(new))
        changed = int(patch.counts.sum())
        assert changed == int((bits(old) != bits(new)).sum())
        assert changed / old.numel() == pytest.approx(0.012, rel=0.1)
        bytes_each[level] = patch.nbytes / changed
    assert bytes_each["packed"] <= 1.6
    assert bytes_each["tight"] <= 1.05 * entropy(old, new) / 8 / changed


def entropy(old: torch.Tensor, new: torch.Tensor) -> float:
    """Bits of (changed, difference) given the exponent of the old word, with the frequencies of these very words."""
    a, b = (bits(tensor).numpy().view(np.uint16).astype(np.int64) for tensor in (old, new))
    exponent = a >> 7 & 0xFF
    # By how much the bits of a bfloat16 moved, with those of negative numbers mirrored: 0 where nothing changed.
    ordered_a, ordered_b = (np.where(x >= 1 << 15, 0xFFFF - x, x | 1 << 15) for x in (a, b))
    moved = a != b
    _, changes = np.unique(exponent[moved] << 32 | (ordered_b - ordered_a)[moved] + (1 << 20), return_counts=True)
    joint = np.concatenate([changes, np.bincount(exponent[~moved])])
    given = np.bincount(exponent)
    return total_log(given) - total_log(joint)


def total_log(counts: np.ndarray) -> float:
    counts = counts[counts > 0]
    return float((counts * np.log2(counts)).sum())
