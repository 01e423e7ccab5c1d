"""Different parameters that share memory are refused, but for views of separate parts of it."""

import pytest
import torch
from torch import nn

from sparse_opt import MaskSet, SparseAdamW, SparseSGD


class Two(nn.Module):
    """Two layers of the same sizes, and their parameters."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        self.a.weight, self.b.weight = a, b


def full_mask(model, *names):
    params = dict(model.named_parameters(remove_duplicate=False))
    return MaskSet.from_bool({n: torch.ones(params[n].shape, dtype=torch.bool) for n in names})


def same_memory(device):
    a = nn.Parameter(torch.randn(4, 6, device=device))
    return Two(a, nn.Parameter(a.data))


def an_edge(device):
    flat = torch.randn(40, device=device)
    return Two(nn.Parameter(flat[:24]), nn.Parameter(flat[23:]))


def every_second(device):
    """The second is not contiguous, and so frozen."""
    flat = torch.randn(40, device=device)
    return Two(nn.Parameter(flat[:24]), nn.Parameter(flat[21::2]))


OVERLAPS = [same_memory, an_edge, every_second]


@pytest.mark.parametrize("make", OVERLAPS)
@pytest.mark.parametrize("active", ["a.weight", "b.weight"])
def test_overlapping_parameters_are_refused(make, active, device):
    """Whichever of the two is active: a frozen one would change with it."""
    model = make(device)
    mask = full_mask(model, active)
    message = "a.weight and b.weight are different parameters that share memory"
    with pytest.raises(ValueError, match=message) as raised:
        SparseAdamW(model, mask)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=message):
        SparseAdamW(list(model.named_parameters()), mask)
    with pytest.raises(ValueError, match=message):  # the other one is known from the model alone
        SparseAdamW([(active, model.get_parameter(active))], mask, model=model)
    with pytest.raises(ValueError, match=message):
        mask.resolve(model)
    with pytest.raises(ValueError, match=message):
        mask.density_of(model)
    with pytest.raises(ValueError, match=message):
        MaskSet.random(model, density=0.5)
    assert all(p.requires_grad and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_mask_that_would_train_one_of_them_is_refused_later(device):
    model = same_memory(device)
    model.c = nn.Parameter(torch.ones(5, device=device))
    optimizer = SparseSGD(model, full_mask(model, "c"), lr=0.1)  # trains neither
    start = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="a.weight and b.weight are different parameters that share memory"):
        optimizer.set_mask(full_mask(model, "c", "a.weight"))
    assert optimizer.mask.names == ("c",)
    model.c.sum().backward()
    optimizer.step()
    assert [n for n, _ in model.named_parameters()] == ["c", "a.weight", "b.weight"]
    assert [torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True)] == [False, True, True]


def test_views_of_one_storage_may_be_disjoint(device):
    flat = torch.randn(48, device=device)
    copies = [flat[:24].clone().view(4, 6), flat[24:].clone().view(6, 4)]
    fused = Two(nn.Parameter(flat[:24].view(4, 6)), nn.Parameter(flat[24:].view(6, 4)))
    own = Two(*(nn.Parameter(t) for t in copies))
    mask = MaskSet.random(fused, density=0.5)
    for model in (fused, own):
        optimizer = SparseAdamW(model, mask, lr=0.1)
        for _ in range(2):
            (model.a.weight * model.b.weight.view(4, 6)).square().sum().backward()
            optimizer.step()
        with optimizer.base_weights():
            assert torch.equal(model.a.weight, copies[0]) or model is own
    assert all(torch.equal(p, q) for p, q in zip(fused.parameters(), own.parameters(), strict=True))


def test_columns_of_one_matrix_are_refused(device):
    matrix = torch.randn(5, 8, device=device)
    model = Two(nn.Parameter(matrix[:, :4]), nn.Parameter(matrix[:, 4:]))
    with pytest.raises(ValueError, match="a.weight and b.weight are different parameters that share memory"):
        MaskSet.random(model, density=0.5)


def test_parameters_without_memory_share_none():
    with torch.device("meta"):
        model = Two(nn.Parameter(torch.empty(4, 6)), nn.Parameter(torch.empty(4, 6)))
    assert MaskSet.random(model, density=0.5).names == ("a.weight", "b.weight")
    model = Two(nn.Parameter(torch.empty(0, 6)), nn.Parameter(torch.empty(0, 6)))
    model.c = nn.Parameter(torch.ones(3))
    SparseAdamW(model, MaskSet.random(model, density=1.0))
    freed = Two(nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 6)))
    for p in freed.parameters():
        p.untyped_storage().resize_(0)
    assert MaskSet.random(freed, density=0.5).names == ("a.weight", "b.weight")
