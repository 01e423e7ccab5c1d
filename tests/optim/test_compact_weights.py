"""compact_weights: the same training to the bit, and writes by other code are taken over."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparse_opt import MaskSet, SparseAdamW, backends
from sparse_opt.optim.buckets import BucketStep

pytestmark = pytest.mark.usefixtures("few_under_the_interpreter")
KINDS = {
    "copy": {"stochastic_rounding": True, "state_dtype": torch.bfloat16},
    "master": {"master_weights": True},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def make_model(device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 64, bias=False), nn.Linear(64, 7)
    return nn.Sequential(*layers).to(device, dtype)


def pair(device, kind, dtype=torch.bfloat16, pattern="element", make=SparseAdamW, **options):
    """A model with compact weights, its optimizer, and the same without them."""
    made = []
    for compact_weights in (True, False):
        model = make_model(device, dtype)
        mask = MaskSet.random(model, density=0.3, pattern=pattern, seed=1)
        options = {"lr": 1e-3, "max_grad_norm": 1.0, **KINDS[kind], **options}
        made += [model, make(model, mask, compact_weights=compact_weights, **options)]
    return made


def train(model, optimizer, seeds):
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    for seed in seeds:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
        with torch.no_grad(), optimizer.base_weights():
            base = model(x)
        (model(x) - base + 0.1).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


@pytest.mark.parametrize("pattern", ["element", "run32", "tile64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
def test_training_has_the_same_bits(kind, dtype, pattern, device, sparse_optimizer):
    if kind == "copy" and dtype == torch.float32:
        pytest.skip("its weights are their own masters")
    model, ours, plain, theirs = pair(device, kind, dtype, pattern, sparse_optimizer)
    start = copy.deepcopy(plain)
    for _ in range(3):
        train(model, ours, range(2))
        train(plain, theirs, range(2))
        assert same(model, plain)
        with ours.base_weights():
            assert same(model, start)
        assert same(model, plain)
    assert not same(model, start)
    state, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    for key, entry in expected.items():
        assert all(torch.equal(state[key][name], value) for name, value in entry.items())


def test_nothing_is_read_from_the_model(kind, device):
    """Weights that nobody could know are in the model, written where no version counter sees it."""
    model, ours, plain, theirs = pair(device, kind, lr=1e-6)
    train(model, ours, range(1))
    train(plain, theirs, range(1))
    hidden = []
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        hidden.append(p.data.clone())
        p.data.copy_(q.data * 0)
    (model(torch.zeros(1, 64, device=device, dtype=torch.bfloat16)) * 0).sum().backward()
    (plain(torch.zeros(1, 64, device=device, dtype=torch.bfloat16)) * 0).sum().backward()
    before = weights(plain)
    ours.step()
    theirs.step()
    n_changed = 0
    for p, start, q in zip(model.parameters(), before, plain.parameters(), strict=True):
        changed = start != q
        n_changed += int(changed.sum())
        assert torch.equal(p[changed], q[changed]) and (p[~changed] == 0).all()
    assert n_changed > 0
    for p, before_zeros, start, q in zip(model.parameters(), hidden, before, plain.parameters(), strict=True):
        assert torch.equal(before_zeros, start)
        p.data.copy_(q.data)
    assert same(model, plain)
    train(model, ours, range(2))
    train(plain, theirs, range(2))
    assert same(model, plain)


def test_writes_by_other_code_are_taken_over(device):
    model, ours, plain, theirs = pair(device, "copy")
    for m, optimizer in ((model, ours), (plain, theirs)):
        train(m, optimizer, range(2))
        with torch.no_grad():
            m[0].weight.mul_(1.5)
        train(m, optimizer, range(2))
        other = {name: tensor * 2 for name, tensor in m.state_dict().items()}
        m.load_state_dict(other)
        train(m, optimizer, range(2))
        m[2].weight.data.mul_(0.5)
        optimizer.refresh_master_weights()
        train(m, optimizer, range(2))
    assert same(model, plain)


@pytest.mark.parametrize("refresh", [False, True])
def test_writes_beside_masters(refresh, device):
    """They are lost at the next step, unless the masters are refreshed, with compact weights as without."""
    model, ours, plain, theirs = pair(device, "master")
    for m, optimizer in ((model, ours), (plain, theirs)):
        train(m, optimizer, range(2))
        with torch.no_grad():
            m[0].weight.mul_(1.5)
        if refresh:
            optimizer.refresh_master_weights()
        x = torch.ones(2, 64, device=device, dtype=torch.bfloat16)
        (m(x) * 0).sum().backward()  # the same gradient, whatever the weights
        optimizer.step()
    assert same(model, plain)


def test_masks_that_change(kind, device):
    model, ours, plain, theirs = pair(device, kind)
    start = copy.deepcopy(plain)
    for seed in (1, 2, 3, 3):
        for m, optimizer in ((model, ours), (plain, theirs)):
            optimizer.set_mask(MaskSet.random(m, density=0.2, seed=seed))
            train(m, optimizer, range(2))
        assert same(model, plain)
        with ours.base_weights(), theirs.base_weights():
            assert same(model, start) and same(plain, start)


def test_a_saved_state_continues(kind, device):
    model, ours, plain, theirs = pair(device, kind)
    train(plain, theirs, range(3))
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(theirs.state_dict())
    train(model, ours, range(3, 5))
    train(plain, theirs, range(3, 5))
    assert same(model, plain)


def test_a_step_that_fails_may_be_repeated(kind, device, monkeypatch):
    model, ours, plain, theirs = pair(device, kind)
    x = torch.ones(2, 64, device=device, dtype=torch.bfloat16)
    for m in (model, plain):
        m(x).square().mean().backward()

    def failing(step):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(BucketStep, "op", property(failing, lambda step, op: None), raising=False)
        with pytest.raises(RuntimeError, match="out of memory"):
            ours.step()
    ours.step()
    theirs.step()
    assert same(model, plain)


def test_skipped_updates(kind, device):
    """found_inf leaves the weights, their copy and the masters as they are."""
    model, ours, plain, theirs = pair(device, kind, amp_scaling=True)
    for m, optimizer in ((model, ours), (plain, theirs)):
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0, growth_interval=1)
        for factor in (1.0, float("inf"), 1.0):
            x = torch.ones(2, 64, device=device, dtype=torch.bfloat16)
            scaler.scale(m(x).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert same(model, plain)


def test_memory(kind, device):
    _, ours, _, theirs = pair(device, kind)
    extra = {name: size - theirs.nbytes()[name] for name, size in ours.nbytes().items()}
    assert extra.pop("compact_weights") == (2 * ours.mask.nnz if kind == "copy" else 0) and not any(extra.values())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_replays_of_a_graph(kind, backend):
    """A write by other code between two replays is taken over, too."""
    from sparse_opt import GraphedStep

    if cause := backends.why_unavailable(backend, "cuda"):
        pytest.skip(cause)
    device = torch.device("cuda")
    lr = torch.tensor(1e-3, device=device)
    model, ours, plain, theirs = pair(device, kind, lr=lr, backend=backend)
    for m, optimizer, graphs in ((model, ours, True), (plain, theirs, False)):

        def function(x, m=m, optimizer=optimizer):
            with torch.no_grad(), optimizer.base_weights():
                base = m(x)
            (m(x) - base + 0.1).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        call = GraphedStep(function, optimizer) if graphs else function
        for i in range(10):
            call(torch.full((4, 64), i / 10, device=device, dtype=torch.bfloat16))
            if i == 7:
                with torch.no_grad():
                    m[0].weight.mul_(1.5)
                optimizer.refresh_master_weights()
    assert same(model, plain)
