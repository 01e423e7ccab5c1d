"""GraphedStep: replays give the bits of eager steps: base weights, clipping, accumulation, tiles and two shapes."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparse_opt import GraphedStep, MaskSet, SparseAdamW, SparseLion, backends

SHAPES = [(16, 128), (40, 128)]


class Model(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointing:
                x = x + checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
            else:
                x = x + layer(x).tanh()
        return x


def train(
    graphs,
    inputs,
    *,
    pattern,
    checkpointing=False,
    n_micro=1,
    optimizer_class=SparseAdamW,
    compiled=False,
    backend=None,
    process_group=None,
):
    """Take a step on each input, and return (results of the steps, the weights, the states)."""
    torch.manual_seed(0)
    model = Model(checkpointing).to("cuda", torch.bfloat16)
    mask = MaskSet.random({f"layers.{i}.weight": (128, 128) for i in range(3)}, density=0.5, pattern=pattern)
    lr = torch.tensor(1e-2, device="cuda")
    options = {"stochastic_rounding": True, "grad_dtype": torch.bfloat16, "backend": backend}
    options["process_group"] = process_group
    if pattern == "tile64":
        options["tile_backward"] = True  # at this density a tiled backward pass is not the default
    optimizer = optimizer_class(model, mask, lr=lr, **options)
    if compiled:
        for layer in model.layers:
            layer.compile()

    def step(x):
        losses = []
        for part in x.chunk(n_micro):
            with torch.no_grad(), optimizer.base_weights():
                reference = model(part)
            loss = (model(part).float() - 2 * reference.float()).square().mean() / n_micro
            loss.backward()
            losses.append(loss.detach())
        norm = optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": torch.stack(losses).sum(), "norm": norm}

    call = GraphedStep(step, optimizer, n_warmup=2) if graphs else step
    results = []
    for i, x in enumerate(inputs):
        found = call(x)
        results.append((found["loss"].clone(), found["norm"].clone()))
        if i == 7:
            lr.mul_(0.5)
    if graphs:
        assert call.n_graphs == len({x.shape for x in inputs})
    states = [value.clone() for state in optimizer.state.values() for value in state.values()]
    return results, [p.detach().clone() for p in model.parameters()], states


def random_inputs(n):
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [SHAPES[i % 2] for i in range(n)]
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]


def assert_same(got, expected):
    for (a, b), (x, y) in zip(got[0], expected[0], strict=True):
        assert torch.equal(a, x) and torch.equal(b, y)
    for a, x in zip((*got[1], *got[2]), (*expected[1], *expected[2]), strict=True):
        assert torch.equal(a, x)


REPLAYED = [
    *(
        {"pattern": pattern, "checkpointing": checkpointing, "n_micro": n_micro, "optimizer_class": optimizer_class}
        for pattern in ("element", "tile64")
        for checkpointing in (False, True)
        for n_micro in (1, 2)
        for optimizer_class in (SparseAdamW, SparseLion)
    ),
    *({"pattern": "run32", "backend": backend} for backend in ("cuda", "triton")),
    # Tiles of a backend without native layers.
    *({"pattern": "tile64", "checkpointing": checkpointing, "backend": "triton"} for checkpointing in (False, True)),
    *(pytest.param({"pattern": p, "compiled": True}, marks=pytest.mark.slow) for p in ("element", "tile64")),
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", REPLAYED)
def test_replays_give_the_bits_of_eager_steps(options):
    inputs = random_inputs(12)
    eager, graphed = (train(graphs, inputs, **options) for graphs in (False, True))
    assert_same(graphed, eager)
    assert len({loss.item() for loss, _ in eager[0]}) == len(inputs)  # each step has its own inputs


def replicated(rank, pattern):
    """The same with reductions, on ranks that capture and replay in different steps, and in the same ones."""
    inputs = random_inputs(12)
    if rank:
        inputs = [torch.randn(SHAPES[0], device="cuda").bfloat16() for _ in inputs]
    options = {"pattern": pattern, "n_micro": 2, "process_group": dist.group.WORLD}
    eager, graphed = (train(graphs, inputs, **options) for graphs in (False, True))
    assert_same(graphed, eager)

    model = nn.Linear(128, 128, device="cuda")
    mask, lr = MaskSet.random(model, density=0.5), torch.tensor(1e-2, device="cuda")
    optimizer = SparseAdamW(model, mask, lr=lr, process_group=dist.group.WORLD)

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()

    call, x = GraphedStep(step, optimizer, n_warmup=1), torch.randn(4, 128, device="cuda")
    for _ in range(4):
        call(x)
    optimizer.check_ranks()
    assert optimizer.n_steps == 4
    del call
    gc.collect()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
@pytest.mark.parametrize("pattern", ["element", "tile64"])
def test_replays_reduce_across_ranks(pattern):
    launch(replicated, 2, pattern, backend="nccl")


def load_other_base(model, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["base"] += 1.0
    optimizer.load_state_dict(saved)


def load_more_base(model, optimizer):
    """Load a state saved after `set_mask`: base weights at elements that are no longer active."""
    other = SparseAdamW(model, random_mask(seed=1), lr=torch.tensor(1e-2, device="cuda"))
    other.set_mask(optimizer.mask)
    saved = other.state_dict()
    other.close()
    optimizer.load_state_dict(saved)


def move(model, optimizer):
    for param in model.parameters():
        param.data = param.data.clone()


def random_mask(seed):
    return MaskSet.random({f"layers.{i}.weight": (128, 128) for i in range(3)}, density=0.5, seed=seed)


CHANGES = {
    "set_mask": lambda model, optimizer: optimizer.set_mask(random_mask(seed=1)),
    "load_other_base": load_other_base,
    "load_more_base": load_more_base,
    "new_lr": lambda model, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.1, device="cuda")),
    "weight_decay": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "max_grad_norm": lambda model, optimizer: setattr(optimizer, "max_grad_norm", 1e-3),
    "move": move,
}


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_calls_reach_the_next_step(change):
    weights = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = Model().to("cuda")
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = SparseAdamW(model, random_mask(seed=0), lr=lr, max_grad_norm=0.05)

        def function(x, model=model, optimizer=optimizer):
            with torch.no_grad(), optimizer.base_weights():
                reference = model(x)
            (model(x) - 2 * reference).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        call = GraphedStep(function, optimizer, n_warmup=1) if graphs else function
        junk = []
        for i in range(12):
            call(torch.full((4, 128), float(i + 1), device="cuda"))
            if i == 5:
                CHANGES[change](model, optimizer)
                junk = [torch.full((n,), float("nan"), device="cuda") for n in range(1, 50_000, 97)]  # freed memory
        assert graphs is False or call.n_graphs == 1
        weights.append([p.detach().clone() for p in model.parameters()])
        del junk
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def small_on_gpu():
    model = nn.Linear(8, 8, device="cuda")
    lr = torch.tensor(1e-2, device="cuda")
    return model, SparseAdamW(model, MaskSet.random(model, density=0.5), lr=lr)


@pytest.mark.gpu
def test_changes_that_a_graph_cannot_follow_are_refused():
    model, optimizer = small_on_gpu()

    def function(x):
        model(x).sum().backward()
        optimizer.step()

    step, x = GraphedStep(function, optimizer, n_warmup=1), torch.ones(2, 8, device="cuda")
    for _ in range(3):
        step(x)
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.1
    with pytest.raises(ValueError, match="lr of parameter group 0 is 0.1, expected a tensor on the GPU"):
        step(x)
    optimizer.param_groups[0]["lr"] = lr
    with optimizer.base_weights(), pytest.raises(RuntimeError, match="GraphedStep: the model holds its base weights"):
        step(x)
    model.weight = nn.Parameter(torch.zeros(8, 8, device="cuda"))
    with pytest.raises(RuntimeError, match="'weight' was replaced"):
        step(x)


def test_a_load_keeps_the_learning_rates_of_groups_that_share_a_tensor():
    model, lr = nn.Linear(8, 8), torch.tensor(0.1)
    groups = [{"params": [(name, p)], "lr": lr} for name, p in model.named_parameters()]
    optimizer = SparseAdamW(groups, MaskSet.random(model, density=0.5))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["lr"] = 0.2
    optimizer.load_state_dict(saved)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [pytest.approx(0.1), pytest.approx(0.2)]


def test_a_load_writes_into_the_tensors_that_a_graph_reads():
    model = nn.Linear(8, 8)
    lr = torch.tensor(0.1)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5), lr=lr)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["base"] += 1.0
    saved["param_groups"][0]["lr"] = torch.tensor([0.5])
    before = {(p, key): t for p, state in optimizer.state.items() for key, t in state.items()}
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is lr and lr == 0.5
    for (param, key), tensor in before.items():
        assert optimizer.state[param][key].data_ptr() == tensor.data_ptr()
    assert torch.equal(optimizer.state[model.weight]["base"], saved["state"][0]["base"])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_parameters_without_a_gradient_are_skipped_in_replays(backend):
    if cause := backends.why_unavailable(backend, "cuda"):
        pytest.skip(cause)
    weights = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = Model().to("cuda")
        lr = torch.tensor(1e-2, device="cuda")
        mask = MaskSet.random(model, density=0.5)
        optimizer = SparseAdamW(model, mask, lr=lr, max_grad_norm=0.1, backend=backend)

        def function(x, model=model, optimizer=optimizer):
            model.layers[2](model.layers[0](x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        call = GraphedStep(function, optimizer) if graphs else function
        junk = []
        for i in range(8):
            call(torch.full((4, 128), float(i), device="cuda"))
            junk.append(torch.full((3,), 7 + i).pin_memory())  # takes the host memory that a replay must not read
        weights.append([p.detach().clone() for p in model.parameters()])
        assert torch.equal(optimizer.state[model.layers[1].weight]["step"], torch.zeros((), device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norms_of_gradients_by_tiles_and_dense_ones_between_replays(grad_dtype):
    """The host does not know what kind of gradient a replay has left, nor that a failed capture has left none."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(128, 192, bias=False, device="cuda") for _ in range(2))
    lr, mask = torch.tensor(1e-2, device="cuda"), MaskSet.random(layers, density=0.3, pattern="tile64", seed=1)
    optimizer = SparseAdamW(layers, mask, lr=lr, tile_backward=True, grad_dtype=grad_dtype)
    fails = []

    def step(x, by_tiles=True):
        outputs = [layer(x) if by_tiles else nn.functional.linear(x, layer.weight) for layer in layers]
        torch.stack(outputs).square().mean().backward()
        if fails and torch.cuda.is_current_stream_capturing():
            raise KeyError(fails.pop())
        norm = optimizer.clip_grad_norm_(1.0).clone()
        grads = torch.cat([optimizer.compact_grad(p).float() for p in layers.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        return {"norm": norm, "grads": grads}

    call, x = GraphedStep(step, optimizer, n_warmup=1), torch.randn(40, 128, device="cuda")
    found = [step(x, by_tiles=False), call(x)]
    fails.append("in the capture")
    with pytest.raises(KeyError, match="in the capture"):
        call(x)
    optimizer.zero_grad()
    for one in (lambda: step(x), lambda: call(x), lambda: step(x, by_tiles=False), lambda: call(x)):
        found.append({name: tensor.clone() for name, tensor in one().items()})
    for one in found:
        torch.testing.assert_close(one["norm"], one["grads"].norm())


@pytest.mark.gpu
def test_gradients_without_a_step_are_refused():
    model, optimizer = small_on_gpu()
    x = torch.ones(2, 8, device="cuda")
    step = GraphedStep(lambda x: model(x).sum().backward(), optimizer)
    with pytest.raises(RuntimeError, match="no step has used, after a call"):
        step(x)
    with pytest.raises(RuntimeError, match="no step has used, before a call"):
        step(x)
    optimizer.zero_grad()


@pytest.mark.gpu
def test_what_a_graph_would_keep_is_refused():
    model = nn.Linear(8, 8, device="cuda")
    mask = MaskSet.random(model, density=0.5)
    with pytest.raises(ValueError, match="lr of parameter group 0 is 0.1, expected a tensor on the GPU"):
        GraphedStep(lambda: None, SparseAdamW(model, mask, lr=0.1))
    lr = torch.tensor(0.1, device="cuda")
    with pytest.raises(ValueError, match="backend 'reference'"):
        GraphedStep(lambda: None, SparseAdamW(model, mask, lr=lr, backend="reference"))


def test_wrong_arguments_are_refused():
    model = nn.Linear(8, 8)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5))
    with pytest.raises(ValueError, match="the parameters are on cpu; a CUDA graph needs all of them on one GPU"):
        GraphedStep(lambda: None, optimizer)
    with pytest.raises(ValueError, match="n_warmup is 0, expected at least 1"):
        GraphedStep(lambda: None, optimizer, n_warmup=0)
