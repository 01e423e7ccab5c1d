"""Every step op on every backend against the reference: the same bits, everywhere."""

import itertools
import math

import pytest
import torch
from cases import (
    LAYOUTS,
    MASKS,
    VARIANTS,
    assert_same_bits,
    behind_its_beginning,
    bits_of,
    half_of,
    make,
    name_of,
    run_step,
    step_call,
)

from sparse_opt import ops
from sparse_opt.ops import STEP_OPS, narrow_indices

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(op, case, place, rounds=2, **options):
    """Several calls in a row, each of which starts from the results of the previous one."""
    _, backend = place
    expected, got = case.clone(), case.clone()
    for _ in range(rounds):
        run_step(op, expected, "reference", **options)
        run_step(op, got, backend, **options)
        for c in (expected, got):
            c.steps += 1
    assert_same_bits(got, expected)
    return got


@pytest.mark.parametrize(("dtype", "layout", "mask"), half_of(DTYPES, LAYOUTS, MASKS), ids=name_of)
@pytest.mark.parametrize("op", STEP_OPS)
def test_masks(op, dtype, layout, mask, place):
    case = make(torch.device(place[0]), dtype=dtype, mask=mask, layout=layout)
    got = check(op, case, place)
    for i, (before, after) in enumerate(zip(case.params, got.params, strict=True)):
        inactive = torch.ones(before.numel(), dtype=torch.bool, device=before.device)
        inactive[case.positions(i)] = False
        assert torch.equal(before.view(-1)[inactive], after.view(-1)[inactive])
    for slot in (0, -1):  # belongs to no segment
        assert got.exp_avg[slot] == case.exp_avg[slot]
        assert got.exp_avg_sq[slot] == case.exp_avg_sq[slot]


@pytest.mark.parametrize(
    ("dtype", "layout", "moments", "master", "rounding", "compact"),
    half_of(DTYPES, LAYOUTS, DTYPES[:2], *[(False, True)] * 3),
    ids=name_of,
)
@pytest.mark.parametrize("op", STEP_OPS)
def test_storage(op, dtype, layout, moments, master, rounding, compact, place):
    case = make(
        torch.device(place[0]),
        dtype=dtype,
        moment_dtype=moments,
        mask="ragged" if layout.startswith("run") else "random",
        shapes=[(5, 33), (70,)],
        layout=layout,
    )
    check(op, case, place, compact=compact, master=master, stochastic_rounding=rounding, seed=2**40 + 17)


def copied(arguments):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


# Masters are not rounded stochastically, and the states are fp32.
HELD = (("weights", False), ("weights", True), ("master", False))


@pytest.mark.parametrize(("dtype", "layout", "held_and_rounding"), half_of(DTYPES, LAYOUTS, HELD), ids=name_of)
@pytest.mark.parametrize("op", STEP_OPS)
def test_params_that_need_not_be_read(op, dtype, layout, held_and_rounding, place):
    """The bits of a step that reads them; and where nothing changes, whatever they hold stays."""
    held, rounding = held_and_rounding
    device, backend = torch.device(place[0]), place[1]
    case = make(device, dtype=dtype, mask="ragged" if layout.startswith("run") else "random", layout=layout)
    case.lr.fill_(1e-5)  # changes nearly all weights in fp32, and few of those in 16 bits
    options = {"stochastic_rounding": rounding, "seed": 5, "master": held == "master"}
    if held == "master":
        for i, param in enumerate(case.params):
            param.view(-1)[case.positions(i).to(device)] = case.master[case.starts[i] : case.ends[i]].to(dtype)
    expected, got = case.clone(), case.clone()
    known = {"params_hold_master": True} if held == "master" else {"weights": got.taken()}
    reference, known_to_reference = case.clone(), copied(known)
    unread = got.clone()
    for param in unread.params:
        param.fill_(-7.0)
    run_step(op, unread, backend, **options, **copied(known))
    for round in range(2):
        before = [param.clone() for param in expected.params]
        run_step(op, expected, "reference", **options)
        run_step(op, got, backend, **options, **known)
        run_step(op, reference, "reference", **options, **known_to_reference)
        if round == 0:
            for i, (param, old, new) in enumerate(zip(unread.params, before, expected.params, strict=True)):
                changed = bits_of(old) != bits_of(new)
                if layout.startswith("run"):  # where one element of a vector of four changes, all may be written
                    vectors = changed[case.positions(i).to(device)].view(-1, 4).any(1).repeat_interleave(4)
                    may_change = changed.clone()
                    may_change[case.positions(i).to(device)] = vectors
                else:
                    may_change = changed
                assert torch.equal(bits_of(param)[changed], bits_of(new)[changed])
                assert (param.view(-1)[~may_change] == -7.0).all()
        for c in (expected, got, reference):
            c.steps += 1
    assert_same_bits(got, expected)
    assert_same_bits(reference, expected)
    if held == "weights":
        assert torch.equal(bits_of(known["weights"]), bits_of(got.taken()))


# The CUDA kernels keep lists of up to 16 changes of 256 slots, and bits of more.
N_CHANGES = (0, 1, 15, 16, 17, 100, 255, 256)


def changing(case, seed=0):
    """Set gradients, states and weights to zero, but for so many of each 256 slots; return which."""
    generator, (device, nnz) = torch.Generator().manual_seed(seed), (case.grad.device, case.nnz)
    chosen = torch.zeros(nnz, dtype=torch.bool)
    for i, (start, end) in enumerate(zip(case.starts, case.ends, strict=True)):
        for number, first in enumerate(range(start // 32 * 32, end, 256)):
            slots = range(max(first, start), min(first + 256, end))
            shuffled = torch.randperm(len(slots), generator=generator)
            chosen[slots[0] + shuffled[: N_CHANGES[(number + i) % len(N_CHANGES)]]] = True
    chosen = chosen.to(device)
    for compact in (case.grad, case.exp_avg, case.exp_avg_sq):
        compact.copy_(chosen * (0.5 + torch.rand(nnz, generator=generator)).to(device))
    for i, (param, start, end) in enumerate(zip(case.params, case.starts, case.ends, strict=True)):
        values = (0.25 + 0.5 * torch.rand(end - start, generator=generator)).to(device)
        param.view(-1)[case.positions(i).to(device)] = (values * chosen[start:end]).to(param.dtype)
    case.master.copy_(case.taken())
    return chosen


# Alignment and the width of indices choose how slots are read, the dtype how a parameter is written.
@pytest.mark.parametrize("aligned", [True, False], ids=["", "unaligned"])
@pytest.mark.parametrize("held", ["weights", "master"])
@pytest.mark.parametrize(
    ("dtype", "index_dtype"),
    [(torch.float32, torch.int32), (torch.float16, torch.int64), *((d, torch.uint16) for d in DTYPES[:2])],
    ids=name_of,
)
@pytest.mark.parametrize("op", STEP_OPS)
def test_few_and_many_changes_of_params_that_are_not_read(op, dtype, index_dtype, held, aligned, place):
    device, backend = torch.device(place[0]), place[1]
    slow = place == ("cpu", "triton")  # in the interpreter
    shapes = [(2100,), (3,), (700,)] if slow else [(2 * 8192 + 2100,), (3,), (8192,), (700,)]
    narrow = index_dtype == torch.uint16
    layout = {"layout": "narrow"} if narrow else {"index_dtype": index_dtype}
    case = make(device, dtype=dtype, mask="full", shapes=shapes, **layout)
    assert case.starts[0] % 32 != 0
    chosen = changing(case)
    got = case.clone()
    if not aligned:
        got.exp_avg, got.grad = behind_its_beginning(got.exp_avg), behind_its_beginning(got.grad)
    known = {"params_hold_master": True} if held == "master" else {"weights": got.taken()}
    if held == "weights":
        known["weights"][[0, -1]] = 7.0  # of no segment
    expected_known = copied(known)
    sentinel = [param.fill_(-7.0) for param in got.params]
    run_step(op, case, "reference", master=held == "master", **expected_known)
    run_step(op, got, backend, master=held == "master", **known)
    for i, (param, new) in enumerate(zip(sentinel, case.params, strict=True)):
        changes = chosen[case.starts[i] : case.ends[i]]
        at = case.positions(i).to(device)
        assert torch.equal(bits_of(param)[at[changes]], bits_of(new)[at[changes]])
        assert (param.view(-1)[at[~changes]] == -7.0).all()
        new.copy_(param)
    assert_same_bits(got, case)
    if held == "weights":
        assert torch.equal(bits_of(known["weights"]), bits_of(expected_known["weights"]))


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("op", STEP_OPS)
def test_unaligned_tensors(op, dtype, layout, compact, place):
    """Views into storage, and tensors from DLPack, may begin at any element."""
    expected = make(torch.device(place[0]), dtype=dtype, mask="ragged", layout=layout)
    got = expected.clone()
    for name in ("params", "dense_grads"):
        setattr(got, name, [behind_its_beginning(tensor) for tensor in getattr(got, name)])
    for name in ("indices", "grad", "exp_avg", "exp_avg_sq", "master", "steps", "lr"):
        setattr(got, name, behind_its_beginning(getattr(got, name)))
    for c, backend in ((expected, "reference"), (got, place[1])):
        run_step(op, c, backend, compact=compact, master=dtype != torch.float32)
    assert_same_bits(got, expected)


@pytest.mark.parametrize(
    ("layout", "compact", "index_dtype", "grad_dtype"),
    half_of(LAYOUTS, (True, False), (torch.int32, torch.int64), DTYPES),
    ids=name_of,
)
@pytest.mark.parametrize("op", STEP_OPS)
def test_gradient_and_index_dtypes(op, layout, compact, index_dtype, grad_dtype, place):
    case = make(
        torch.device(place[0]),
        dtype=torch.bfloat16,
        grad_dtype=grad_dtype,
        index_dtype=index_dtype,
        layout=layout,
    )
    check(op, case, place, rounds=1, compact=compact)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize("layout", ["element", "narrow"])
@pytest.mark.parametrize("op", STEP_OPS)
def test_lengths_next_to_block_lengths(op, layout, compact, place):
    """All in fp32; a step on a CPU prefetches up to 640 slots ahead, in blocks of 64."""
    slow = place == ("cpu", "triton")  # in the interpreter, whose blocks have 1024 slots
    lengths = [n + off for n in (16, 256, 512, 768, 1024, 2048, *([] if slow else [8192])) for off in (-1, 0, 1)]
    case = make(torch.device(place[0]), shapes=[(n,) for n in lengths], mask="full", layout=layout)
    case.extra["grad_scale"] = torch.tensor([3.0], device=place[0])
    case.extra["clip_coef"] = torch.tensor([0.7], device=place[0])
    check(op, case, place, compact=compact)
    scattered = make(torch.device(place[0]), shapes=[(6000 if slow else 60000,), (3,), (9000,)], layout=layout)
    check(op, scattered, place, compact=compact)


@pytest.mark.parametrize(
    ("dtype", "layout", "moments"), half_of(DTYPES, ["element", "narrow"], DTYPES[:2]), ids=name_of
)
@pytest.mark.parametrize("op", STEP_OPS)
def test_elements_far_apart(op, dtype, layout, moments, place):
    """At most as many active elements as granules; lists around a table's size."""
    long = dtype == torch.bfloat16 and place != ("cpu", "triton")  # slow in the interpreter, and Triton has one table
    shapes = [(41, 1 + 3400 // (i + 1)) for i in range(12 if long else 3)]
    device = torch.device(place[0])
    case = make(device, dtype=dtype, moment_dtype=moments, mask="far-apart", shapes=shapes, layout=layout)
    assert case.ends[0] - case.starts[0] > 2 * 640  # several blocks
    assert case.numel * dtype.itemsize >= 64 * case.nnz
    check(op, case, place, compact=False, stochastic_rounding=moments == torch.bfloat16)


@pytest.mark.parametrize(
    ("which", "compact"),
    [("grad", True), ("dense_grads", False), ("params", False), ("exp_avg", False), ("master", False)],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("op", STEP_OPS)
def test_runs_in_buffers_that_no_vector_fits(op, which, compact, place):
    device, backend = place
    case = make(torch.device(device), dtype=torch.bfloat16, layout="run16")
    expected, got = case.clone(), case.clone()
    held = getattr(got, which)
    moved = [behind_its_beginning(t) for t in held] if isinstance(held, list) else behind_its_beginning(held)
    setattr(got, which, moved)
    for c, name in ((expected, "reference"), (got, backend)):
        run_step(op, c, name, compact=compact, master=True)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("layout", ["run2", "run8", "run128", "run2048"])
@pytest.mark.parametrize("op", STEP_OPS)
def test_runs_shorter_than_a_vector_and_longer_than_a_block(op, layout, place):
    shapes = [(5, 1031), (2047,), (3, 2100)]
    case = make(torch.device(place[0]), dtype=torch.bfloat16, mask="ragged", shapes=shapes, layout=layout)
    check(op, case, place, compact=False, stochastic_rounding=True)


@pytest.mark.parametrize("op", STEP_OPS)
def test_offsets_past_the_sign_bit(op, place):
    """256 elements that span nearly all that two bytes can hold, and segments that begin and end inside a frame."""
    case = make(torch.device(place[0]), dtype=torch.bfloat16, mask="empty", shapes=[(300_000,), (3,), (70_001,)])
    far = torch.arange(0, 300_000, 254, dtype=torch.int32)
    picked = [far, torch.tensor([0, 2]), far[far < 70_001]]
    ends = torch.tensor([len(p) for p in picked]).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    nnz = ends[-1]
    generator = torch.Generator().manual_seed(1)
    for name in ("grad", "exp_avg", "exp_avg_sq", "master"):
        random = torch.rand(nnz, generator=generator).to(getattr(case, name))
        setattr(case, name, random)
    indices, bases = narrow_indices(torch.cat(picked).int(), starts, ends)
    assert int(indices.int().max()) > 2**15
    case.indices, case.index_bases = indices.to(place[0]), bases.to(place[0])
    case.starts, case.ends = starts, ends
    for i, positions in enumerate(picked):
        assert torch.equal(case.positions(i).cpu(), positions.long())
    check(op, case, place, compact=False)


@pytest.mark.parametrize("op", STEP_OPS)
def test_runs_are_their_elements(op, any_place):
    """One index per run gives the same bits as one index per element."""
    device, backend = any_place
    case = make(torch.device(device), dtype=torch.bfloat16, layout="run16")
    elements = case.clone()
    outside = torch.zeros(16, dtype=torch.int64)
    positions = [outside, *(case.positions(i) for i in range(len(case.params))), outside]
    elements.indices, elements.run_length = torch.cat(positions).int().to(device), 1
    for c in (case, elements):
        run_step(op, c, backend, compact=False, stochastic_rounding=True)
    case.indices = elements.indices
    assert_same_bits(case, elements)


@pytest.mark.parametrize("step", [1, 2, 1000, 2**24 - 20])
@pytest.mark.parametrize("op", STEP_OPS)
def test_step_counts(op, step, place):
    check(op, make(torch.device(place[0]), step=step, shapes=[(5, 33), (70,)]), place)


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize(("op", "options"), VARIANTS, ids=str)
def test_variants(op, options, step, place):
    check(op, make(torch.device(place[0]), step=step), place, **options)


@pytest.mark.parametrize("op", STEP_OPS)
def test_device_scalars(op, place):
    device = torch.device(place[0])
    for names in itertools.chain.from_iterable(
        itertools.combinations(("clip_coef", "grad_scale", "found_inf"), n) for n in (1, 2, 3)
    ):
        case = make(device, shapes=[(5, 33), (70,)])
        values = {"clip_coef": 0.37, "grad_scale": 1.5, "found_inf": 0.0}
        case.extra = {n: torch.tensor([values[n]], device=device) for n in names}
        check(op, case, place, rounds=1)


@pytest.mark.parametrize("held", ["", "master", "weights"])
@pytest.mark.parametrize("op", STEP_OPS)
def test_found_inf_changes_nothing(op, held, any_place):
    device, backend = any_place
    case = make(torch.device(device), dtype=torch.bfloat16)
    case.extra = {"found_inf": torch.tensor([math.inf], device=device)}
    case.grad.fill_(math.nan)
    got = case.clone()
    weights = {"weights": got.taken()} if held == "weights" else {}
    run_step(op, got, backend, master=held == "master", **weights)
    assert_same_bits(got, case)
    assert not weights or torch.equal(weights["weights"], case.taken())


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize("rounding", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("op", STEP_OPS)
def test_nonfinite_gradients_stay_where_they_are(op, dtype, rounding, compact, place):
    case = make(torch.device(place[0]), dtype=dtype, mask="full", shapes=[(5, 33), (70,)])
    for bad, at in ((math.nan, 3), (math.inf, 8), (-math.inf, 20)):
        case.grad[at + 1] = bad
        case.dense_grads[0].view(-1)[at] = bad
    got = check(op, case, place, rounds=1, compact=compact, stochastic_rounding=rounding)
    wrong = ~got.params[0].view(-1).isfinite()
    assert set(wrong.nonzero().view(-1).tolist()) <= {3, 8, 20}
    assert wrong[3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("op", STEP_OPS)
def test_extreme_values_round_alike(op, dtype, place):
    """Subnormals, the largest finite values and ties, in a step that does not change the weight (lr 0)."""
    device = torch.device(place[0])
    case = make(device, dtype=dtype, mask="full", shapes=[(256,)])
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    values = torch.cat([torch.linspace(-2, 2, 128) * tiny, torch.linspace(0.9, 1.1, 128) * largest]).to(device)
    case.master[1:-1] = values
    case.lr.zero_()
    for rounding in (False, True):
        check(op, case, place, rounds=1, master=True, weight_decay=0.0, stochastic_rounding=rounding)


def test_stochastic_rounding_repeats_itself_and_depends_on_seed_step_and_element(any_place):
    device, backend = any_place
    case = make(torch.device(device), dtype=torch.bfloat16, mask="full", shapes=[(1024,)])
    case.params[0].fill_(1.0)
    case.grad.fill_(1.0)
    case.lr.fill_(1e-3)

    def run(seed, step):
        c = case.clone()
        c.steps.fill_(step)
        options = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
        run_step("indexed_sgd_", c, backend, **options, stochastic_rounding=True, seed=seed)
        return c.params[0]

    assert torch.equal(run(1, 5), run(1, 5))
    assert not torch.equal(run(1, 5), run(2, 5))
    assert not torch.equal(run(1, 5), run(1, 6))
    result = run(1, 5).float()
    # 1 - 1e-3 is between 1 - 2^-8 and 1: a share p = 1e-3 * 256 goes down. 4 standard deviations of a mean of 1024.
    down, p = (result < 1).float().mean().item(), 1e-3 * 256
    assert set(result.unique().tolist()) == {1.0, 1.0 - 2.0**-8}
    assert abs(down - p) < 4 * math.sqrt(p * (1 - p) / 1024)


@pytest.mark.parametrize("seed", [2**31, 2**32 - 1, 2**62 + 2**31, 2**63 - 1])
@pytest.mark.parametrize("op", STEP_OPS)
def test_seeds_of_any_width(op, seed, place):
    """Those that fill the sign bit of a word, which Triton and its interpreter hold in different types, among them."""
    case = make(torch.device(place[0]), dtype=torch.bfloat16, moment_dtype=torch.bfloat16, shapes=[(5, 33), (70,)])
    check(op, case, place, stochastic_rounding=True, seed=seed)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "dense"])
@pytest.mark.parametrize("op", STEP_OPS)
def test_empty_list(op, compact, any_place):
    device, backend = any_place
    case = make(torch.device(device), shapes=[(3,)], mask="empty")
    case.params, case.dense_grads, case.starts, case.ends, case.steps = [], [], [], [], case.steps[:0]
    run_step(op, case, backend, compact=compact)


# The shapes of an op, and what it writes, depend on layout and gradient alone: each layout has one dtype.
@pytest.mark.parametrize(
    ("layout", "dtype", "compact"),
    [("element", torch.float32, True), ("narrow", torch.bfloat16, False), ("run16", torch.float16, True)],
    ids=name_of,
)
@pytest.mark.parametrize("op", STEP_OPS)
def test_opcheck(op, layout, dtype, compact, any_place):
    device, backend = any_place
    shapes = [(3, 21), (4,)]
    case = make(torch.device(device), dtype=dtype, mask="ragged", shapes=shapes, layout=layout)
    arguments, keywords = step_call(op, case, compact=compact, master=True)
    torch.library.opcheck(getattr(torch.ops.sparse_opt, op).default, arguments, {**keywords, "backend": backend})


@pytest.mark.parametrize("op", STEP_OPS)
def test_versions_are_bumped(op, any_place):
    device, backend = any_place
    case = make(torch.device(device))
    written = [*case.params, *case.states[: len(STEP_OPS[op].states)], case.master]
    before = [t._version for t in written]
    run_step(op, case, backend, master=True)
    assert all(t._version > version for t, version in zip(written, before, strict=True))


ULP = 2.0**-24  # the largest relative error of one fp32 operation
BETAS = (0.0, 0.1, 0.3, 0.4999, 0.5, 0.5001, 0.9)
LR = 1e-3


@pytest.mark.parametrize("beta1", BETAS)
def test_adamw_averages_gradients_of_any_magnitude_as_torch_does(beta1, any_place):
    """exp_avg after two steps, for each pair of a first and a second gradient of one sign from 1e-8 to 1e4.

    No terms cancel: both libraries are within three roundings of the exact average, for the larger of the products is
    no larger than the result.
    """
    device, backend = any_place
    magnitudes = torch.logspace(-8, 4, 25)
    first, second = torch.cartesian_prod(magnitudes, magnitudes).to(device).unbind(1)
    first, second = torch.cat([first, -first]), torch.cat([second, -second])
    n = first.numel()
    indices, lr = torch.arange(n, dtype=torch.int32, device=device), torch.tensor([LR], device=device)
    p, exp_avg, exp_avg_sq = torch.zeros(3, n, device=device)
    theirs = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([theirs], lr=LR, betas=(beta1, 0.999), foreach=False, fused=False)
    for step, g in enumerate((first, second), start=1):
        steps = torch.tensor([float(step)], device=device)
        state = exp_avg, exp_avg_sq, lr, steps
        ops.indexed_adamw_([p], indices, [0], [n], *state, grad=g, beta1=beta1, backend=backend)
        theirs.grad = g
        optimizer.step()
    torch.testing.assert_close(exp_avg, optimizer.state[theirs]["exp_avg"], rtol=6 * ULP, atol=0)
    if beta1 == 0.0:
        assert torch.equal(exp_avg, second)
