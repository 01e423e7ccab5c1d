"""offload_base_weights: the same bits, and on a GPU no memory outside of base_weights()."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn

from sparse_opt import GraphedStep, MaskSet, SparseAdamW

OPTIONS = {
    "swapped": {},
    "replaced": {"compact_weights": True, "stochastic_rounding": True},
    "replaced by masters": {"compact_weights": True, "master_weights": True},
}


@pytest.fixture(params=OPTIONS)
def options(request):
    return OPTIONS[request.param]


def make(device, *, offload, lr=1e-3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256, bias=False)).to(device, torch.bfloat16)
    mask = MaskSet.random(model, density=0.25, seed=1)
    return model, SparseAdamW(model, mask, lr=lr, offload_base_weights=offload, **options)


def train(model, optimizer, seeds):
    device = next(model.parameters()).device
    for seed in seeds:
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)
        with torch.no_grad(), optimizer.base_weights():
            base = model(x)
        (model(x) - base + 0.1).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same(found, expected):
    for a, b in itertools.zip_longest(found, expected):
        assert torch.equal(a, b)


def test_training_has_the_same_bits(device, options):
    (model, ours), (plain, theirs) = make(device, offload=True, **options), make(device, offload=False, **options)
    start = weights(model)
    for _ in range(2):
        for pair in ((model, ours), (plain, theirs)):
            train(*pair, range(2))
        assert_same(weights(model), weights(plain))
        with ours.base_weights():
            assert_same(weights(model), start)
        assert_same(weights(model), weights(plain))
    assert any(not torch.equal(a, b) for a, b in zip(weights(model), start, strict=True))
    assert ours.nbytes() == theirs.nbytes()


def test_another_mask_and_saved_states(device, options):
    (model, ours), (plain, theirs) = make(device, offload=True, **options), make(device, offload=False, **options)
    start = weights(model)
    wider = MaskSet.random(model, density=0.4, seed=2)
    for pair in ((model, ours), (plain, theirs)):
        train(*pair, [0])
        pair[1].set_mask(wider)
        train(*pair, [1])
    assert_same(weights(model), weights(plain))
    with ours.base_weights():
        assert_same(weights(model), start)
    saved, other = ours.state_dict(), make(device, offload=True, **options)
    for entry, expected in zip(saved["state"].values(), theirs.state_dict()["state"].values(), strict=True):
        assert torch.equal(entry["base"].to(device), expected["base"])
    other[0].load_state_dict(model.state_dict())
    other[1].set_mask(wider)
    other[1].load_state_dict(saved)
    with other[1].base_weights():
        assert_same(weights(other[0]), start)
    assert_same(weights(other[0]), weights(model))


def test_an_error_inside_restores_the_weights(device, options):
    model, optimizer = make(device, offload=True, **options)
    train(model, optimizer, [0])
    trained = weights(model)
    with pytest.raises(KeyError), optimizer.base_weights():
        raise KeyError
    assert_same(weights(model), trained)
    train(model, optimizer, [1])


def test_base_weights_must_be_kept():
    with pytest.raises(ValueError, match="offload_base_weights=True needs keep_base_weights=True"):
        make("cpu", offload=True, keep_base_weights=False)


@pytest.mark.gpu
def test_the_gpu_holds_them_only_inside(options):
    train(*make("cuda", offload=False, **options), range(2))  # loads kernels, and allocates torch's workspaces
    sizes = {}
    for offload in (False, True):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, optimizer = make("cuda", offload=offload, **options)
        train(model, optimizer, range(2))
        sizes[offload] = torch.cuda.memory_allocated() - before
        if offload:
            with optimizer.base_weights():
                inside = torch.cuda.memory_allocated() - before
        base = optimizer.nbytes()["base"]
        del model, optimizer
    assert base > 2**17
    assert sizes[False] - sizes[True] == pytest.approx(base, abs=2**12)  # the allocator rounds sizes up
    assert inside - sizes[True] == pytest.approx(base, abs=2**12)
    _, optimizer = make("cuda", offload=True, **options)
    values = [entry["base"] for entry in optimizer.state.values()]
    assert values and all(value.is_pinned() for value in values)


@pytest.mark.gpu
def test_a_graph_of_whole_steps_has_the_same_bits(options):
    xs = [torch.randn(8, 256, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    trained = []
    for graphed in (False, True):
        lr = torch.tensor(1e-3, device="cuda")
        model, optimizer = make("cuda", offload=True, lr=lr, **options)

        def step(x, model=model, optimizer=optimizer):
            with torch.no_grad(), optimizer.base_weights():
                base = model(x)
            loss = (model(x) - base + 0.1).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = GraphedStep(step, optimizer) if graphed else step
        for x in xs:
            call(x)
        trained.append(weights(model))
    assert_same(*trained)
