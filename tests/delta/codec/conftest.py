"""Fixtures for codec tests: words to encode, and devices with a native codec."""

import pytest
import torch

from sparse_opt import backends


@pytest.fixture
def place(device: torch.device) -> torch.device:
    """Each device; one without a native codec is skipped with the reason."""
    if cause := backends.why_unavailable(device.type, device.type):
        pytest.skip(f"needs the native backend of {device.type}: {cause}")
    return device
