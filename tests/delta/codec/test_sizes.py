"""Large tensors: round trips, and lengths of patches. docs/formats.md has the forms that bound them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from patch_words import any_words, bits, changed_words, name_of, trained_words

from sparse_opt.delta.codec import LEVELS, Patch, apply_, encode
from sparse_opt.delta.codec.words import LANE_ROWS, TILE


def check_round_trip(old: torch.Tensor, new: torch.Tensor, level: str) -> Patch:
    patch = encode([old], [new], level, backend="native")
    dense = old.clone()
    apply_([dense], patch, backend="native")
    assert torch.equal(bits(dense), bits(new))
    assert patch.counts.tolist() == [int((bits(old) != bits(new)).sum())]
    return patch


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn], ids=name_of)
def test_any_words(place, level, dtype):
    source = np.random.default_rng(11)
    numel = TILE["tight"] + 8 * LANE_ROWS + 17  # the second tile of `tight` has 9 lanes
    old = any_words(source, numel, dtype)
    for density, step in [(0.0, None), (0.001, 1), (0.03, 5), (0.5, None), (1.0, None)]:
        new = changed_words(source, old, density, step)
        patch = check_round_trip(old.to(place), new.to(place), level)
        assert patch.nbytes <= 1.01 * new.nbytes
        if density == 0:
            assert len(patch.records) == 0


@pytest.mark.parametrize(("scale", "density"), [(3.0e-7, 0.012), (7.5e-7, 0.026)])
def test_bytes_for_each_changed_weight(place, scale, density):
    old, new = (tensor.to(place) for tensor in trained_words(np.random.default_rng(13), 2**24, scale))
    bytes_each = {}
    for level in LEVELS:
        patch = check_round_trip(old, new, level)
        changed = int(patch.counts.sum())
        assert changed / old.numel() == pytest.approx(density, rel=0.1)
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
