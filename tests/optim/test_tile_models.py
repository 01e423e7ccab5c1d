"""Weight gradients made tile by tile in transformers' models, and under torch.compile."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiled_models import assert_same_gradients
from torch import nn

from sparse_opt import MaskSet, SparseAdamW, SparseSGD

EPS32 = torch.finfo(torch.float32).eps
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}

pytestmark = pytest.mark.usefixtures("few_under_the_interpreter")


def gpt2():
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=64, n_embd=128, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(params=["llama", "gpt2"])
def model(request, tiny_llama):
    return gpt2() if request.param == "gpt2" else tiny_llama(num_hidden_layers=1, **SIZES)


def batch(seed=0):
    return torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(seed))


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def pair(model, density=0.4, **options):
    twin = copy.deepcopy(model)
    mask = MaskSet.random(model, density=density, pattern="tile64", seed=1)
    tiles = SparseSGD(model, mask, lr=1e-2, tile_backward=True, **options)
    return tiles, twin, SparseSGD(twin, mask, lr=1e-2, tile_backward=False, **options)


def test_hundred_tile_steps_of_a_language_model_err_as_little_as_dense_ones(model):
    """Both runs against one in fp64: the error of tiles is at most twice that of the dense path.

    Errors of rounding grow by a factor that training and chance give them, from start to start several times as large:
    geometric means over two starts are compared.
    """
    errors = []
    for seed in range(2):
        torch.manual_seed(seed)
        for module in model.modules():
            if seed and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        errors.append(_errors_of_a_hundred_steps(copy.deepcopy(model)))
    ours, theirs = (math.prod(column) ** (1 / len(errors)) for column in zip(*errors, strict=True))
    assert 0 < ours <= 2 * theirs


def _errors_of_a_hundred_steps(model):
    """Distances of a run by tiles and of one by dense gradients from one in fp64."""
    exact, twin = copy.deepcopy(model).double(), copy.deepcopy(model)
    mask = MaskSet.random(model, density=0.4, pattern="tile64", seed=1)
    reference = torch.optim.AdamW(exact.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    optimizers = [
        SparseAdamW(m, mask, lr=1e-3, eps=1e-4, weight_decay=0.0, tile_backward=t)
        for m, t in ((model, True), (twin, False))
    ]
    names = optimizers[0].tiled_parameters
    kinds = {type(model.get_submodule(name.removesuffix(".weight"))).__name__ for name in names}
    assert kinds == {"Conv1D" if "gpt2" in type(model).__name__.lower() else "Linear", "Embedding"}
    assert len(names) >= 5
    start = [p.detach().clone() for p in exact.parameters()]
    active = {name: mask.bool(name) for name in mask.names}
    for step in range(100):
        tokens = batch(step % 4)
        for m, o in zip((model, twin), optimizers, strict=True):
            o.zero_grad()
            loss_of(m, tokens).backward()
            o.step()
        reference.zero_grad()
        loss_of(exact, tokens).backward()
        for name, p in exact.named_parameters():
            p.grad.mul_(active[name])
        reference.step()

    def distance(a, b):
        return sum((p.double() - q.double()).square().sum() for p, q in zip(a, b, strict=True)).sqrt().item()

    params = list(exact.parameters())
    ours, theirs = distance(model.parameters(), params), distance(twin.parameters(), params)
    assert theirs < 1e-3 * distance(params, start)  # the runs have changed the weights, in the same way
    return ours, theirs


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_tiles_under_transformers_checkpointing(model, reentrant):
    tiles, twin, dense = pair(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    model.train()
    for seed in range(2):
        for m in (model, twin):
            loss_of(m, batch(seed)).backward()
    # 48 products for each element, as tests/optim/test_tile_backward.py says, and as much of the layers above, where
    # checkpointing computes the same again.
    assert_same_gradients(tiles, dense, rtol=2 * 48 * EPS32)


def test_tiles_with_tied_embeddings(tiny_llama):
    """The parts of the output layer and of the embedding both come by tiles, and they add up."""
    model = tiny_llama(num_hidden_layers=1, tie_word_embeddings=True, **SIZES)
    tiles, twin, dense = pair(model, max_grad_norm=1e-3)
    assert "model.embed_tokens.weight" in tiles.tiled_parameters
    for seed in range(2):
        for m in (model, twin):
            loss_of(m, batch(seed)).backward()
        # A sum of 48 products and of the embedding's 48 rows, in each of two passes.
        assert_same_gradients(tiles, dense, rtol=4 * 48 * EPS32)
    for optimizer in (tiles, dense):
        optimizer.step()
    torch.testing.assert_close(tiles.grad_norm, dense.grad_norm, rtol=4 * 48 * EPS32, atol=0)


def test_tiles_under_autocast(model):
    tiles, twin, dense = pair(model)
    losses = []
    for m in (model, twin):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_of(m, batch()))
        losses[-1].backward()
    assert torch.equal(*losses)
    # The dense gradient is rounded to bf16, half a unit of 2^-8; twice that where it is added to another one.
    assert_same_gradients(tiles, dense, rtol=2**-8)


def test_generating_with_tiles(tiny_llama):
    model = tiny_llama(num_hidden_layers=1, **SIZES)
    tiles, twin, _ = pair(model)
    tokens = batch()[:, :4]
    assert tiles.tiled_parameters
    out = [m.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (model, twin)]
    assert torch.equal(*out)


# torch.compile


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(128, 192), nn.Linear(192, 128, bias=False)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def blocks(n=2):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(n)])


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    torch._dynamo.reset()


def test_tiles_under_compile(graphs):
    """Whole, without a graph break; an input that needs no gradient; layers that a compiler would merge."""
    model = blocks()
    tiles, twin, dense = pair(model)
    x = torch.randn(3, 20, 128)

    def twice(m, x):
        return (m[1](x) + m[1](x)).square().mean()

    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    doubled = torch.compile(lambda x: twice(model, x), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for y in (whole(x), twin(x)):
            y.square().mean().backward()
        assert_same_gradients(tiles, dense, rtol=2 * 60 * EPS32)
    for loss in (doubled(x), twice(twin, x)):
        loss.backward()
    assert_same_gradients(tiles, dense, rtol=4 * 60 * EPS32)
    assert graphs() == (2, 0)
    before = whole(x[:, :2]).sum()
    with tiles.base_weights():
        with pytest.raises(RuntimeError, match="does not require grad"):
            whole(x).sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation|arrived inside base_weights"):
            before.backward()
    tiles.zero_grad()
    for o, y in ((tiles, whole(x)), (dense, twin(x))):
        y.square().mean().backward()
        o.step()
    y = whole(x)
    tiles.close()
    with pytest.raises(RuntimeError, match="between its forward and backward pass"):
        y.sum().backward()
    whole(x).sum().backward()
    assert model[0].a.weight.grad is not None


def test_tiles_under_compile_block_by_block(graphs):
    """Equal blocks share their graphs, although their parameters differ."""
    model = blocks(6)
    tiles, twin, dense = pair(model)
    for block in model:
        block.compile(backend="aot_eager")
    x = torch.randn(3, 20, 128)
    for m in (model, twin):
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        y.float().square().mean().backward()
    assert_same_gradients(tiles, dense, rtol=2**-8)
    n, breaks = graphs()
    assert n <= 3 and breaks == 0


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_the_ops_of_tile_layers_under_opcheck(transposed):
    layer = nn.Linear(64, 64)
    optimizer = SparseSGD(
        layer, MaskSet.from_bool({"weight": torch.ones(64, 64, dtype=torch.bool)}), tile_backward=True
    )
    number = layer._tile_route.number
    x = torch.randn(2, 5, 64, requires_grad=True)
    bias = torch.randn(64, requires_grad=True)
    for b in (bias, bias if transposed else None):
        torch.library.opcheck(
            torch.ops.sparse_opt.tile_linear.default, (x, layer.weight.detach(), b, number, transposed)
        )
    for weight in (layer.weight.detach(), None):
        args = (torch.randn(2, 5, 64), x.detach(), weight, number, transposed)
        torch.library.opcheck(torch.ops.sparse_opt.tile_linear_backward.default, args)
    assert optimizer.compact_grad(layer.weight) is not None
