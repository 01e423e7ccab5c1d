"""compact_weights and offload_base_weights: the same training to the bit as without them."""

import contextlib
import copy
import functools
import gc

import pytest
import torch
from small_runs import same
from torch import nn

from sparse_opt import GraphedStep, MaskSet, SparseAdamW, backends
from sparse_opt.optim.buckets import BucketStep

pytestmark = pytest.mark.usefixtures("few_under_the_interpreter")
COPY = {"stochastic_rounding": True, "state_dtype": torch.bfloat16}
MASTER = {"master_weights": True}
# The options of both optimizers of a pair, and those of the first one alone.
STORAGES = {
    "copy": (COPY, {"compact_weights": True}),
    "master": (MASTER, {"compact_weights": True}),
    "offloaded": ({}, {"offload_base_weights": True}),
    "offloaded copy": ({**COPY, "compact_weights": True}, {"offload_base_weights": True}),
    "offloaded master": ({**MASTER, "compact_weights": True}, {"offload_base_weights": True}),
}
COMPACT = ("copy", "master")
OFFLOADED = ("offloaded", "offloaded copy", "offloaded master")


@pytest.fixture(params=STORAGES)
def storage(request):
    return request.param


def make_model(device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 64, bias=False), nn.Linear(64, 7)
    return nn.Sequential(*layers).to(device, dtype)


def pair(device, storage, dtype=torch.bfloat16, pattern="element", make=SparseAdamW, **options):
    """A model and its optimizer with the storage, and the same without it."""
    common, ours = STORAGES[storage]
    made = []
    for own in (ours, {}):
        model = make_model(device, dtype)
        mask = MaskSet.random(model, density=0.3, pattern=pattern, seed=1)
        made += [model, make(model, mask, **{"lr": 1e-3, "max_grad_norm": 1.0, **common, **own, **options})]
    return made


def step(model, optimizer, x):
    with torch.no_grad(), optimizer.base_weights():
        base = model(x)
    (model(x) - base + 0.1).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, seeds):
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    for seed in seeds:
        step(model, optimizer, torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(device, dtype))


@pytest.mark.parametrize(
    ("storage", "dtype", "pattern"),
    [
        *(("copy", dtype, pattern) for dtype in (torch.bfloat16, torch.float16) for pattern in ("element", "run32")),
        *(("master", dtype, "element") for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        *((storage, torch.bfloat16, "tile64") for storage in COMPACT),
        *((storage, torch.bfloat16, "element") for storage in OFFLOADED),
    ],
    ids=str,
)
def test_training_has_the_same_bits(storage, dtype, pattern, device, sparse_optimizer):
    model, ours, plain, theirs = pair(device, storage, dtype, pattern, sparse_optimizer)
    start = copy.deepcopy(plain)
    for _ in range(3):
        train(model, ours, range(2))
        train(plain, theirs, range(2))
        assert same(model, plain)
        with contextlib.suppress(KeyError), ours.base_weights():
            assert same(model, start)
            raise KeyError
        assert same(model, plain)
    assert not same(model, start)
    state, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    for key, entry in expected.items():
        assert all(torch.equal(state[key][name].to(device), value) for name, value in entry.items())


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


def test_masks_that_change(storage, device):
    model, ours, plain, theirs = pair(device, storage)
    start = copy.deepcopy(plain)
    for seed in (1, 2, 3, 3):
        for m, optimizer in ((model, ours), (plain, theirs)):
            optimizer.set_mask(MaskSet.random(m, density=0.2, seed=seed))
            train(m, optimizer, range(2))
        assert same(model, plain)
        with ours.base_weights(), theirs.base_weights():
            assert same(model, start) and same(plain, start)


def test_a_saved_state_continues(storage, device):
    model, ours, plain, theirs = pair(device, storage)
    start = copy.deepcopy(plain)
    train(plain, theirs, range(3))
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(theirs.state_dict())
    train(model, ours, range(3, 5))
    train(plain, theirs, range(3, 5))
    assert same(model, plain)
    with ours.base_weights():
        assert same(model, start)


@pytest.mark.parametrize("compact", COMPACT)
def test_a_step_that_fails_may_be_repeated(compact, device, monkeypatch):
    model, ours, plain, theirs = pair(device, compact)
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


@pytest.mark.parametrize("compact", COMPACT)
def test_skipped_updates(compact, device):
    """found_inf leaves the weights, their copy and the masters as they are."""
    model, ours, plain, theirs = pair(device, compact, amp_scaling=True)
    for m, optimizer in ((model, ours), (plain, theirs)):
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0, growth_interval=1)
        for factor in (1.0, float("inf"), 1.0):
            x = torch.ones(2, 64, device=device, dtype=torch.bfloat16)
            scaler.scale(m(x).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert same(model, plain)


def test_memory(storage, device):
    _, ours, _, theirs = pair(device, storage)
    extra = {name: size - theirs.nbytes()[name] for name, size in ours.nbytes().items()}
    assert extra.pop("compact_weights") == (2 * ours.mask.nnz if storage == "copy" else 0) and not any(extra.values())


def test_base_weights_must_be_kept():
    with pytest.raises(ValueError, match="offload_base_weights=True needs keep_base_weights=True"):
        pair("cpu", "offloaded", keep_base_weights=False)


@pytest.mark.gpu
@pytest.mark.parametrize("offloaded", OFFLOADED)
def test_the_gpu_has_no_memory_of_its_own_for_offloaded_base_weights(offloaded):
    def make(offload):
        model = nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 64)).to("cuda", torch.bfloat16)
        options = {**STORAGES[offloaded][0], "offload_base_weights": offload}
        return model, SparseAdamW(model, MaskSet.random(model, density=0.5, seed=1), lr=1e-3, **options)

    train(*make(False), range(2))  # loads kernels, and allocates torch's workspaces
    sizes = {}
    for offload in (False, True):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, optimizer = make(offload)
        train(model, optimizer, range(2))
        sizes[offload] = torch.cuda.memory_allocated() - before
        if offload:
            inside = {}
            for waits in (False, True):
                if waits:
                    model(torch.ones(1, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
                outside = torch.cuda.memory_allocated()
                with optimizer.base_weights():
                    inside[waits] = torch.cuda.memory_allocated() - outside
        base = optimizer.nbytes()["base"]
        del model, optimizer
    assert base > 2**17
    assert sizes[False] - sizes[True] == pytest.approx(base, abs=2**12)  # the allocator rounds sizes up
    # They are in the memory of the gradient, unless one waits there for a step.
    assert inside == {False: pytest.approx(0, abs=2**12), True: pytest.approx(base, abs=2**12)}
    _, optimizer = make(True)
    values = [entry["base"] for entry in optimizer.state.values()]
    assert values and all(value.is_pinned() for value in values)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_replays_of_a_graph(storage, backend):
    """A write by other code between two replays is taken over, too."""
    if cause := backends.why_unavailable(backend, "cuda"):
        pytest.skip(cause)
    device = torch.device("cuda")
    lr = torch.tensor(1e-3, device=device)
    model, ours, plain, theirs = pair(device, storage, lr=lr, backend=backend)
    for m, optimizer, graphs in ((model, ours, True), (plain, theirs, False)):
        function = functools.partial(step, m, optimizer)
        call = GraphedStep(function, optimizer) if graphs else function
        for i in range(10):
            call(torch.full((4, 64), i / 10, device=device, dtype=torch.bfloat16))
            if i == 7:
                with torch.no_grad():
                    m[0].weight.mul_(1.5)
                optimizer.refresh_master_weights()
    assert same(model, plain)
