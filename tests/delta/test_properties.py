"""Drawn states and runs: patches are the identity on every backend, and a log gives back what it was given."""

import math
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logged_dtypes import DTYPES
from torch import Tensor

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.backends import why_unavailable
from sparse_opt.delta import codec as patch_codec
from sparse_opt.delta.codec import Patch
from sparse_opt.tensors import as_bits

# Lengths around those of runs, tiles and lanes.
NUMELS = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 8191, 8192, 8193, 20_000]))
DENSITIES = st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.6, 1.0])
KINDS = st.sampled_from(["any bits", "steps", "far steps"])
PLACES = [("reference", "cpu"), ("native", "cpu"), ("native", "cuda")]
# All pairs but the reference with itself, which is slow and whose bytes are those of the native encoder.
PAIRS = [
    pytest.param(one, other, marks=[pytest.mark.gpu] * ("cuda" in one + other), id="-".join(one + other))
    for one in PLACES
    for other in PLACES
    if one != other or one != PLACES[0]
]


@st.composite
def pairs(draw: Any, dtypes: list[torch.dtype]) -> tuple[Tensor, Tensor]:
    """A tensor before and after a step that changes about a share `density` of its `numel` words."""
    dtype, numel, density, kind = draw(st.sampled_from(dtypes)), draw(NUMELS), draw(DENSITIES), draw(KINDS)
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype == torch.bool:
        old = torch.rand(numel, generator=source) < 0.5
        return old, old ^ (torch.rand(numel, generator=source) < density)
    size = dtype.itemsize
    old = torch.randint(0, 256, (numel, size), generator=source, dtype=torch.uint8)
    if kind == "any bits":
        other = torch.randint(0, 256, (numel, size), generator=source, dtype=torch.uint8)
    else:
        other = old.clone()
        low = 1 if kind == "steps" else size
        for column in range(low):
            other[:, column] += torch.randint(0, 3, (numel,), generator=source, dtype=torch.uint8)
    chosen = torch.rand(numel, generator=source) < density
    new = torch.where(chosen[:, None], other, old)
    return old.view(-1).view(dtype), new.view(-1).view(dtype)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("encoder", "decoder"), PAIRS)
def test_a_patch_made_on_one_backend_decodes_on_every_other(encoder, decoder):
    if cause := why_unavailable("cpu", "cpu"):
        pytest.skip(f"needs the extension: {cause}")

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(DTYPES).flatmap(lambda dtype: st.lists(pairs([dtype]), min_size=1, max_size=4)))
    def identity(drawn: list[tuple[Tensor, Tensor]]) -> None:
        old, new = [a.clone() for a, _ in drawn], [b for _, b in drawn]
        there = [[tensor.to(encoder[1]) for tensor in tensors] for tensors in (old, new)]
        patch = patch_codec.encode(*there, backend=encoder[0])
        assert patch.counts.tolist() == [int((as_bits(a) != as_bits(b)).sum()) for a, b in drawn]
        parts = {name: part.cpu() for name, part in patch.parts().items()}
        read = Patch.from_parts(parts, patch.dtype, patch.numels)
        whole = [tensor.to(decoder[1], copy=True) for tensor in old]
        patch_codec.apply_(whole, read, backend=decoder[0])
        for found, expected in zip(whole, new, strict=True):
            assert bytes_of(found) == bytes_of(expected)
        records = parts.pop("records")
        for i, (before, after) in enumerate(drawn):
            alone = before.to(decoder[1], copy=True)
            own = Patch.of_tensor_in(parts, len(records), lambda a, b: records[a:b], patch.dtype, patch.numels, i)
            patch_codec.apply_([alone], own, backend=decoder[0])
            assert bytes_of(alone) == bytes_of(after)

    identity()


@settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=st.lists(pairs(DTYPES), min_size=1, max_size=5),
    keyframe_every=st.sampled_from([None, None, 1, 2]),
    mask_density=st.sampled_from([None, 0.0, 0.3, 1.0]),
    within=st.booleans(),
)
def test_a_log_returns_the_logged_states(drawn, keyframe_every, mask_density, within):
    """Steps that go to the second state of each pair and back, in the mask or beyond it."""
    first = {f"t{i}": a for i, (a, _) in enumerate(drawn)}
    second = {f"t{i}": b for i, (_, b) in enumerate(drawn)}
    mask = None if mask_density is None else MaskSet.random(first, density=mask_density)
    if mask is not None and within:
        for name, old in first.items():
            kept = torch.ones(old.numel(), dtype=torch.bool)
            kept[mask[name].long()] = False
            words = as_bits(second[name]).clone()
            words[kept] = as_bits(old)[kept]
            second[name] = words.view(old.dtype)
    states = {0: first, 2: second, 3: second, 4: first, 9: second}
    with tempfile.TemporaryDirectory() as folder:
        with DeltaLog.create(f"{folder}/log", first, mask=mask, keyframe_every=keyframe_every) as log:
            infos = [log.append(step, state) for step, state in states.items() if step]
            if mask is not None and within:
                assert all(info.wait().masked for info in infos if info.wait().kind == "patch")
        log = DeltaLog.open(f"{folder}/log")
        for step in reversed(log.steps):
            found = log.load(step)
            assert all(bytes_of(found[name]) == bytes_of(tensor) for name, tensor in states[step].items())
        for name in first:
            for step, tensor in log.tensor_states(name, log.steps):
                assert bytes_of(tensor) == bytes_of(states[step][name])
        assert log.verify() == []
        state_bytes = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in first.values())
        headers = 4000 + 200 * len(first)
        assert all(info.bytes <= 1.01 * state_bytes + headers for info in log.info() if info.step in (0, 2, 3))
