import pytest
import torch


def fast_backends():
    """The available (device, backend) pairs, which depend on the build and on TRITON_INTERPRET."""
    from sparse_opt import backends

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [(d, b) for d in devices for b in backends.available(d) if b != "reference"]


def place_param(device, backend):
    marks = [*[pytest.mark.gpu] * (device == "cuda"), *[pytest.mark.triton] * (backend == "triton")]
    return pytest.param((device, backend), id=f"{device}-{backend}", marks=marks)


@pytest.fixture(autouse=True)
def threads(two_threads):
    """The kernels' threads are tested here."""


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", [place_param(*pair) for pair in fast_backends()])
    if "any_place" in metafunc.fixturenames:
        pairs = [("cpu", "reference"), *fast_backends()]
        if torch.cuda.is_available():
            pairs.append(("cuda", "reference"))
        metafunc.parametrize("any_place", [place_param(*pair) for pair in pairs])
