"""Embeddings whose weight gradient is computed tile by tile, with and without an output layer that has the weight."""

import copy
import math

import pytest
import torch
from computed import Computed
from tiled_models import EPS32, assert_same_gradients
from torch import nn

from sparse_opt import GraphedStep, MaskSet, SparseAdamW, SparseSGD
from sparse_opt.optim.gradients import tile_embedding, tile_layers

pytestmark = pytest.mark.usefixtures("few_under_the_interpreter")

SHAPES = [(256, 128), (300, 200), (331, 97)]  # whole tiles; ragged with pieces of 8 elements; of single elements
PADDING = 3


class Model(nn.Module):
    """Logits of tokens, by an output layer that has the embedding's weight or its own."""

    def __init__(self, tied=True, shape=(300, 200)):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(*shape, padding_idx=PADDING)
        self.hidden, self.head = nn.Linear(shape[1], shape[1]), nn.Linear(shape[1], shape[0], bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.hidden(self.embedding(ids))))


def batch(device, seed=0, shape=(3, 40), n_rows=300):
    """Token ids with repetitions, and some paddings."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(n_rows, shape, generator=generator)
    ids[0] = 7
    ids[1, :5] = PADDING
    return ids.to(device)


def optimizers_of(model, twin, *, density=0.4, pattern="tile64", **options):
    mask = MaskSet.random(model, density=density, pattern=pattern, seed=1)
    tiles = SparseSGD(model, mask, lr=1e-2, tile_backward=True, **options)
    return tiles, SparseSGD(twin, mask, lr=1e-2, tile_backward=False, **options)


def model_pair(device, tied=True, **options):
    """A model with tiles, its optimizer, and a copy of it with dense gradients under the same mask, and its."""
    model, twin = Model(tied).to(device), Model(tied).to(device)
    tiles, dense = optimizers_of(model, twin, **options)
    assert "embedding.weight" in tiles.tiled_parameters and not dense.tiled_parameters
    assert has_route(model.embedding) and has_route(model.head)
    return model, tiles, twin, dense


def embedding_pair(device, shape=(300, 200), dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Embedding(*shape, padding_idx=PADDING).to(device, dtype)
    twin = copy.deepcopy(model)
    tiles, dense = optimizers_of(model, twin, **options)
    assert tiles.tiled_parameters == ("weight",) and has_route(model)
    return model, tiles, twin, dense


def has_route(module):
    assert ("forward" in vars(module)) == ("_tile_route" in vars(module))
    return "forward" in vars(module)


def loss_of(model, ids):
    return model(ids).float().square().mean()


@pytest.mark.parametrize("sums_bytes", [2**24, 1], ids=["", "in-parts"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", ["tile64", "tile128"])
def test_embedding_gradients_are_the_dense_ones_over_micro_batches(pattern, shape, sums_bytes, device, monkeypatch):
    """To the bit: the rows of a token are added up in the same order."""
    monkeypatch.setattr(tile_embedding, "_MAX_SUMS_BYTES", sums_bytes)
    model, tiles, twin, dense = embedding_pair(device, shape, pattern=pattern)
    for micro_batches in ([(3, 40), (3, 1), (3, 7, 2)], [(3, 5)]):  # the second step overwrites
        for optimizer in (tiles, dense):
            optimizer.zero_grad()
        for seed, ids_shape in enumerate(micro_batches):
            ids = batch(device, seed, ids_shape, shape[0])
            grad = torch.randn(*ids_shape, shape[1], generator=torch.Generator().manual_seed(seed)).to(device)
            outputs = model(ids), twin(ids)
            assert torch.equal(*outputs)
            for output in outputs:
                output.backward(grad)
            found, expected = tiles.compact_grad(model.weight), dense.compact_grad(twin.weight)
            assert torch.equal(found, expected) and found.any() and model.weight.grad is None
    assert not found[(tiles.mask["weight"] // shape[1] == PADDING).to(device)].any()
    torch.testing.assert_close(tiles.clip_grad_norm_(1.0), found.norm(), rtol=100 * EPS32, atol=0)


@pytest.mark.parametrize("backend", ["reference", None], ids=["reference", "chosen"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32-grads", "bf16-grads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_rows_of_16_bits_are_added_in_fp32(dtype, grad_dtype, backend, device):
    shape, ids = SHAPES[1], batch(device)
    model, tiles, _, _ = embedding_pair(device, dtype=dtype, grad_dtype=grad_dtype, backend=backend)
    grads = [
        torch.randn(*ids.shape, shape[1], generator=torch.Generator().manual_seed(s)).to(ids.device, dtype)
        for s in (0, 1)
    ]
    for grad in grads:
        model(ids).backward(grad)
    exact = torch.zeros(shape, dtype=torch.float64, device=device)
    sizes = torch.zeros_like(exact)  # of what is added up
    kept = (ids != PADDING)[..., None]
    for grad in grads:
        exact.index_add_(0, ids.view(-1), (grad * kept).double().view(-1, shape[1]))
        sizes.index_add_(0, ids.view(-1), (grad * kept).double().abs().view(-1, shape[1]))
    active = tiles.mask.bool("weight").to(device)
    error = (tiles.compact_grad(model.weight).double() - exact[active]).abs()
    # At most 45 rows of a token and two passes; a bf16 buffer rounds the sum of each pass to 8 bits.
    eps = 47 * EPS32 / 2 + (2 * 2**-8 if grad_dtype == torch.bfloat16 else 0)
    assert (error <= eps * sizes[active]).all()


def test_ids_of_32_bits_with_a_strided_gradient_and_no_ids(device):
    model, tiles, twin, dense = embedding_pair(device)
    ids = batch(device).int()
    for m in (model, twin):
        m(ids.t()).transpose(0, 2)[:, :20].square().sum().backward()
    assert torch.equal(tiles.compact_grad(model.weight), dense.compact_grad(twin.weight))
    tiles.zero_grad()
    model(ids[:0]).sum().backward()
    grad = tiles.compact_grad(model.weight)
    assert grad.numel() == tiles.mask.nnz and not grad.any()


@pytest.mark.parametrize("backend", [None, "reference"], ids=["chosen", "reference"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_embedding_gradients_are_the_dense_ones(tied, backend, device):
    model, tiles, twin, dense = model_pair(device, tied, backend=backend)
    for seed in range(3):
        for m in (model, twin):
            loss_of(m, batch(device, seed)).backward()
        # Sums of 120 products and of the embedding's rows, in each of three passes; see assert_same_gradients.
        assert_same_gradients(tiles, dense, rtol=600 * EPS32)
    for optimizer in (tiles, dense):
        optimizer.step()
    for m in (model, twin):
        loss_of(m, batch(device, 4)).backward()  # without zero_grad(): it overwrites
    assert_same_gradients(tiles, dense, rtol=900 * EPS32)  # of weights that a step has moved apart by as much


def test_several_embeddings_may_have_a_weight(device):
    def make():
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Embedding(300, 200, scale_grad_by_freq=i == 2) for i in range(3))
        for layer in layers[1:]:
            layer.weight = layers[0].weight
        return layers.to(device)

    model, twin = make(), make()
    tiles, dense = optimizers_of(model, twin)
    assert tiles.tiled_parameters == ("0.weight",) and [has_route(layer) for layer in model] == [True, True, False]
    for m in (model, twin):
        sum(layer(batch(device, i)).sum(-1).square().mean() for i, layer in enumerate(m)).backward()
    assert_same_gradients(tiles, dense)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_no_dense_embedding_gradient_is_computed(tied, device):
    largest = []
    model, _tiles, twin, _dense = model_pair(device, tied)
    for m in (model, twin):
        loss = loss_of(m, batch(device, shape=(3, 5)))
        with Computed(m) as computed:
            loss.backward()
        largest.append(max(map(math.prod, computed.shapes)))
    assert largest[1] == 300 * 200 and largest[0] < 300 * 200


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_norm": 1.0}, r"'weight': its embedding has the option max_norm=1.0"),
        ({"scale_grad_by_freq": True}, "the option scale_grad_by_freq=True"),
        ({"sparse": True}, "the option sparse=True"),
        ({}, "a forward that is not its class's"),
    ],
    ids=["max-norm", "scaled", "sparse", "own-forward"],
)
def test_embeddings_without_support_keep_the_dense_gradient(options, reason, device):
    embedding = nn.Embedding(128, 64, **options).to(device)
    if not options:
        embedding.forward = lambda ids: nn.functional.embedding(ids, embedding.weight)
    own = vars(embedding).get("forward")
    mask = MaskSet.random(embedding, density=0.5, pattern="tile64")
    with pytest.raises(ValueError, match=reason):
        SparseSGD(embedding, mask, lr=1e-2, tile_backward=True)
    optimizer = SparseSGD(embedding, mask, lr=1e-2)
    assert optimizer.tiled_parameters == () and vars(embedding).get("forward") is own


def test_an_output_layer_computes_tiles_if_its_embedding_does_not(device):
    def make():
        model = Model()
        model.embedding = nn.Embedding(300, 200, _weight=model.embedding.weight.detach().clone(), max_norm=1.0)
        model.head.weight = model.embedding.weight
        return model.to(device)

    model, twin = make(), make()
    tiles, dense = optimizers_of(model, twin)
    assert "embedding.weight" in tiles.tiled_parameters and has_route(model.head) and not has_route(model.embedding)
    for m in (model, twin):
        loss_of(m, batch(device)).backward()
    assert_same_gradients(tiles, dense)


def test_an_option_that_is_set_later_is_respected(device):
    model, tiles, twin, dense = embedding_pair(device)
    for m in (model, twin):
        m.scale_grad_by_freq = True
        m(batch(device)).square().sum().backward()
    assert torch.equal(tiles.compact_grad(model.weight), dense.compact_grad(twin.weight))


def test_embeddings_are_tiled_at_low_densities(device, monkeypatch):
    embedding = nn.Embedding(640, 128).to(device)  # 20 tiles
    mask = torch.zeros(640, 128, dtype=torch.bool)
    mask[64:128, :64] = True
    masks = {1: MaskSet.from_bool({"weight": mask})}
    mask[256:320] = True
    masks[3] = MaskSet.from_bool({"weight": mask})
    for n_tiles, taken in ((1, ("weight",)), (3, ())):
        optimizer = SparseSGD(embedding, masks[n_tiles], lr=1e-2)
        assert optimizer.tiled_parameters == taken and has_route(embedding) == bool(taken)
        optimizer.close()
    head = nn.Linear(128, 640, bias=False)
    head.weight = embedding.weight
    tied = nn.ModuleList([embedding, head])
    monkeypatch.setattr(tile_layers, "MAX_TILED_EMBEDDING_DENSITY", 0.0)
    optimizer = SparseSGD(tied, MaskSet.from_bool({"0.weight": mask}), lr=1e-2)
    assert optimizer.tiled_parameters == ("0.weight",) and has_route(head) and not has_route(embedding)


def test_an_embedding_with_tiles_under_autocast(device):
    model, tiles, twin, dense = model_pair(device)
    losses = []
    for m in (model, twin):
        with torch.autocast(device.type, torch.bfloat16):
            losses.append(loss_of(m, batch(device)))
        losses[-1].backward()
    assert torch.equal(*losses)
    # The dense gradient of the output layer is rounded to bf16, half a unit of 2^-8.
    assert_same_gradients(tiles, dense, rtol=2**-8)


def test_a_compiled_model_has_a_dense_embedding_gradient(device):
    """The output layer's part of a tied weight still comes by tiles, and the two add up."""
    torch._dynamo.reset()
    model, tiles, twin, dense = model_pair(device)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        for m in (whole, twin):
            loss_of(m, batch(device, seed)).backward()
        assert_same_gradients(tiles, dense, rtol=600 * EPS32)
    loss_of(model, batch(device, 2)).backward()  # eager passes of the same model use tiles
    loss_of(twin, batch(device, 2)).backward()
    assert_same_gradients(tiles, dense, rtol=900 * EPS32)
    torch._dynamo.reset()


def _train(graphs, *, tied, n_tokens, backend):
    torch.manual_seed(0)
    model = Model(tied, shape=(1000, 192)).to("cuda", torch.bfloat16)
    mask = MaskSet.random(model, density=0.3, pattern="tile64", seed=1)
    lr = torch.tensor(1e-2, device="cuda")
    optimizer = SparseAdamW(model, mask, lr=lr, tile_backward=True, backend=backend)
    assert has_route(model.embedding)

    def step(ids):
        for part in ids.chunk(2):
            loss_of(model, part).backward()
        norm = optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    call = GraphedStep(step, optimizer, n_warmup=2) if graphs else step
    norms = []
    for i in range(8):
        norms.append(call(batch("cuda", i, (4, n_tokens // 2), 1000)).clone())
    assert not graphs or call.n_graphs == 1
    return norms, [p.detach().clone() for p in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("n_tokens", [512, 8192])  # torch adds up more than 3072 rows by another kernel
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_replays_with_a_tiled_embedding_give_the_bits_of_eager_steps(tied, n_tokens, backend):
    options = {"tied": tied, "n_tokens": n_tokens, "backend": backend}
    eager, again, graphed = (_train(graphs, **options) for graphs in (False, False, True))
    for other in (again, graphed):
        for a, b in zip((*eager[0], *eager[1]), (*other[0], *other[1]), strict=True):
            assert torch.equal(a, b)
