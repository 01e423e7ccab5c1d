"""Tensors of more than 2**31 and 2**32 elements, with memory for slices or a few pages only."""

from __future__ import annotations

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.masks.patterns import expand_units, matrix_shape, unit_grid
from sparse_opt.weight_sync import Destination, WeightReceiver, WeightSender
from sparse_opt.weight_sync.encoding import Layout, LayoutTensor
from sparse_opt.weight_sync.index import choose
from sparse_opt.weight_sync.sender import ActiveValues


class NumberedValues(ActiveValues):
    """The active values of a weight that no process holds: 0, 1, 2, ... plus `base`, in fp32."""

    def __init__(self, mask: MaskSet, device: str) -> None:
        self.mask, self.base = mask, 0
        tensors = tuple(LayoutTensor(n, mask.shapes[n], "float32", t.numel()) for n, t in mask.indices.items())
        self.layout = Layout(mask.pattern, tensors)
        self.device = torch.device(device)
        self.backend = choose(self.device, "reference")

    def take(self) -> dict[str, torch.Tensor]:
        return {"float32": torch.arange(self.mask.nnz, dtype=torch.float32, device=self.device) + self.base}


@pytest.mark.parametrize("shape", [(2**20 + 70, 2**16 + 48), (2**32 + 50,), (3, 2**31 + 70_000)], ids=str)
@pytest.mark.parametrize("pattern", ["element", "run32", "tile64"])
def test_slices_of_a_large_tensor(place, pattern, shape):
    """The receiver has a transposed slice at the end of the last rows, and one at the beginning."""
    device, backend = place
    rows, columns = matrix_shape(shape)
    down, across = unit_grid(shape, pattern)
    corner = [r * across + c for r in (0, down - 2, down - 1) for c in (0, 1, across - 2, across - 1)]
    units = torch.tensor(sorted({u for u in corner if u >= 0}))
    positions = expand_units(units, shape, pattern)
    mask = MaskSet({"w": positions}, {"w": shape}, pattern=pattern)
    values = NumberedValues(mask, device)
    sender = WeightSender(values)
    last, right = (max(rows - 200, 0), rows), (columns - 130, columns)
    end = torch.zeros(130, last[1] - last[0], device=device).t()
    top, left = (0, min(rows, 3)), (0, 100)
    begin = torch.zeros(top[1], 100, device=device)
    receiver = WeightReceiver(
        None, destinations={"w": [Destination(end, last, right), Destination(begin, top, left)]}, backend=backend
    )
    receiver.receive(sender.mask_message())
    receiver.receive(sender.state_message())
    check(positions, columns, 0, (end, last, right), (begin, top, left))
    values.base = 1000
    receiver.receive(sender.update().wait())
    check(positions, columns, 1000, (end, last, right), (begin, top, left))


def check(positions, columns, base, *slices):
    row, column = positions // columns, positions % columns
    found = 0
    for tensor, (r0, r1), (c0, c1) in slices:
        inside = (row >= r0) & (row < r1) & (column >= c0) & (column < c1)
        expected = torch.zeros(tensor.shape)
        expected[row[inside] - r0, column[inside] - c0] = inside.nonzero().view(-1).float() + base
        assert torch.equal(tensor.cpu(), expected)
        found += int(inside.sum())
    assert found


def test_a_whole_tensor(place):
    """Elements on both sides of 2**31 are read and written where torch's indexing finds them."""
    device, backend = place
    numel = 2**31 + 70_000
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GB free on the CUDA device")
    weight = torch.empty(numel, dtype=torch.bfloat16, device=device)  # on the CPU its pages are not touched
    positions = torch.tensor([0, 2**16, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, numel - 65_600, numel - 1])
    at = positions.to(device)
    weight[at] = torch.arange(8, dtype=torch.bfloat16, device=device)
    sender = WeightSender({"w": weight}, MaskSet({"w": positions}, {"w": (numel,)}), backend=backend)
    assert sender.state_message().tensors["bfloat16.values"].tolist() == list(range(8))
    receiver = WeightReceiver({"w": weight}, backend=backend)
    assert receiver.receive(sender.mask_message()) == 0
    weight[at[::3]] += 100
    update = sender.update().wait()
    weight[at[::3]] -= 100
    assert receiver.receive(update) == 1
    assert weight[at].tolist() == [100, 1, 2, 103, 4, 5, 106, 7]
