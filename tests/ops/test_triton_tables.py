"""The cached device tables of the Triton launchers: their content, when they are rebuilt, and their lifetime."""

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


def test_same_address_of_another_dtype_is_checked_again() -> None:
    tensors = [torch.zeros(4), torch.zeros(4)]
    tables.pointer_table("params", tensors, CPU)
    with pytest.raises(ValueError, match=r"params\[1\] is torch.float32, but params\[0\] is torch.int32"):
        tables.pointer_table("params", [tensors[0].view(torch.int32), tensors[1]], CPU)


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
