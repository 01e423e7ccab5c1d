"""Experts of transformers' mixtures of experts, whose weight gradients are computed by tiles."""

import copy
import functools
import math

import pytest
import torch
from computed import Computed
from tiled_models import EPS32, assert_same_gradients, pair
from torch.utils.checkpoint import checkpoint

from sparse_opt import GraphedStep, MaskSet, SparseAdamW, SparseSGD
from sparse_opt.masks import union
from sparse_opt.optim.gradients import tile_layers

pytest.importorskip("transformers", reason="needs transformers")
from moe_models import FAMILIES, VOCABULARY, moe_model

pytestmark = pytest.mark.usefixtures("few_under_the_interpreter")

HIDDEN = 128


def make(kind, implementation, device, dtype=torch.float32):
    options = {"attn_implementation": "eager", "experts_implementation": implementation}
    model = moe_model(kind, dtype, hidden_size=HIDDEN, **options)
    for param in model.parameters():  # some have no initialization of their own
        if param.dim() == 3:
            torch.nn.init.normal_(param, std=0.05)
    return model.to(device)


def batch(device="cpu", seed=0):
    return torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(seed)).to(device)


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def experts_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_gradients_are_the_masked_dense_ones(kind, implementation, device):
    """Over two micro-batches, a step, and one more batch, with the implementation that the user chose before."""
    model, tiles, twin, dense = pair(device, functools.partial(make, kind, implementation))
    tiled = [name for name in tiles.tiled_parameters if ".experts." in name]
    assert len(tiled) == 2 * len(experts_of(model)) > 0
    for seed in range(2):
        losses = [loss_of(m, batch(device, seed)) for m in (model, twin)]
        if implementation == "grouped_mm":
            assert torch.equal(*losses)
        else:
            assert (losses[0] - losses[1]).abs() <= 10 * EPS32 * losses[1]
        for loss in losses:
            loss.backward()
        # 48 tokens; differences of rounding grow on the way back through two layers.
        assert_same_gradients(tiles, dense, rtol=2000 * EPS32)
    for optimizer in (tiles, dense):
        optimizer.step()
    for m in (model, twin):
        loss_of(m, batch(device, 2)).backward()
    assert_same_gradients(tiles, dense, rtol=4000 * EPS32)


def test_a_union_of_experts_and_tiles_computes_both_by_tiles(device):
    """The biases of GPT-OSS's experts are runs, and so is the mask; another weight has runs that are no tiles."""
    made = make("gpt_oss", "grouped_mm", device)
    attention = {name: p for name, p in made.named_parameters() if name.endswith("_proj.weight")}
    tiled = [MaskSet.experts(made, {1: [0, 3]}), MaskSet.random(attention, density=0.3, pattern="tile64", seed=1)]
    runs = MaskSet.random({"lm_head.weight": made.lm_head.weight}, density=0.3, pattern="run32", seed=1)
    mask = union([*tiled, runs])
    assert mask.pattern == "run32"
    model, tiles, twin, dense = pair(device, functools.partial(make, "gpt_oss", "grouped_mm"), mask=mask)
    found = {name for each in tiled for name in each.names if each[name].numel() and "bias" not in name}
    assert set(tiles.tiled_parameters) == found
    for m in (model, twin):
        loss_of(m, batch(device)).backward()
    assert_same_gradients(tiles, dense, rtol=2000 * EPS32)


def test_random_runs_are_not_expanded_to_look_for_tiles(monkeypatch):
    monkeypatch.delattr(tile_layers, "most_specific_pattern")
    layer = torch.nn.Linear(5120, 128)
    assert not SparseSGD(layer, MaskSet.random(layer, density=0.025, pattern="run32")).tiled_parameters


@pytest.mark.gpu
def test_autocast_rounds_as_transformers():
    module, _tiles, twin, _dense = module_pair("cuda", dtype=torch.bfloat16)
    hidden, index, weights = tokens(twin, n=300)
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = (m(hidden.float(), index, weights) for m in (module, twin))
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_captured_step_has_the_bits_of_an_eager_one(kind, checkpointing):
    """With a router: each input is routed differently."""
    results = []
    inputs = torch.randn(6, 1, 40, HIDDEN, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    for graphs in (False, True):
        block = make(kind, "grouped_mm", "cuda", torch.bfloat16).model.layers[1].mlp
        mask = MaskSet.random(block, density=0.3, pattern="tile64", seed=1)
        optimizer = SparseAdamW(block, mask, lr=torch.tensor(1e-2, device="cuda"), tile_backward=True)
        assert [name for name in optimizer.tiled_parameters if "experts." in name]

        def forward(x, block=block):
            output = block(x)
            return output[0] if isinstance(output, tuple) else output

        def step(x, forward=forward, optimizer=optimizer):
            output = checkpoint(forward, x, use_reentrant=False) if checkpointing else forward(x)
            loss = output.float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = GraphedStep(step, optimizer, n_warmup=2) if graphs else step
        losses = [call(x).clone() for x in inputs]
        results.append((torch.stack(losses), *(p.detach() for p in block.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].unique().numel() == len(inputs)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_with_activation_checkpointing(kind, reentrant, device):
    model, tiles, twin, dense = pair(device, functools.partial(make, kind, "grouped_mm"))
    for m in (model, twin):
        m.train()
        m.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for seed in range(2):
            loss_of(m, batch(device, seed)).backward()
    assert_same_gradients(tiles, dense, rtol=2000 * EPS32)


# Single modules of experts, with a routing of the test's own.


def make_module(device="cpu", kind="mixtral", dtype=torch.float32):
    return experts_of(make(kind, "grouped_mm", device, dtype))[0]


def module_pair(device, mask=None, **how):
    return pair(device, functools.partial(make_module, **how), mask=mask)


def tokens(module, *, chosen=None, n=20, seed=0, hidden=HIDDEN):
    """Hidden states and a routing to two of the chosen experts."""
    weight = module.down_proj
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.tensor(chosen or range(module.num_experts))
    hidden_states = torch.randn(n, hidden, generator=generator)
    index = chosen[torch.rand(n, len(chosen), generator=generator).topk(2).indices]
    weights = torch.rand(n, 2, generator=generator)
    return (
        hidden_states.to(weight.device, weight.dtype).requires_grad_(),
        index.to(weight.device),
        weights.to(weight.device, weight.dtype).requires_grad_(),
    )


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_inputs_get_the_gradients_of_transformers(kind, device):
    module, _tiles, twin, _dense = module_pair(device, kind=kind)
    found = []
    for m in (module, twin):
        hidden, index, weights = tokens(m, n=300)  # which are added up in two parts
        output = m(hidden, index, weights)
        output.square().sum().backward()
        found.append((output, hidden.grad, weights.grad))
    (output, *grads), (expected, *expected_grads) = found
    assert torch.equal(output, expected)
    for grad, other in zip(grads, expected_grads, strict=True):
        assert (grad - other).abs().max() <= 20 * EPS32 * other.abs().max()
    with torch.no_grad():
        assert torch.equal(module(hidden, index, weights), twin(hidden, index, weights))


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_whole_experts_and_experts_without_tokens(kind, device):
    module = make_module("meta", kind)
    experts = [0, 2, 3]
    flags = {name: torch.zeros(getattr(module, name).shape, dtype=torch.bool) for name in ("gate_up_proj", "down_proj")}
    for flag in flags.values():
        flag[experts] = True
    if kind == "gpt_oss":  # the mask's pattern is that of the biases
        flags["down_proj_bias"] = flags["down_proj"][:, 0].clone()
    mask = MaskSet.from_bool(flags)
    assert mask.pattern.startswith("run" if kind == "gpt_oss" else "tile")
    module, tiles, twin, dense = module_pair(device, mask, kind=kind)
    assert set(tiles.tiled_parameters) == {"gate_up_proj", "down_proj"}
    for m in (module, twin):
        m(*tokens(m, chosen=[1, 2, 3])).square().sum().backward()
    assert_same_gradients(tiles, dense)
    for name in flags:
        grad = tiles.compact_grad(getattr(module, name)).view(len(experts), -1)
        assert not grad[0].any() and grad[1].any() and grad[2].any()
    tiles.zero_grad()
    module(*tokens(module, n=0)).sum().backward()
    assert not tiles.compact_grad(module.down_proj).any()


def test_no_dense_gradient_is_computed(device):
    module, tiles, twin, _dense = module_pair(device)
    found = []
    for m in (module, twin):
        with Computed(m) as computed:
            m(*tokens(m)).sum().backward()
        found.append({shape for shape in computed.shapes if math.prod(shape) >= m.down_proj.numel()})
    assert not found[0] and tuple(module.down_proj.shape) in found[1]
    assert module.down_proj.grad is None and tiles.compact_grad(module.down_proj) is not None


def test_gradients_have_the_same_bits_every_time(device):
    module, tiles, _, _ = module_pair(device, dtype=torch.bfloat16)
    found = []
    for _ in range(3):
        hidden, index, weights = tokens(module, n=300)
        tiles.zero_grad()
        module(hidden, index, weights).square().sum().backward()
        found.append((hidden.grad, weights.grad, tiles.compact_grad(module.gate_up_proj).clone()))
    for grads in found[1:]:
        assert all(torch.equal(grad, first) for grad, first in zip(grads, found[0], strict=True))


def test_one_of_the_weights_may_be_frozen(device):
    for name in ("gate_up_proj", "down_proj"):
        shapes = {name: tuple(getattr(make_module("meta"), name).shape)}
        module, tiles, twin, dense = module_pair(device, MaskSet.random(shapes, density=0.3, pattern="tile64"))
        for m in (module, twin):
            m(*tokens(m)).square().sum().backward()
            m(*(tensor.detach() for tensor in tokens(m))).square().sum().backward()  # as after a frozen embedding
        assert tiles.tiled_parameters == (name,)
        assert_same_gradients(tiles, dense)


def test_others_get_the_dense_gradient(device):
    """`torch.autograd.grad` and hooks on the weight."""
    module, tiles, twin, dense = module_pair(device)
    found = [torch.autograd.grad(m(*tokens(m)).square().sum(), m.down_proj)[0] for m in (module, twin)]
    assert (found[0] - found[1]).abs().max() <= 20 * EPS32 * found[1].abs().max()
    assert tiles.compact_grad(module.down_proj) is None
    seen = []
    handle = module.down_proj.register_hook(lambda grad: seen.append(grad.shape))
    for m in (module, twin):
        m(*tokens(m)).square().sum().backward()
    assert seen == [module.down_proj.shape]
    assert_same_gradients(tiles, dense)
    handle.remove()
    hidden, *routing = tokens(module)
    loss = module(hidden, *routing).square().sum()
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_close_and_copies_leave_ordinary_experts(device):
    module, tiles, _, _ = module_pair(device)
    assert "forward" in vars(module)
    other = copy.deepcopy(module).requires_grad_()
    other(*tokens(other)).sum().backward()
    assert other.down_proj.grad is not None
    tiles.close()
    assert "forward" not in vars(module) and not [name for name in vars(module) if name.startswith("_tile")]
    module(*tokens(module)).sum().backward()
    assert module.down_proj.grad is not None


def test_reasons_for_dense_gradients():
    module = make_module()
    wrapped, other = make_module(), make_module()
    wrapped.forward = lambda *inputs: None
    other.config._experts_implementation = "sonicmoe"
    for m, reason in (
        (wrapped, "its layer has a forward that is not its class's"),
        (other, "its experts_implementation is 'sonicmoe', not 'eager', 'grouped_mm' or 'batched_mm'"),
    ):
        mask = MaskSet.from_bool({"down_proj": torch.ones(m.down_proj.shape, dtype=torch.bool)})
        with pytest.raises(ValueError, match=f"none of 1 active parameters supports it: 'down_proj': {reason}"):
            SparseSGD(m, mask, tile_backward=True)
        assert not SparseSGD(m, mask).tiled_parameters
    assert not SparseSGD(module, MaskSet.random(module, density=0.3)).tiled_parameters  # single elements


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_experts_under_compile(kind, device):
    module, tiles, twin, dense = module_pair(device, kind=kind)
    torch._dynamo.reset()
    whole = torch.compile(module, backend="aot_eager", fullgraph=True)
    for n in (20, 33):
        for m in (whole, twin):
            m(*tokens(twin, n=n)).square().sum().backward()
        assert_same_gradients(tiles, dense)
    output = whole(*tokens(module))
    tiles.close()
    with pytest.raises(RuntimeError, match="between its forward and backward pass"):
        output.sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_ops_of_experts_under_opcheck(transposed):
    module, tiles, _, _ = module_pair("cpu", kind="gpt_oss" if transposed else "mixtral")
    weight = module.down_proj
    route = vars(module)["_tile_route_of_down_proj"].number
    rows, columns = weight.shape[1:]
    n_in, n_out = (rows, columns) if transposed else (columns, rows)
    offsets = torch.tensor([3, 3, 10, 10, 10], dtype=torch.int32)
    x, g = torch.randn(10, n_in, requires_grad=True), torch.randn(10, n_out)
    ops = torch.ops.sparse_opt
    operands = weight.detach(), offsets, route, transposed
    torch.library.opcheck(ops.tile_grouped_mm.default, (x, *operands, None, None, None, None))
    order = torch.randperm(10)
    place = order.argsort().view(5, 2)
    tokens_of_rows = torch.randn(5, n_in, requires_grad=True)
    torch.library.opcheck(ops.tile_grouped_mm.default, (tokens_of_rows, *operands, order // 2, place, None, None))
    for dtype in (torch.float32, torch.float64):
        factors = torch.rand(5, 2, dtype=dtype, requires_grad=True)
        sums = x, *operands, None, place, order, factors
        torch.library.opcheck(ops.tile_grouped_mm.default, sums, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(ops.grouped_mm.default, (x.detach(), weight.detach(), offsets, transposed))
    left, right = (x.detach(), g) if transposed else (g, x.detach())
    torch.library.opcheck(ops.tile_grouped_product.default, (left, right, offsets, route))
    assert tiles.compact_grad(weight) is not None
