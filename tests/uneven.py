"""A model whose rows do not split evenly over ranks, and the content of files with metadata in random order."""

import json

import torch
from torch import Tensor, nn


class Uneven(nn.Module):
    """Has 130, 7, 5 and 1 rows, a tied head, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(130, 70)
        self.hidden = nn.Linear(70, 7)
        self.scale = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(7, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(70, 130, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.out((self.hidden(self.embedding(rows)) * self.scale).bfloat16())


def content(data: bytes) -> tuple[object, bytes]:
    """The header of a safetensors file, and all bytes after it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]
