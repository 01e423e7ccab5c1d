"""The places where the tests of weight_sync run, and the weights that they use."""

import pytest
import torch

from sparse_opt import backends

PLACES = [("cpu", b) for b in ("reference", "triton") if not backends.why_unavailable(b, "cpu")]
if torch.cuda.is_available():
    PLACES += [("cuda", b) for b in ("reference", "triton") if not backends.why_unavailable(b, "cuda")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `place` with (device, backend); Triton on the CPU needs TRITON_INTERPRET=1."""
    if "place" in metafunc.fixturenames:
        params = []
        for device, backend in PLACES:
            marks = [*[pytest.mark.gpu] * (device == "cuda"), *[pytest.mark.triton] * (backend == "triton")]
            params.append(pytest.param((device, backend), id=f"{device}-{backend}", marks=marks))
        metafunc.parametrize("place", params)
