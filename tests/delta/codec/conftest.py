"""Words to code, and where the native codec can run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sparse_opt import backends

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def place(device: torch.device) -> torch.device:
    """Each device, skipped with the reason where it has no native codec."""
    if cause := backends.why_unavailable(device.type, device.type):
        pytest.skip(f"needs the native backend of {device.type}: {cause}")
    return device
