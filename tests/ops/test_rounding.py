"""Stochastic rounding: its random numbers, and values near the largest finite one."""

import math

import pytest
import torch
from cases import bits_of, name_of
from torch import Tensor

from sparse_opt import ops
from sparse_opt.ops.rounding import philox2x32, random_words, stochastic_round

HALVES = (torch.bfloat16, torch.float16)


# Known answers that come with Random123, https://github.com/DEShawResearch/random123 (tests/kat_vectors).
@pytest.mark.parametrize(
    ("rounds", "counter", "key", "expected"),
    [
        (7, (0, 0), 0, (0x257A3673, 0xCD26BE2A)),
        (7, (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
        (7, (0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
        (10, (0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        (10, (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        (10, (0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_philox_gives_the_known_answers(rounds, counter, key, expected):
    words = philox2x32(torch.tensor([key]), tuple(torch.tensor([c]) for c in counter), rounds)
    assert tuple(int(w) for w in words) == expected


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


def fp32_of(words: Tensor) -> Tensor:
    """fp32 values of bits held in int64."""
    return words.to(torch.int32).view(torch.float32)


def around_the_largest(dtype: torch.dtype) -> Tensor:
    """All fp32 values from the second largest of `dtype` to 2^16 steps past its largest, some far ones; and negated."""
    largest = int(torch.tensor(torch.finfo(dtype).max).view(torch.int32))
    gap = 2**16 if dtype == torch.bfloat16 else 2**13  # fp32 steps between two values of `dtype`
    near = torch.arange(largest - gap, min(largest + 2**16, 0x7F800000))
    far = torch.tensor([largest + 2**20, 0x7F7F0000, 0x7F7FFFFE, 0x7F7FFFFF]).clamp(max=0x7F7FFFFF)
    values = fp32_of(torch.cat([near, far]))
    return torch.cat([values, -values])


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_a_finite_value_is_rounded_to_a_neighbour_that_is_finite(dtype):
    """With every value around the largest, and with the smallest and the largest random words and those between."""
    x = around_the_largest(dtype)
    largest = torch.finfo(dtype).max
    for word in (0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x80000000, 0xFFFF0000, 0xFFFFFFFF):
        found = stochastic_round(x, dtype, torch.full(x.shape, word, dtype=torch.int64)).float()
        assert found.isfinite().all()
        past = x.abs() > largest
        assert torch.equal(found[past], largest * x[past].sign())
        # Values between the largest two are rounded to one of the two, which themselves do not change.
        below = torch.tensor(largest, dtype=dtype).view(torch.int16).sub(1).view(dtype).item()
        assert set(found[~past].abs().unique().tolist()) <= {below, largest}
        assert torch.equal(found[x.abs() == largest], x[x.abs() == largest])


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_rounding_is_up_as_often_as_the_rest_says(dtype):
    """All random words that count, on values at each eighth between two neighbours."""
    neighbours = torch.tensor([1.0, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4], dtype=dtype)
    bits = neighbours.view(torch.int16)
    below, above = (bits - 1).view(dtype).float(), neighbours.float()
    words = torch.arange(2**16) << 16 | torch.arange(2**16)  # bf16 uses the low half, fp16 the high one
    for low, high in zip(below.tolist(), above.tolist(), strict=True):
        for eighth in range(8):
            x = torch.full((2**16,), low + (high - low) * eighth / 8)
            assert (stochastic_round(x, dtype, words).float() == high).sum() == 2**16 * eighth // 8


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_what_is_not_finite_stays_so(dtype):
    x = torch.tensor([math.inf, -math.inf, math.nan, fp32_of(torch.tensor(0x7F800001)).item()])
    for word in (0, 1, 0xFFFF, 0xFFFFFFFF):
        assert torch.equal(
            stochastic_round(x, dtype, torch.full((4,), word)).float().nan_to_num(7.0, math.inf, -math.inf),
            torch.tensor([math.inf, -math.inf, 7.0, 7.0]),
        )


@pytest.mark.parametrize("seed", [0, 5, 2**62 + 3])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("params", torch.bfloat16), ("params", torch.float16), ("momentum_buffer", torch.bfloat16)],
    ids=name_of,
)
def test_no_backend_rounds_a_finite_value_to_infinity(stored, dtype, seed, place):
    """A step that makes values around the largest: the same bits as the reference's, none of them infinite."""
    device, backend = place
    x = around_the_largest(dtype)
    if place == ("cpu", "triton"):
        x = x[torch.arange(0, x.numel(), 37)]  # the interpreter is slow
    x = torch.cat([x, torch.tensor([math.inf, -math.inf, math.nan])]).to(device)
    n = x.numel()
    p = torch.where(x < 0, -1.0, 1.0).mul(torch.finfo(dtype).max).to(dtype)
    indices = torch.arange(n, dtype=torch.int32, device=device)

    def step(name: str) -> Tensor:
        stepped, buffer = p.clone(), torch.zeros(n, dtype=torch.bfloat16, device=device)
        # p - (p - x) is exactly x near the largest value; the first gradient becomes the buffer's value.
        of_params = stored == "params"
        ops.indexed_sgd_(
            [stepped],
            indices,
            [0],
            [n],
            None if of_params else buffer,
            torch.tensor([1.0 if of_params else 0.0], device=device),
            torch.ones(1, device=device),
            grad=p.float() - x if of_params else x,
            momentum=0.0 if of_params else 0.9,
            stochastic_rounding=True,
            seed=seed,
            backend=name,
        )
        return stepped if of_params else buffer

    expected, got = step("reference"), step(backend)
    assert got[:-3].isfinite().all()
    assert got[-3] == math.inf and got[-2] == -math.inf and got[-1].isnan()
    assert torch.equal(bits_of(got[:-1]), bits_of(expected[:-1]))
