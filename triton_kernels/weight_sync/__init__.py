"""Kernels of `sparse_opt.weight_sync`: active elements of many tensors, in the order of its messages."""

from .changes import check, list_changes, listed_sums, listed_write, write
from .index import IndexTable, put, take
from .values import (
    BLOCK,
    OPTIONS,
    TILE_BLOCK,
    VALUES,
    compare,
    digest_sum,
    ranks_of,
    select,
)

__all__ = [
    "BLOCK",
    "OPTIONS",
    "TILE_BLOCK",
    "VALUES",
    "IndexTable",
    "check",
    "compare",
    "digest_sum",
    "list_changes",
    "listed_sums",
    "listed_write",
    "put",
    "ranks_of",
    "select",
    "take",
    "write",
]
