"""Two-byte indices in the optimizers: the same bits as with int32 indices, and half their memory."""

import copy

import pytest
import torch
from small_runs import same_state

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.optim import segments


def make_model(device):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(300, 400), torch.nn.Tanh(), torch.nn.Linear(400, 300), torch.nn.Linear(300, 8)]
    return torch.nn.Sequential(*layers).to(device, torch.bfloat16)


def make_mask(model, seed=0):
    """3 % of each layer, except for the second one: two elements at its two ends."""
    mask = MaskSet.random(model, density=0.03, seed=seed)
    far = torch.tensor([seed, 119_999], dtype=mask["2.weight"].dtype)
    return MaskSet({**mask.indices, "2.weight": far}, mask.shapes, pattern="element")


def train(model, optimizer, seeds, first=0):
    """Train the layers from the `first` one on: the parameters of the others have no gradient."""
    for seed in seeds:
        for micro_batch in range(2):
            x = torch.randn(4, 300, generator=torch.Generator().manual_seed(2 * seed + micro_batch))
            with torch.no_grad():
                x = model[:first](x.to(model[0].weight))
            model[first:](x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def both(sparse_optimizer, device, monkeypatch):
    """`both(**options)`: a model and its optimizer with narrow indices, and the same with int32 ones."""

    def build(**options):
        pairs = []
        for narrow in (True, False):
            with monkeypatch.context() as patch:
                if not narrow:
                    patch.setattr(segments, "can_narrow", lambda positions: False)
                model = make_model(device)
                pairs.append((model, sparse_optimizer(model, make_mask(model), lr=1e-2, **options)))
        return pairs

    return build


def test_only_scattered_elements_have_indices_of_four_bytes(device):
    model = make_model(device)
    mask = make_mask(model)
    optimizer = SparseAdamW(model, mask)
    assert [(buffer.indices.dtype, buffer.names) for buffer in optimizer.gradient_buffers] == [
        (torch.uint16, ["0.weight", "0.bias", "2.bias", "3.weight"]),
        (torch.int32, ["2.weight"]),
    ]
    narrow = optimizer.gradient_buffers[0]
    expected = 2 * narrow.nnz + 4 * (narrow.nnz // 256 + 4) + 4 * 2
    assert optimizer.nbytes()["indices"] == expected
    state = optimizer.state_dict()["state"]
    for i, name in enumerate(optimizer.param_groups[0]["param_names"]):
        if mask[name].numel():
            assert state[i]["indices"].dtype == torch.int32
            assert torch.equal(state[i]["indices"].cpu(), mask[name].int())


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_training_gives_the_same_bits(grads, both):
    (narrow, a), (wide, b) = both(grads=grads, master_weights=True)
    for model, optimizer in ((narrow, a), (wide, b)):
        train(model, optimizer, range(4))
        train(model, optimizer, range(4, 6), first=2)  # a call with some of the segments
        train(model, optimizer, range(6, 8), first=3)
    assert same_state(a, b)
    for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_base_weights_and_a_new_mask(both):
    (narrow, a), (wide, b) = both()
    start = [p.detach().clone() for p in narrow.parameters()]
    for model, optimizer in ((narrow, a), (wide, b)):
        train(model, optimizer, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, range(3, 5))
        optimizer.load_state_dict(saved)  # moments of three steps, weights of five
        optimizer.set_mask(make_mask(model, seed=1))
        train(model, optimizer, range(5, 7))
        with optimizer.base_weights():
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
    assert same_state(a, b)
    # For each element of both masks 2 bytes of value and 2 of index, and 4 for every 256 of them and every parameter.
    masks = make_mask(narrow), make_mask(narrow, seed=1)
    nnz = sum(torch.cat([mask[name] for mask in masks]).unique().numel() for name in masks[0].indices)
    assert 4 * nnz < a.nbytes()["base"] < 4.1 * nnz


def test_a_tensor_that_int32_does_not_reach_keeps_int64():
    large = torch.empty(2**31 + 1, dtype=torch.bfloat16, device="meta")
    positions = torch.arange(1000)
    assert not segments.fits_uint16(large, positions, 1)
    assert segments.fits_uint16(large[: 2**31 - 1], positions, 1)
    assert not segments.fits_uint16(large[: 2**31 - 1], positions, 16)
