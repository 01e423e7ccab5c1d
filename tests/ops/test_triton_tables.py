"""The cached device tables of the Triton launchers: their content, when they are rebuilt, and their lifetime."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from sparse_opt import triton_kernels
from sparse_opt.triton_kernels import tables

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "POINTER_TABLES", tables.TableCache(4))
    monkeypatch.setattr(tables, "BLOCK_TABLES", tables.TableCache(4))


def test_same_tensors_share_a_table() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    table = tables.pointer_table("params", tensors, CPU)
    assert table.tolist() == [t.data_ptr() for t in tensors]
    assert tables.pointer_table("params", list(tensors), CPU) is table


def test_moved_tensor_gets_a_new_table() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    table = tables.pointer_table("params", tensors, CPU)
    before = table.tolist()
    moved = [tensors[0], tensors[1].clone()]
    assert tables.pointer_table("params", moved, CPU).tolist() == [t.data_ptr() for t in moved]
    assert table.tolist() == before
    assert tables.pointer_table("params", tensors, CPU) is table


def test_order_is_content() -> None:
    a, b = torch.zeros(3), torch.zeros(3)
    assert tables.pointer_table("p", [a, b], CPU).tolist() == tables.pointer_table("p", [b, a], CPU).tolist()[::-1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(4, 4).t(), r"params\[1\] of shape \[4, 4\] has strides \[1, 4\], expected contiguous"),
        (torch.zeros(4, dtype=torch.float64), r"params\[1\] is torch.float64, but params\[0\] is torch.float32"),
        (torch.zeros(4, device="meta"), r"params\[1\] is on meta, expected cpu"),
    ],
    ids=["strides", "dtype", "device"],
)
def test_unseen_tensors_are_checked(bad: torch.Tensor, message: str) -> None:
    if bad.is_meta:
        bad.data_ptr = lambda: 0  # type: ignore[method-assign]  # a meta tensor has none
    with pytest.raises(ValueError, match=message):
        tables.pointer_table("params", [torch.zeros(4), bad], CPU)
    assert len(tables.POINTER_TABLES) == 0


def test_same_address_of_another_dtype_is_checked_again() -> None:
    tensors = [torch.zeros(4), torch.zeros(4)]
    tables.pointer_table("params", tensors, CPU)
    with pytest.raises(ValueError, match=r"params\[1\] is torch.float32, but params\[0\] is torch.int32"):
        tables.pointer_table("params", [tensors[0].view(torch.int32), tensors[1]], CPU)


def test_least_recently_used_table_goes_first() -> None:
    lists = [[torch.zeros(1), torch.zeros(1)] for _ in range(5)]
    made = [tables.pointer_table("params", tensors, CPU) for tensors in lists[:4]]
    assert tables.pointer_table("params", lists[0], CPU) is made[0]
    tables.pointer_table("params", lists[4], CPU)
    assert len(tables.POINTER_TABLES) == 4
    assert tables.pointer_table("params", lists[0], CPU) is made[0]
    assert tables.pointer_table("params", lists[1], CPU) is not made[1]


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        ([0, 8, 8], [8, 8, 20]),
        ([3, 40, 9], [9, 41, 40]),
        ([0], [0]),
        ([5, 2**33], [6, 2**33 + 17]),
        ([], []),
    ],
    ids=["empty-segment", "out-of-order", "no-slots", "past-32-bits", "no-tensor"],
)
def test_blocks_cover_each_segment_once(starts: list[int], ends: list[int]) -> None:
    block = 8
    expected, firsts = [], [0]
    for tensor, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while start < end:
            stop = min(end, (start // block + 1) * block)
            expected.append((tensor, start, stop - start))
            start = stop
        firsts.append(len(expected))
    blocks = tables.block_table(starts, ends, block, CPU)
    assert [(packed >> 32, first, packed & 0xFFFFFFFF) for first, packed in blocks.rows.tolist()] == expected
    assert blocks.firsts.tolist() == firsts
    assert blocks.programs == len(expected)


def test_blocks_are_kept_by_segments_and_size() -> None:
    blocks = tables.block_table([0, 5], [5, 9], 8, CPU)
    assert tables.block_table((0, 5), (5, 9), 8, CPU) is blocks
    assert tables.block_table([0, 5], [5, 8], 8, CPU) is not blocks
    assert tables.block_table([0, 5], [5, 9], 16, CPU) is not blocks
    for end in range(10, 20):
        tables.block_table([0], [end], 8, CPU)
    assert len(tables.BLOCK_TABLES) == 4


compiled_only = pytest.mark.skipif(triton_kernels.interpreted(), reason="needs TRITON_INTERPRET unset")


class _Swap:
    """A swap on two tensors; it is its own inverse, and its two states can be distinguished."""

    def __init__(self) -> None:
        self.dense = [torch.zeros(100, device="cuda"), torch.zeros(50, device="cuda")]
        self.compact = torch.arange(1.0, 6.0, device="cuda")
        self.indices = torch.tensor([3, 50, 99, 0, 49], dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        triton_kernels.indexed_swap_(self.dense, self.compact, self.indices, [0, 3], [3, 5])

    def swapped(self) -> bool:
        inside = [self.dense[0][[3, 50, 99]], self.dense[1][[0, 49]]]
        ones, others = torch.cat(inside).tolist(), self.compact.tolist()
        if ones == [1.0, 2.0, 3.0, 4.0, 5.0] and others == [0.0] * 5:
            return True
        assert ones == [0.0] * 5 and others == [1.0, 2.0, 3.0, 4.0, 5.0]
        return False


@pytest.mark.gpu
@compiled_only
def test_table_made_in_a_capture_is_filled_by_each_replay() -> None:
    _Swap()()  # compiles
    swap, graph = _Swap(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swap()
    assert not swap.swapped()
    swap()  # eager, before any replay: must not read the table of the capture
    assert swap.swapped()
    graph.replay()
    assert not swap.swapped()
    graph.replay()
    assert swap.swapped()


@pytest.mark.gpu
@compiled_only
def test_tables_of_a_graph_outlive_the_cache() -> None:
    swap, graph = _Swap(), torch.cuda.CUDAGraph()
    swap()
    with torch.cuda.graph(graph):
        swap()
    others = [_Swap() for _ in range(tables.POINTER_TABLES.capacity + 1)]
    for other in others:
        other()
        assert other.swapped()
    overwritten = [torch.full((2,), -1, dtype=torch.int64, device="cuda") for _ in range(4096)]
    graph.replay()
    assert not swap.swapped()
    del overwritten


@pytest.mark.gpu
@compiled_only
def test_table_is_read_on_other_streams_once_filled() -> None:
    swap = _Swap()
    _Swap()()
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # the upload waits behind this on the current stream
    tables.pointer_table("dense", swap.dense, swap.compact.device)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        swap()
    other.synchronize()
    assert swap.swapped()
