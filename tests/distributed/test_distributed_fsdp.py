"""Sparse optimizers of models under `fully_shard` (FSDP2): the bits of one device that sees the global batch.

The loss of the one device is divided by the number of ranks, a power of two, and gradients of two ranks are added in
fp32: both are exact in either order, so nothing here needs a tolerance. With four ranks, two have a loss of zero.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import BACKENDS, device, launch, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sparse_opt import MaskSet, SparseAdamW, SparseLion, SparseSGD
from sparse_opt.distributed import full_optimizer_state_dict
from sparse_opt.optim import SparseOptimizer
from sparse_opt.optim.gradients import reduction

pytestmark = pytest.mark.dist

Forward = Callable[[Tensor], Tensor]
STEPS, TOKENS, VOCABULARY, WIDTH = 5, 24, 71, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return output


class Model(nn.Module):
    """Has rows that do not split evenly (71), fewer rows than ranks (1), runs across two shards (48 elements), biases,
    and a head that may be tied.
    """

    def __init__(self, *, tied: bool = False, checkpointed: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block().to(dtype) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(48, dtype=dtype))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + nn.functional.pad(self.shift, (0, WIDTH - 48))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: Tensor = self.head(x * self.scale)
        return logits


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).to(device())


def loss_of(forward: Forward, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(forward(tokens[:-1]).float(), tokens[1:])


def batches_of(step: int, rank: int, n: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return list(torch.randint(VOCABULARY, (n, TOKENS), generator=generator).to(device()))


def deterministic() -> None:
    """Make GPUs compute the same bits twice; called before the first product."""
    if device().type == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)


def shard(model: Model, **options: Any) -> Model:
    """As users do, one unit per block; one linear layer is a unit of its own."""
    for module in (model.blocks[0].up, *model.blocks, model):
        fully_shard(module, **options)
    return model


@dataclass
class Case:
    """A configuration to train under FSDP2 and on one device."""

    pattern: str = "element"
    optimizer: Callable[..., SparseOptimizer] = SparseAdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    model: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    compute_dtype: torch.dtype | None = None  # of MixedPrecisionPolicy
    micro_batches: int = 1
    frozen: tuple[str, ...] = ()
    meta: bool = False


SGD = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
CASES = {
    "element": Case(),
    "run": Case("run16", SparseSGD, SGD),
    "tile": Case("tile64", SparseLion, {"lr": 1e-3, "tile_backward": True}),
    "python": Case("tile64", SparseAdamW, {"lr": 1e-2, "tile_backward": True, "backend": "reference"}),
    # Of elements: the gradients are in the order of one device's, so that their norm has the same bits.
    "clipped": Case("element", SparseAdamW, {"lr": 1e-2, "max_grad_norm": 0.05}),
    "bf16": Case("tile64", SparseAdamW, {"lr": 1e-2, "master_weights": True}, model={"dtype": torch.bfloat16}),
    "mixed precision": Case(compute_dtype=torch.bfloat16),
    "checkpointed": Case("tile64", SparseSGD, SGD, model={"checkpointed": True}),
    "tied": Case("tile64", SparseSGD, SGD, model={"tied": True}),
    "accumulated": Case("run16", SparseSGD, SGD, micro_batches=3),
    "not resharded": Case(fsdp={"reshard_after_forward": False}),
    "frozen": Case(frozen=("blocks.0.up.weight", "embedding.weight")),
    "meta": Case("run32", meta=True),
}


def mask_of(model: Model, pattern: str, *, frozen: tuple[str, ...] = (), seed: int = 1) -> MaskSet:
    drawn = MaskSet.random(model, density=0.3, pattern=pattern, seed=seed)
    indices = {name: drawn[name][: 0 if name in frozen else None] for name in drawn.names}
    indices["scale"] = torch.zeros(1, dtype=torch.int32)  # on rank 0 alone
    indices["shift"] = torch.arange(48, dtype=torch.int32)
    return MaskSet(indices, drawn.shapes, pattern=pattern)


def group_of_this_rank() -> Any:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def both(case: Case, mesh: Any = None) -> tuple[Model, SparseOptimizer, Model, SparseOptimizer]:
    """Return (sharded model, its optimizer, model of one device, its optimizer)."""
    alone = make_model(**case.model)
    mask = mask_of(alone, case.pattern, frozen=case.frozen)
    fsdp = dict(case.fsdp, mesh=mesh)
    if case.compute_dtype is not None:
        fsdp["mp_policy"] = MixedPrecisionPolicy(param_dtype=case.compute_dtype, reduce_dtype=torch.float32)
    if case.meta:
        with torch.device("meta"):
            model = Model(**case.model)
        shard(model, **fsdp).to_empty(device=device())
        for name, param in model.named_parameters():
            whole = distribute_tensor(alone.get_parameter(name).detach(), param.device_mesh, param.placements)
            param.detach().copy_(whole)
    else:
        model = shard(make_model(**case.model), **fsdp)
    for name in case.frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = case.optimizer(model, mask, **case.options)
    # A group of one rank, so that both compute the norm from the whole gradient.
    single = case.optimizer(alone, mask, process_group=group_of_this_rank(), **case.options)
    return model, optimizer, alone, single


def forward_of(case: Case, model: Model) -> Forward:
    """Return the model's forward pass in the case's dtype, as MixedPrecisionPolicy computes it."""
    if case.compute_dtype is None:
        return model
    casts = {name: p.to(case.compute_dtype) for name, p in model.named_parameters()}
    return lambda tokens: torch.func.functional_call(model, casts, tokens)


def backward(forward: Forward, optimizer: SparseOptimizer, batches: list[Tensor], scale: float = 1.0) -> None:
    """Run one backward pass per batch; the last one is not inside `no_sync`."""
    for i, tokens in enumerate(batches):
        with optimizer.no_sync() if i + 1 < len(batches) else contextlib.nullcontext():
            (loss_of(forward, tokens) * scale).backward()


def backward_of_ranks(forward: Forward, alone: Model, single: SparseOptimizer, batches: list[list[Tensor]]) -> None:
    """Leave the mean of the gradients of several ranks' batches in one device's optimizer."""
    total: dict[nn.Parameter, Tensor] = {}
    for i, of_rank in enumerate(batches):
        backward(forward, single, of_rank, 1 / dist.get_world_size())
        for param in alone.parameters():
            gradient = single.compact_grad(param)
            if gradient is not None:
                total[param] = gradient.add_(total.get(param, 0)).clone()
        if i + 1 < len(batches):
            single.zero_grad()


def assert_equal_weights(model: Model, alone: Model, what: str) -> None:
    for (name, param), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), whole), (what, name)


def assert_equal_state(optimizer: SparseOptimizer, single: SparseOptimizer) -> None:
    gathered = full_optimizer_state_dict(optimizer, cpu_offload=False)["state"]
    expected = single.state_dict()["state"]
    assert gathered.keys() == expected.keys()
    for number, entry in gathered.items():
        assert entry.keys() == expected[number].keys(), number
        for key, value in entry.items():
            assert torch.equal(value, expected[number][key]), (number, key)


def step_both(
    case: Case, model: Model, optimizer: SparseOptimizer, alone: Model, single: SparseOptimizer, step: int
) -> None:
    """Step both on the batches of all ranks, and compare them."""
    rank, n = dist.get_rank(), dist.get_world_size()
    backward(model, optimizer, batches_of(step, rank, case.micro_batches))
    of_ranks = [batches_of(step, r, case.micro_batches) for r in range(n)]
    backward_of_ranks(forward_of(case, alone), alone, single, of_ranks)
    for each in optimizer, single:
        each.step()
        each.zero_grad()
    assert_equal_weights(model, alone, f"step {step}")


class Collectives(TorchDispatchMode):
    """Collects the names of all collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def train_case(case: Case) -> None:
    trained = both(case)
    model, optimizer, _, single = trained
    held = torch.tensor([sum(entry["base"].numel() for entry in optimizer.state.values())], device=device())
    assert held < optimizer.mask.nnz
    dist.all_reduce(held)
    assert held == optimizer.mask.nnz
    assert optimizer.tiled_parameters == single.tiled_parameters
    for step in range(STEPS):
        step_both(case, *trained, step)
    assert_equal_state(optimizer, single)
    with Collectives() as collectives:
        backward(model, optimizer, batches_of(STEPS, dist.get_rank()))
    assert collectives.names == {"_allgather_base_", "allreduce_"}
    if optimizer.max_grad_norm is not None:
        assert torch.equal(optimizer.grad_norm, single.grad_norm)
    assert all(param.grad is None for param in model.parameters())


def train_cases(rank: int, names: list[str]) -> None:
    deterministic()
    for name in names:
        print(name, flush=True)  # shown with a failure
        train_case(CASES[name])


@BACKENDS
@pytest.mark.parametrize("part", [0, 1])
def test_many_steps_equal_one_device(part: int, backend: str) -> None:
    launch(train_cases, 2, list(CASES)[part::2], backend=backend)


@ranks(2)
def test_base_weights_and_set_mask(rank: int) -> None:
    deterministic()
    case = CASES["run"]
    trained = both(case)
    model, optimizer, _, single = trained
    (tokens,) = batches_of(99, rank)

    def outputs() -> Tensor:
        with torch.no_grad():
            return model(tokens)  # leaves the root module unsharded

    start = outputs()
    for step in range(3):
        step_both(case, *trained, step)
    now = outputs()
    assert not torch.equal(now, start)
    with optimizer.base_weights():
        assert torch.equal(outputs(), start)
        assert not model(tokens).requires_grad
    assert torch.equal(outputs(), now)
    with contextlib.suppress(KeyError), optimizer.base_weights():
        assert torch.equal(outputs(), start)
        raise KeyError
    assert torch.equal(outputs(), now)
    # A forward pass that raises inside: fully_shard counts its root as running, and would keep what it has gathered.
    failing = model.head.register_forward_pre_hook(lambda *args: {}["missing"])
    with contextlib.suppress(KeyError), optimizer.base_weights():
        outputs()
    failing.remove()
    assert torch.equal(outputs(), now)
    # A graph that was built before entry runs backward after exit.
    loss = loss_of(model, tokens)
    with optimizer.base_weights():
        assert torch.equal(outputs(), start)
    loss.backward()
    optimizer.zero_grad()
    for step in range(3, 6):
        step_both(case, *trained, step)
    # Elements that leave the mask keep their base weights.
    for each in optimizer, single:
        each.set_mask(mask_of(make_model(), "element", seed=2))
    for step in range(6, 9):
        step_both(case, *trained, step)
    with optimizer.base_weights():
        assert torch.equal(outputs(), start)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_equal_state(optimizer, single)
    loss = loss_of(model, tokens)
    with (
        optimizer.base_weights(),
        pytest.raises(RuntimeError, match=r"base_weights\(\)|modified by an inplace operation"),
    ):
        loss.backward()


@ranks(2)
def test_a_backward_pass_under_fsdp2_gathers_the_weights_after_the_reference(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(device())
    mask = MaskSet.random(model, density=0.5)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = SparseSGD(model, mask, lr=10.0)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).to(device())

    def gradient_norm(reference: bool) -> torch.Tensor:
        loss = model(x).square().mean()
        if reference:
            with optimizer.base_weights():
                with torch.no_grad():
                    base.append(model(x))
                if x.is_cuda:
                    torch.cuda._sleep(2**30)  # the host launches the backward pass before the GPU restores the weights
        loss.backward()
        norm = optimizer.clip_grad_norm_(1e9)
        optimizer.zero_grad()
        return norm

    base: list[torch.Tensor] = []
    first = gradient_norm(True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = gradient_norm(False)
    assert not torch.equal(expected, first)  # the weights have changed, and their gradient
    for _ in range(3):
        assert torch.equal(gradient_norm(True), expected)
    assert all(torch.equal(outputs, base[0]) for outputs in base)


class DirectHead(Model):
    """Uses the head's weight, as losses that are computed in chunks do; the head itself does not run."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        return nn.functional.linear(self.blocks[1](x), self.head.weight)


@ranks(2)
def test_base_weights_of_modules_sharded_together(rank: int) -> None:
    torch.manual_seed(0)
    model = DirectHead().to(device())
    fully_shard([model.blocks[1], model.head])
    fully_shard(model)
    optimizer = SparseAdamW(model, mask_of(make_model(), "element"), lr=1e-2)
    (tokens,) = batches_of(99, rank)

    def outputs() -> Tensor:
        with torch.no_grad():
            return model(tokens)

    start = outputs()
    loss_of(model, tokens).backward()
    optimizer.step()
    now = outputs()
    assert not torch.equal(now, start)
    for _ in range(2):
        with optimizer.base_weights():
            assert torch.equal(outputs(), start)
        assert torch.equal(outputs(), now)
    # A graph that was built before entry runs backward after exit.
    found = []
    for with_reference in (False, True):
        loss = loss_of(model, tokens)
        if with_reference:
            with optimizer.base_weights():
                assert torch.equal(outputs(), start)
        loss.backward()
        found.append([optimizer.compact_grad(p).clone() for group in optimizer.param_groups for p in group["params"]])
        optimizer.zero_grad()
    assert all(map(torch.equal, *found))
    # One of the modules has run when a forward pass raises.
    failing = model.blocks[1].register_forward_hook(lambda *args: {}["missing"])
    with contextlib.suppress(KeyError), optimizer.base_weights():
        outputs()
    failing.remove()
    assert torch.equal(outputs(), now)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_rank = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, used: int) -> Tensor:
        output: Tensor = self.of_rank[used](x).relu()
        return output


class Mixture(nn.Module):
    """Has several layers before the experts, whose weights a backward pass gathers after those of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.experts, self.last = Experts(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, used: int) -> Tensor:
        output: Tensor = self.last(self.experts(self.first(x), used))
        return output


@ranks(2)
def test_ranks_may_use_different_parameters(rank: int) -> None:
    """fully_shard's gathers are in the same process group: the ranks must call all collectives in one order."""
    torch.manual_seed(0)
    model, alone = Mixture().to(device()), Mixture().to(device())
    alone.load_state_dict(model.state_dict())
    mask = MaskSet.random(model, density=0.5)
    for module in (*model.first, model.experts, model.last, model):
        fully_shard(module)  # of the experts, too, all ranks gather the same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "MAX_PIECE_BYTES", 1)  # a reduction for each parameter
        optimizer = SparseSGD(model, mask, lr=0.1)
    single = SparseSGD(alone, mask, lr=0.1, process_group=group_of_this_rank())
    for step in range(3):
        inputs = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        inputs = [x.to(device()) for x in inputs]
        model(inputs[rank], rank).square().mean().backward()
        sum(alone(x, r).square().mean() / 2 for r, x in enumerate(inputs)).backward()
        for each in optimizer, single:
            each.step()
            each.zero_grad()
        for (name, param), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), whole, rtol=1e-5, atol=1e-6, msg=f"{step}: {name}")


@ranks(4, nccl=False)
def test_hybrid_sharding(rank: int) -> None:
    """Ranks 0 and 3, which share no mesh dimension, have data; the loss of the others is zero."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    case = CASES["tile"]
    model, optimizer, alone, single = both(case, mesh)
    for step in range(STEPS):
        backward(model, optimizer, batches_of(step, rank), 1.0 if rank in (0, 3) else 0.0)
        backward_of_ranks(alone, alone, single, [batches_of(step, 0), batches_of(step, 3)])
        for each in optimizer, single:
            each.step()
            each.zero_grad()
        assert_equal_weights(model, alone, f"step {step}")
    assert_equal_state(optimizer, single)
    rounding = shard(make_model(dtype=torch.bfloat16), mesh=mesh)
    mask = mask_of(make_model(), "element")
    rounded = SparseAdamW(rounding, mask, lr=1e-2, stochastic_rounding=True, state_dtype=torch.bfloat16)
    for step in range(STEPS):
        backward(rounding, rounded, batches_of(step, rank))
        rounded.step()
    rounded.check_ranks()
    if rank == 3:
        rounding.get_parameter("head.weight").detach().to_local().add_(1)
    with pytest.raises(RuntimeError, match=r"'head.weight' is .* rank [13]"):
        rounded.check_ranks()
    tensor_parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    both_ways = make_model()
    parallelize_module(both_ways, tensor_parallel["tensor"], {"blocks.0.up": ColwiseParallel()})
    fully_shard(both_ways, mesh=tensor_parallel["data"])
    with pytest.raises(ValueError, match=r"'blocks.0.up.weight' is a DTensor.*[Tt]ensor"):
        SparseAdamW(both_ways, mask)


@ranks(2)
def test_rebind(rank: int) -> None:
    """As accelerate does: the optimizer is built for the model, which is then sharded."""
    deterministic()
    case = CASES["tile"]
    model, alone = make_model(), make_model()
    mask = mask_of(model, case.pattern, frozen=("blocks.0.up.weight",))
    optimizer = case.optimizer(model, mask, process_group=dist.group.WORLD, **case.options)
    single = case.optimizer(alone, mask, process_group=group_of_this_rank(), **case.options)
    shard(model)
    optimizer.rebind(model)
    assert optimizer.tiled_parameters == single.tiled_parameters
    for step in range(STEPS):
        step_both(case, model, optimizer, alone, single, step)
    optimizer.rebind(model)  # changes nothing
    step_both(case, model, optimizer, alone, single, STEPS)
    with pytest.raises(RuntimeError, match="rebind: the optimizer has made a step"):
        optimizer.rebind(shard(make_model()))
    assert not model.get_parameter("blocks.0.up.weight").requires_grad
    optimizer.close()
    assert model.get_parameter("blocks.0.up.weight").requires_grad


@ranks(2, nccl=False)
def test_replaced_parameters_are_named(rank: int) -> None:
    model = shard(make_model())
    optimizer = SparseAdamW(model, mask_of(make_model(), "element"))
    loss = model(batches_of(0, rank)[0]).square().mean()
    with optimizer.base_weights():  # the root module's parameters are unsharded here
        pass
    loss.backward()
    optimizer.step()
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="was replaced after the optimizer was built"):
        optimizer.step()


@ranks(2, nccl=False)
def test_what_is_not_supported_raises(rank: int) -> None:
    mask = mask_of(make_model(), "element")
    other = shard(make_model(), shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None)
    with pytest.raises(ValueError, match=r"is a DTensor with placements \(Shard\(dim=1\),\)"):
        SparseAdamW(other, mask)
    with torch.device("meta"):
        model = shard(Model())
    with pytest.raises(ValueError, match="is on the meta device"):
        SparseAdamW(model, mask)
    model = shard(make_model())
    with pytest.raises(ValueError, match="grads is 'dense'"):
        SparseAdamW(model, mask, grads="dense")
    with pytest.raises(ValueError, match="process_group is False"):
        SparseAdamW(model, mask, process_group=False)
    with pytest.raises(ValueError, match=r"process_group has ranks \[\d\], .* \[0, 1\]"):
        SparseAdamW(model, mask, process_group=group_of_this_rank())
    with pytest.raises(ValueError, match="pass the model"):
        SparseAdamW(model.named_parameters(), mask)
    model(batches_of(0, rank)[0])  # leaves the root module unsharded
    with pytest.raises(ValueError, match="'scale' is an unsharded parameter"):
        SparseAdamW(list(model.named_parameters()), mask, model=model)
    optimizer = SparseAdamW(model.named_parameters(), mask, model=model, process_group=dist.group.WORLD)
    optimizer.detach()
    backward(model, optimizer, batches_of(0, rank))
    optimizer.attach()
    with pytest.raises(RuntimeError, match="has a dense gradient, reduced by fully_shard"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer, batches_of(0, rank))
    optimizer.step()
    model.bfloat16()
    with pytest.raises(RuntimeError, match="'(scale|shift)' was replaced"):
        optimizer.step()
