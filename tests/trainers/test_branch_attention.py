"""Attention of rows with a shared prompt in separate rows: equal to that under the mask of `branch_mask`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparse_opt.trainers.policy.branch_attention import BranchRow, Pieces, SeparateRows, lay_out, supports
from sparse_opt.trainers.policy.logprobs.branch_mask import branch_mask

N_TOKENS = 80
ROWS = {
    "two completions": [BranchRow(20, [30, 50]), BranchRow(33, [60, 70]), BranchRow(2, [41, 80])],
    "one token each": [BranchRow(20, [21, 22]), BranchRow(1, [2, 3])],
    "one completion": [BranchRow(33, [60])],
    "nothing shared": [BranchRow(0, [40, 75]), BranchRow(0, [80])],
    "one to five completions": [
        BranchRow(9, [14, 16, 24, 28, 60]),
        BranchRow(14, [21, 28, 31]),
        BranchRow(0, [40, 80]),
        BranchRow(33, [60]),
    ],
}


def branches_of(rows):
    """As `collate_shared_prompts` makes them: 0 in shared tokens, then 1, 2, ...; the last with the padding."""
    branches = torch.zeros(len(rows), N_TOKENS, dtype=torch.int64)
    for number, row in enumerate(rows):
        for branch, (start, _) in enumerate(row.own()):
            branches[number, start:] = branch + 1
    return branches


def is_token(rows):
    return torch.arange(N_TOKENS) < torch.tensor([row.ends[-1] for row in rows])[:, None]


def inputs(rows, n_kv_heads=2, dtype=torch.float64, device="cpu"):
    """Query, key and value, as views of [B, T, heads, size], and the gradient of the output, which padding lacks."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(len(rows), N_TOKENS, n_heads, 16, generator=generator, dtype=torch.float64)
        for n_heads in (4, n_kv_heads, n_kv_heads, 4)
    ]
    parts[3] *= is_token(rows)[:, :, None, None]
    query, key, value, grad = (part.to(device, dtype) for part in parts)
    return [part.transpose(1, 2).requires_grad_() for part in (query, key, value)], grad


def masked(query, key, value, branches, scaling):
    n_groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(n_groups, 1) for part in (key, value))
    mask = branch_mask(branches, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2)


def assert_equals_masked(rows, layout, n_kv_heads=2, scaling=None):
    parts, grad = inputs(rows, n_kv_heads)
    found, expected = layout.attend(*parts, scaling), masked(*parts, branches_of(rows), scaling)
    of_token = is_token(rows)
    # Sums of at most 80 products, in two orders; a gradient sums those of up to five sequences and two heads.
    atol = 10 * 80 * 2**-52 * 16
    torch.testing.assert_close(found[of_token], expected[of_token], rtol=0, atol=atol)
    assert found.isfinite().all()
    grads, expected_grads = (torch.autograd.grad(output, parts, grad) for output in (found, expected))
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
        assert not ours.transpose(1, 2)[~of_token].any()


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_separate_rows_are_the_attention_of_a_mask(name, n_kv_heads):
    assert_equals_masked(ROWS[name], SeparateRows.of(ROWS[name], N_TOKENS), n_kv_heads)


def test_scaling():
    rows = ROWS["two completions"]
    assert_equals_masked(rows, SeparateRows.of(rows, N_TOKENS), scaling=0.6)


def test_a_layout_in_which_completions_see_each_other_differs():
    rows = ROWS["two completions"]
    wrong = SeparateRows.of([BranchRow(row.n_shared, row.ends[-1:]) for row in rows], N_TOKENS)
    with pytest.raises(AssertionError, match="not close"):
        assert_equals_masked(rows, wrong)


def test_tokens_depend_only_on_their_own_completion_and_the_shared_ones():
    rows = ROWS["one to five completions"]
    layout, branches = SeparateRows.of(rows, N_TOKENS), branches_of(rows)
    parts, _ = inputs(rows)
    before = layout.attend(*parts, None)
    for branch in (1, 2, 3):
        changed = (branches == branch) & is_token(rows)
        others = [torch.where(changed[:, None, :, None], part + 1, part) for part in parts]
        after = layout.attend(*others, None)
        same = ~changed & is_token(rows)
        assert torch.equal(after[same], before[same])
        assert (after[changed] != before[changed]).any(dim=(1, 2)).all()


def assert_as_good(ours, theirs, exact):
    """An error of at most twice theirs, but for the rounding of the values themselves."""
    rounding = torch.finfo(ours.dtype).eps / 2 * exact.norm()
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + rounding


@pytest.mark.parametrize("name", ROWS)
def test_gradients_in_bf16_are_as_good_as_those_of_a_mask(name):
    rows = ROWS[name]
    exact_parts, exact_grad = inputs(rows)
    exact = torch.autograd.grad(masked(*exact_parts, branches_of(rows), None), exact_parts, exact_grad)
    parts, grad = inputs(rows, dtype=torch.bfloat16)
    found, theirs = (
        torch.autograd.grad(output, parts, grad)
        for output in (
            SeparateRows.of(rows, N_TOKENS).attend(*parts, None),
            masked(*parts, branches_of(rows), None),
        )
    )
    for ours, other, expected in zip(found, theirs, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert_as_good(ours, other, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ROWS)
def test_separate_rows_on_a_gpu_are_as_good_as_a_mask(name, dtype, compiled):
    rows, device = ROWS[name], torch.device("cuda")
    layout = SeparateRows.of(rows, N_TOKENS).map(lambda tensor: tensor.to(device))
    assert supports(layout, dtype, device)
    branches, of_token = branches_of(rows).to(device), is_token(rows).to(device)

    def attend(query, key, value):
        return layout.attend(query, key, value, None)

    def results(attention, dtype):
        parts, grad = inputs(rows, dtype=dtype, device=device)
        output = attention(*parts)
        return output[of_token], *torch.autograd.grad(output, parts, grad)

    def by_mask(*parts):
        return masked(*parts, branches, None)

    exact = results(by_mask, torch.float64)
    found = results(torch.compile(attend) if compiled else attend, dtype)
    for ours, theirs, expected in zip(found, results(by_mask, dtype), exact, strict=True):
        assert ours.dtype == dtype
        assert_as_good(ours, theirs, expected)


@pytest.mark.gpu
def test_copies_on_a_gpu_are_deterministic(monkeypatch):
    """With a deterministic attention: the kernels of torch's own need not be."""
    rows, device = ROWS["one to five completions"], torch.device("cuda")
    layout = SeparateRows.of(rows, N_TOKENS).map(lambda tensor: tensor.to(device))

    def results():
        parts, grad = inputs(rows, dtype=torch.bfloat16, device=device)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            output = layout.attend(*parts, None)
        return output, *torch.autograd.grad(output, parts, grad)

    first = results()
    for _ in range(5):
        assert all(map(torch.equal, results(), first))


# Which of the two


def row_of(n_shared, n_own):
    """A row of completions with these numbers of tokens."""
    return BranchRow(n_shared, [n_shared + sum(n_own[: i + 1]) for i in range(len(n_own))])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row_of(383, [129, 129])] * 16, SeparateRows),
        ([row_of(511, [513, 400])] * 4, SeparateRows),
        ([row_of(383, [129])], SeparateRows),
        ([row_of(0, [512, 512])], SeparateRows),
        ([row_of(2047, [129] * 16)], Pieces),
        ([row_of(383, [129] * 8)], Pieces),
        ([row_of(1000, [9, 9])], Pieces),  # the prompt's pairs twice
        ([row_of(383, [129, 129]), *[row_of(99, [29, 29])] * 15], Pieces),  # mostly padding
    ],
    ids=["pairs", "long completions", "one completion", "nothing shared", "16 completions", "8 completions",
         "short completions", "one long pair"],
)  # fmt: skip
def test_the_way_follows_from_the_numbers_of_pairs(rows, expected):
    assert type(lay_out(rows, max(row.ends[-1] for row in rows))) is expected


def test_no_rows():
    layout = lay_out([], 8)
    assert all(tensor.shape[0] == 0 for tensor in layout if isinstance(tensor, torch.Tensor))


def test_neither_way_replaces_the_mask_on_a_cpu():
    rows = ROWS["two completions"]
    for layout in (Pieces.of(rows, N_TOKENS), SeparateRows.of(rows, N_TOKENS)):
        assert not supports(layout, torch.bfloat16, torch.device("cpu"))
