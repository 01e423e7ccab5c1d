"""Shared by the tests of tiles in models, whose models are in tiled_models.py; puts that file on the import path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sparse_opt import backends

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def native(device):
    if backends.choose("tile_weight_grad_", device.type) not in ("cpu", "cuda"):
        pytest.skip("needs the extension's backend to be the chosen one")


@pytest.fixture
def few_under_the_interpreter(request):
    if os.environ.get("TRITON_INTERPRET") == "1" and "gradients_are" not in request.node.name:
        pytest.skip("takes minutes under Triton's interpreter; tests/ops runs the kernel there")
