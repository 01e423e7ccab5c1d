"""A small model of linear layers with tiles in its mask, and its twin with dense gradients under the same mask."""

import torch
from torch import nn

from sparse_opt import MaskSet, SparseSGD

EPS32 = torch.finfo(torch.float32).eps
SIZES = (130, 200, 150, 70)  # no multiples of a tile


def make(device, dtype=torch.float32):
    torch.manual_seed(0)
    a, b, c, d = SIZES
    layers = nn.Linear(a, b), nn.ReLU(inplace=True), nn.Linear(b, c, bias=False), nn.Tanh(), nn.Linear(c, d)
    return nn.Sequential(*layers).to(device, dtype)


def batch(device, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 33, SIZES[0], generator=generator).to(device, dtype)


def make_embedding(device, dtype=torch.float32):
    """The same with an embedding in place of the first layer."""
    rest = make(device, dtype)[1:]
    return nn.Sequential(nn.Embedding(300, SIZES[1], device=device, dtype=dtype), *rest)


def tokens(device, seed=0):
    """Ids with repetitions, a batch of `make_embedding`."""
    return torch.randint(300, (3, 33), generator=torch.Generator().manual_seed(seed)).to(device)


# How a model is made, and its batches: its first layer is linear, or an embedding.
FIRST_LAYERS = {"linear": (make, batch), "embedding": (make_embedding, tokens)}


def pair(device, make=make, *, pattern="tile64", density=0.3, mask=None, **options):
    """A model with tiles, its optimizer, and a copy of it with dense gradients under the same mask, and its."""
    model, twin = make(device), make(device)
    mask = mask or MaskSet.random(model, density=density, pattern=pattern, seed=1)
    # SGD's steps are as far apart as the gradients; Adam divides these by their size, be it of rounding errors alone.
    tiles = SparseSGD(model, mask, lr=1e-2, tile_backward=True, **options)
    dense = SparseSGD(twin, mask, lr=1e-2, tile_backward=False, **options)
    assert tiles.tiled_parameters and not dense.tiled_parameters
    return model, tiles, twin, dense


def loss_of(model, x):
    return model(x).float().square().mean()


def assert_same_gradients(tiles, dense, rtol=None):
    """Both sum T products for each element in fp32, in two orders; T <= 300 here.

    Each is off by about sqrt(T) eps/2 times the sum of the products' magnitudes (rounding errors walk at random; T in
    place of sqrt(T) at worst), which is at most sqrt(T) times their norm, and products of random signs sum to their
    norm: T eps for the two together, of the largest gradient at least.
    """
    rtol = 300 * EPS32 if rtol is None else rtol
    names = [name for buffer in tiles.gradient_buffers for name in buffer.names]
    assert names == [name for buffer in dense.gradient_buffers for name in buffer.names]
    params, twins = (
        [p for buffer in optimizer.gradient_buffers for p in buffer.params] for optimizer in (tiles, dense)
    )
    for name, p, q in zip(names, params, twins, strict=True):
        ours, theirs = tiles.compact_grad(p), dense.compact_grad(q)
        assert p.grad is None and (ours is None) == (theirs is None), name
        if ours is not None:
            assert theirs.abs().max() > 0, name
            assert (ours - theirs).abs().max() <= rtol * theirs.abs().max(), name
