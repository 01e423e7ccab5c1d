"""The Triton kernels give the same bits with the launch sizes of every GPU, and with any split of tokens."""

import pytest
import torch
from test_tiles import PADDING, assert_bits, assert_sums, make, normals
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from sparse_opt import ops, triton_kernels
from sparse_opt.ops import reference
from sparse_opt.tensors import as_bits
from sparse_opt.triton_kernels import delta_codec, indexed_swap, launch, tile_weight_grad

if not triton_kernels.interpreted() and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.triton
DEVICE = torch.device("cpu") if triton_kernels.interpreted() else torch.device("cuda", 0)


def swap() -> list[Tensor]:
    dense, indices, compact = scattered()
    ops.indexed_swap_([dense], compact, indices, [3], [len(indices)], backend="triton")
    return [dense, compact]


def encode_and_apply() -> list[Tensor]:
    old, indices, values = scattered()
    new = old.clone().index_put_((indices.long(),), values)
    found = ops.delta_encode([old, old[:77]], [new, new[:77]], backend="triton")
    ops.delta_apply_([old], indices, values, [0], [len(indices)], backend="triton")
    return [*found, old]


def scattered() -> tuple[Tensor, Tensor, Tensor]:
    """A dense tensor of several programs of any size, and values for some of its elements."""
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(6000, generator=generator).bfloat16()
    indices = torch.randperm(6000, generator=generator)[:900].sort().values.int()
    values = torch.randn(900, generator=generator).bfloat16()
    return dense.to(DEVICE), indices.to(DEVICE), values.to(DEVICE)


def tiles(size: int) -> list[Tensor]:
    call = make(DEVICE, shapes=((128, 128),), tokens=(200,), tile_size=size, dtype=torch.bfloat16, draw=normals)
    sum_sq = torch.full((1,), torch.nan, device=DEVICE)
    return [call.run("triton", sum_sq=sum_sq)[PADDING:-PADDING], sum_sq]


CALLS = {"swap": swap, "delta": encode_and_apply, "tile64": lambda: tiles(64), "tile128": lambda: tiles(128)}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_sizes_of_every_gpu_give_the_same_bits(call, monkeypatch):
    found = []
    for sizes in (launch.Sizes(), launch.SIZES_OF_SM_90):
        for module in (delta_codec, indexed_swap, tile_weight_grad):
            monkeypatch.setattr(module, "sizes_of", lambda device, sizes=sizes: sizes)
        found.append([tensor.clone() for tensor in call()])
    for tensor, other in zip(*found, strict=True):
        assert tensor.isfinite().all()
        assert torch.equal(as_bits(tensor), as_bits(other))


@pytest.mark.parametrize("shapes", [((130, 70),), ((130, 70), (64, 128))], ids=["one", "list"])
@pytest.mark.parametrize(("tile_size", "dtype"), [(64, torch.bfloat16), (128, torch.float32)], ids=["64", "128"])
def test_parts_make_the_same_gradient(monkeypatch, tile_size, dtype, shapes) -> None:
    monkeypatch.setattr(tile_weight_grad, "LEAST_TOKENS", 50)
    monkeypatch.setattr(tile_weight_grad, "WHOLE_BELOW", 0)
    call = make(DEVICE, shapes=shapes, tokens=(170,), tile_size=tile_size, dtype=dtype, density=1.0)
    assert tile_weight_grad._splits(call.ends[-1], 170, tile_size, DEVICE) == 3
    sum_sq, found_inf = torch.full((len(shapes),), torch.nan, device=DEVICE), torch.zeros(1, device=DEVICE)
    options = {"scale": torch.tensor([0.5], device=DEVICE), "accumulate": True}
    got = call.run("triton", **options, sum_sq=sum_sq, found_inf=found_inf)
    assert_bits(got, call.run("reference", **options))
    assert_sums(sum_sq, call, got)
    assert found_inf.item() == 0


def test_parts_of_the_tokens_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_weight_grad, "LEAST_TOKENS", 20)
    monkeypatch.setattr(tile_weight_grad, "WHOLE_BELOW", 0)
    generator = torch.Generator().manual_seed(0)
    grad_output, x = (torch.randint(-4, 5, (170, n), generator=generator).to(DEVICE, torch.bfloat16) for n in (64, 70))
    offsets = torch.tensor([150, 150, 163], dtype=torch.int32, device=DEVICE)  # the last 7 tokens are of no expert
    tiles = ops.tile_table(torch.arange(3 * 64 * 70), (3 * 64, 70), 64).to(DEVICE)
    assert tile_weight_grad._splits(len(tiles), 170 // 3, 64, DEVICE) == 2
    made = []
    for op in (reference.tile_weight_grad_, triton_kernels.tile_weight_grad_):
        made.append(torch.ones(3 * 64 * 70, device=DEVICE))
        op(made[-1], [grad_output], [x], tiles, [0], [len(tiles)], tile_size=64, token_offsets=offsets)
    assert torch.equal(*made)
