"""The random numbers behind stochastic rounding."""

from __future__ import annotations

import pytest
import torch

from sparse_opt.ops.rounding import philox2x32, random_words


# Known answers that come with Random123, https://github.com/DEShawResearch/random123 (tests/kat_vectors).
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "wanted"),
    [
        (7, (0, 0), 0, (0x257A3673, 0xCD26BE2A)),
        (7, (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
        (7, (0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
        (10, (0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        (10, (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        (10, (0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_philox_gives_the_known_answers(rounds, counter, key, wanted):
    words = philox2x32(torch.tensor([key]), tuple(torch.tensor([c]) for c in counter), rounds)
    assert tuple(int(w) for w in words) == wanted


def test_words_differ_by_seed_step_and_slot_also_in_their_high_words():
    cpu = torch.device("cpu")
    calls = [(1, 1, 0), (2, 1, 0), (1 + 2**32, 1, 0), (1, 2, 0), (1, 1, 2**32), (1, 1, 2**33), (1 + 2**33, 1, 0)]
    seen = torch.cat([random_words(seed, step, slot, slot + 1000, cpu)[0] for seed, step, slot in calls])
    # 7000 words of 32 bits hold 0.006 equal pairs by chance; two equal streams would hold 1000.
    assert seen.unique().numel() >= 7000 - 1


def test_the_bits_of_moments_and_parameters_are_independent():
    param, exp_avg, exp_avg_sq = random_words(3, 5, 0, 1 << 16, torch.device("cpu"))
    parts = torch.stack([param & 0xFFFF, param >> 16, exp_avg & 0xFFFF, exp_avg_sq & 0xFFFF]).double()
    # Correlations of 65536 pairs: standard deviation 1/256; five of them.
    assert (torch.corrcoef(parts) - torch.eye(4)).abs().max() < 5 / 256
    assert ((parts.mean(1) / 65535 - 0.5).abs() < 5 * 12**-0.5 / 256).all()
