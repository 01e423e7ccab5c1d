"""The launcher of the distributed tests: results by rank, and failures that name the rank."""

from __future__ import annotations

import pytest
import torch
from launch import launch

pytestmark = pytest.mark.dist


def summed(rank: int, factor: float) -> float:
    value = torch.tensor([factor * rank])
    torch.distributed.all_reduce(value)
    return float(value)


def fails_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 does not like this")
    torch.distributed.barrier()


def test_results_are_returned_by_rank() -> None:
    assert launch(summed, 2, 3.0) == [3.0, 3.0]


def test_a_failing_rank_is_named() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with code 1.*ValueError: rank 1 does not like this"):
        launch(fails_on_rank_1, 2)
