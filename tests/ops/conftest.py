import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


def fast_backends():
    """The available (device, backend) pairs, which depend on the build and on TRITON_INTERPRET."""
    from sparse_opt import backends

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [(d, b) for d in devices for b in backends.available(d) if b != "reference"]


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames:
        on_gpu, on_triton = pytest.mark.gpu, pytest.mark.triton
        places = [
            pytest.param((d, b), id=f"{d}-{b}", marks=[*[on_gpu] * (d == "cuda"), *[on_triton] * (b == "triton")])
            for d, b in fast_backends()
        ]
        metafunc.parametrize("place", places)
    if "any_place" in metafunc.fixturenames:
        pairs = [("cpu", "reference"), *fast_backends()]
        if torch.cuda.is_available():
            pairs.append(("cuda", "reference"))
        metafunc.parametrize("any_place", [pytest.param(p, id="-".join(p)) for p in pairs])
