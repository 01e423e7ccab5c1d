"""masked_grad_gather_, indexed_swap_, delta_encode and delta_apply_ on every backend against the reference."""

import math

import pytest
import torch
from cases import LAYOUTS, MASKS, assert_same_bits, behind_its_beginning, bits_of, half_of, make, name_of

from sparse_opt import ops

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ANY = (*FLOATS, torch.float64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
# Triton's kernels of swap and delta depend only on a dtype's size: one dtype of each size is enough in the slow
# interpreter.
ONE_OF_EACH_SIZE = (torch.int64, torch.int32, torch.int16, torch.uint8)


def gather(case, backend, **options):
    segments = case.indices, case.starts, case.ends
    options = {**case.layout, **case.extra, **options}
    ops.masked_grad_gather_(case.grad, case.dense_grads, *segments, backend=backend, **options)


@pytest.mark.parametrize(
    ("dtype", "accumulate", "layout", "mask"), half_of(FLOATS, (False, True), LAYOUTS, MASKS), ids=name_of
)
def test_gather(dtype, accumulate, layout, mask, place):
    device, backend = torch.device(place[0]), place[1]
    case = make(device, dtype=dtype, mask=mask, layout=layout)
    if not accumulate:
        case.grad.fill_(math.nan)  # every slot of a segment must be written
    case.extra = {"scale": torch.tensor([0.3], device=device)}
    expected, got = case.clone(), case.clone()
    expected_sq, got_sq = (torch.full((len(case.params),), math.nan, device=device) for _ in range(2))
    gather(expected, "reference", accumulate=accumulate, sum_sq=expected_sq)
    gather(got, backend, accumulate=accumulate, sum_sq=got_sq)
    assert_same_bits(got, expected)
    # Positive terms, added in another order: each of the two sums is within n roundings, usually far fewer.
    longest = max(e - s for s, e in zip(case.starts, case.ends, strict=True))
    torch.testing.assert_close(got_sq, expected_sq, rtol=max(1, longest) ** 0.5 * 4 * 2**-24, atol=0)


@pytest.mark.parametrize(("dense_moved", "out_moved"), [(True, False), (False, True)], ids=["dense", "out"])
def test_gather_of_runs_in_buffers_that_no_vector_fits(dense_moved, out_moved, place):
    case = make(torch.device(place[0]), dtype=torch.bfloat16, layout="run16")
    expected, got = case.clone(), case.clone()
    if dense_moved:
        got.dense_grads = [behind_its_beginning(t) for t in got.dense_grads]
    if out_moved:
        got.grad = behind_its_beginning(got.grad)
    gather(expected, "reference", accumulate=True)
    gather(got, place[1], accumulate=True)
    assert_same_bits(got, expected)


@pytest.mark.parametrize(
    ("layout", "index_dtype", "dense_dtype", "out_dtype"),
    half_of(LAYOUTS, (torch.int32, torch.int64), FLOATS, FLOATS),
    ids=name_of,
)
def test_gather_dtypes(layout, index_dtype, dense_dtype, out_dtype, place):
    shapes = [(5, 33), (70,)]
    case = make(
        torch.device(place[0]),
        dtype=dense_dtype,
        index_dtype=index_dtype,
        mask="ragged",
        shapes=shapes,
        layout=layout,
    )
    case.grad = case.grad.to(out_dtype)
    expected, got = case.clone(), case.clone()
    gather(expected, "reference", accumulate=True)
    gather(got, place[1], accumulate=True)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_norm_is_the_same_on_every_run_and_of_what_was_stored(layout, any_place):
    device, backend = any_place
    case = make(torch.device(device), shapes=[(300, 701)], layout=layout)
    case.grad = case.grad.bfloat16()  # stored in bf16: the sum is of the rounded values
    results = []
    for _ in range(3):
        sum_sq = torch.full((1,), math.nan, device=device)
        gather(case, backend, sum_sq=sum_sq)
        results.append(sum_sq)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    stored = case.grad[case.starts[0] : case.ends[0]].double().square().sum()
    n = case.ends[0] - case.starts[0]
    assert abs(results[0].item() - stored.item()) < 4 * n**0.5 * 2**-24 * stored.item()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_gather_flags_what_is_not_finite(dtype, bad, any_place):
    device, backend = any_place
    case = make(torch.device(device), dtype=dtype)
    flag = torch.tensor([0.5], device=device)
    gather(case, backend, found_inf=flag)
    assert flag.item() == 0.5  # unchanged
    inactive = torch.ones(case.params[0].numel(), dtype=torch.bool, device=device)
    inactive[case.indices[case.starts[0] : case.ends[0]].long()] = False
    case.dense_grads[0].view(-1)[inactive] = bad
    gather(case, backend, found_inf=flag)
    assert flag.item() == 0.5  # elements outside the mask are not read
    case.dense_grads[2].view(-1)[case.indices[case.ends[2] - 1].long()] = bad
    gather(case, backend, found_inf=flag)
    assert flag.item() == math.inf


def test_gather_flags_an_overflow_of_the_stored_dtype(any_place):
    device, backend = any_place
    case = make(torch.device(device), shapes=[(40,)], mask="full")
    case.dense_grads[0][7] = 1e6
    case.grad = case.grad.half()
    flag = torch.zeros(1, device=device)
    gather(case, backend, found_inf=flag)
    assert flag.item() == math.inf


def any_bits(shape, dtype, generator, device):
    """Random bits of a dtype: NaN payloads, infinities and -0 among them."""
    if dtype == torch.bool:
        return (torch.rand(shape, generator=generator) < 0.5).to(device)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (torch.Size(shape).numel() * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape).to(device)


@pytest.mark.parametrize(
    ("dtype", "layout", "index_dtype"), half_of(ANY, LAYOUTS, (torch.int32, torch.int64)), ids=name_of
)
def test_swap_moves_bits(dtype, layout, index_dtype, place):
    device, backend = torch.device(place[0]), place[1]
    generator = torch.Generator().manual_seed(3)
    few = place == ("cpu", "triton") and dtype not in ONE_OF_EACH_SIZE
    for mask in ("random",) if few else (*MASKS, "far-apart"):
        shapes = [(41, 2900), (7,)] if mask == "far-apart" else None  # two blocks
        case = make(device, index_dtype=index_dtype, mask=mask, layout=layout, shapes=shapes)
        case.params = [any_bits(p.shape, dtype, generator, device) for p in case.params]
        case.grad = any_bits(case.grad.shape, dtype, generator, device)
        expected, got = case.clone(), case.clone()
        how = case.layout
        for c, name in ((expected, "reference"), (got, backend)):
            ops.indexed_swap_(c.params, c.grad, c.indices, c.starts, c.ends, backend=name, **how)
        for a, b in zip((*got.params, got.grad), (*expected.params, expected.grad), strict=True):
            assert torch.equal(bits_of(a), bits_of(b)), mask
        if mask not in ("empty",):
            assert not torch.equal(bits_of(got.grad), bits_of(case.grad))
        ops.indexed_swap_(got.params, got.grad, got.indices, got.starts, got.ends, backend=backend, **how)
        for a, b in zip((*got.params, got.grad), (*case.params, case.grad), strict=True):
            assert torch.equal(bits_of(a), bits_of(b)), mask


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_swap_of_unaligned_tensors(dtype, layout, place):
    """Views into storage, and tensors from DLPack, may begin at any element."""
    expected = make(torch.device(place[0]), dtype=dtype, mask="ragged", layout=layout)
    got = expected.clone()
    got.params = [behind_its_beginning(param) for param in got.params]
    got.grad, got.indices = behind_its_beginning(got.grad), behind_its_beginning(got.indices)
    for c, backend in ((expected, "reference"), (got, place[1])):
        ops.indexed_swap_(c.params, c.grad, c.indices, c.starts, c.ends, backend=backend, **c.layout)
    assert_same_bits(got, expected)


@pytest.mark.parametrize(
    ("dtype", "layout", "wide"), half_of(FLOATS, LAYOUTS, ["", "before", "after", "both"]), ids=name_of
)
def test_replace(dtype, layout, wide, place):
    device, backend = torch.device(place[0]), place[1]
    for mask in ("ragged", "empty", "full"):
        case = make(device, dtype=dtype, mask=mask, layout=layout)
        before, after = case.master.clone(), case.master.clone()
        after[::3] = case.exp_avg[::3]
        if wide != "both":
            before, after = ((t if wide == name else t.to(dtype)) for name, t in (("before", before), ("after", after)))
        for i, param in enumerate(case.params):
            segment, positions = slice(case.starts[i], case.ends[i]), case.positions(i).to(device)
            param.view(-1)[positions] = before[segment].to(dtype)
        expected, got, inverse = case.clone(), case.clone(), (after, before)
        for i, param in enumerate(expected.params):
            segment, positions = slice(case.starts[i], case.ends[i]), case.positions(i).to(device)
            param.view(-1)[positions] = after[segment].to(dtype)
        segments = case.indices, case.starts, case.ends
        ops.indexed_replace_(got.params, before, after, *segments, backend=backend, **case.layout)
        assert_same_bits(got, expected, mask)
        assert mask == "empty" or not all(map(torch.equal, got.params, case.params))
        ops.indexed_replace_(got.params, *inverse, *segments, backend=backend, **case.layout)
        assert_same_bits(got, case, mask)
        for param in got.params:
            param.fill_(7.0)
        ops.indexed_replace_(got.params, before, before, *segments, backend=backend, **case.layout)
        assert all((param == 7.0).all() for param in got.params)  # neither read nor written


@pytest.mark.parametrize("indices", ["narrow", torch.int32, torch.int64], ids=lambda indices: str(indices)[-6:])
@pytest.mark.parametrize("which", ["", "before", "after", "indices"])
def test_replace_by_buffers_that_no_vector_fits(which, indices, place):
    """Segments that begin and end anywhere, with one buffer that is not aligned."""
    device, backend = torch.device(place[0]), place[1]
    shapes = [(n,) for n in (1, 2, 3, 5, 1023, 1024, 1026, 4097)]
    how = {"layout": "narrow"} if indices == "narrow" else {"index_dtype": indices}
    case = make(device, dtype=torch.bfloat16, mask="full", shapes=shapes, **how)
    buffers = {"before": case.taken(), "after": case.exp_avg.to(torch.bfloat16), "indices": case.indices}
    expected, got = case.clone(), case.clone()
    for i, param in enumerate(expected.params):
        segment = slice(case.starts[i], case.ends[i])
        param.view(-1)[case.positions(i).to(device)] = buffers["after"][segment]
    if which:
        buffers[which] = behind_its_beginning(buffers[which])
    ops.indexed_replace_(got.params, *buffers.values(), case.starts, case.ends, backend=backend, **case.layout)
    assert_same_bits(got, expected)
    assert not all(map(torch.equal, got.params, case.params))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("dtype", ANY, ids=name_of)
def test_delta_round_trip(dtype, share, place):
    device, backend = torch.device(place[0]), place[1]
    generator = torch.Generator().manual_seed(4)
    shapes = [(7, 33), (1,), (0,), (129,), (3, 1030), (130, 130)]
    if place == ("cpu", "triton"):  # the interpreter is slow: its largest is of two blocks, or they are all within one
        shapes[4:] = [(91, 91)] if dtype in ONE_OF_EACH_SIZE else []
    old = [any_bits(s, dtype, generator, device) for s in shapes]
    new = []
    for t in old:
        change = (torch.rand(t.shape, generator=generator) < share).to(device)
        new.append(torch.where(change, any_bits(t.shape, dtype, generator, device), t))
        bits_of(new[-1])[~change.view(-1)] = bits_of(t)[~change.view(-1)]  # where() may not keep NaN payloads
    expected = ops.delta_encode(old, new, backend="reference")
    got = ops.delta_encode(old, new, backend=backend)
    assert got[0].dtype == torch.int32 and got[1].dtype == dtype
    assert got[2].device.type == "cpu" and got[2].dtype == torch.int64
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(bits_of(a), bits_of(b))
    if share == 0.0:
        assert got[0].numel() == 0
    ends = got[2].cumsum(0).tolist()
    starts = [e - c for e, c in zip(ends, got[2].tolist(), strict=True)]
    restored = [t.clone() for t in old]
    ops.delta_apply_(restored, got[0], got[1], starts, ends, backend=backend)
    for a, b in zip(restored, new, strict=True):
        assert torch.equal(bits_of(a), bits_of(b))


def test_delta_sees_bits_not_numbers(any_place):
    device, backend = any_place
    quiet = torch.tensor([0x7FC00000, 0x7FC00000, 0, 5], dtype=torch.int32, device=device).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0x7FC00000, -(2**31), 5], dtype=torch.int32, device=device).view(torch.float32)
    indices, values, counts = ops.delta_encode([quiet], [other], backend=backend)
    assert indices.tolist() == [0, 2] and counts.tolist() == [2]
    assert values.view(torch.int32).tolist() == [0x7FC00001, -(2**31)]


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 4095, 8191, 8192, 8193, 70001])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_delta_of_any_length_and_alignment(numel, offset, place):
    """Vector loads must support storage with any start and end."""
    device, backend = torch.device(place[0]), place[1]
    generator = torch.Generator().manual_seed(numel)
    base = any_bits((numel + offset,), torch.bfloat16, generator, device)[offset:]
    new = base.clone() if offset == 1 else torch.cat([base[:0].new_zeros(2), base])[2:]
    bits_of(new)[:: max(1, numel // 7)] ^= 1
    bits_of(new)[-1] ^= 2
    for a, b in zip(
        ops.delta_encode([base], [new], backend=backend),
        ops.delta_encode([base], [new], backend="reference"),
        strict=True,
    ):
        assert torch.equal(bits_of(a), bits_of(b))


def test_opcheck(any_place):
    device, backend, dtype = *any_place, torch.bfloat16
    case = make(torch.device(device), dtype=dtype, shapes=[(3, 5), (4,)])
    segments = (case.indices, case.starts, case.ends)
    sum_sq, flag = torch.zeros(2, device=device), torch.zeros(1, device=device)
    name = {"backend": backend}
    check = torch.library.opcheck
    for layout in ("run16", "narrow"):
        other = make(torch.device(device), dtype=dtype, mask="full", shapes=[(3, 11), (17,)], layout=layout)
        where = (other.indices, other.starts, other.ends)
        how = {**other.layout, **name}
        check(torch.ops.sparse_opt.masked_grad_gather_.default, (other.grad, other.params, *where), how)
        check(torch.ops.sparse_opt.indexed_swap_.default, (other.params, other.grad, *where), how)
    check(
        torch.ops.sparse_opt.masked_grad_gather_.default,
        (case.grad, case.dense_grads, *segments),
        {"sum_sq": sum_sq, "found_inf": flag, "accumulate": True, **name},
    )
    check(torch.ops.sparse_opt.indexed_swap_.default, (case.params, case.grad, *segments), name)
    replace = (case.params, case.grad, case.master, *segments)
    check(torch.ops.sparse_opt.indexed_replace_.default, replace, name)
    check(
        torch.ops.sparse_opt.delta_apply_.default, (case.params, case.indices, case.grad, case.starts, case.ends), name
    )
    check(torch.ops.sparse_opt.delta_encode.default, (case.params, case.dense_grads), name)
