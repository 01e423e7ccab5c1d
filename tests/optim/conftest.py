"""Fixtures of the optimizers' tests."""

import functools
import inspect
import os

import pytest
from tiled_models import FIRST_LAYERS

from sparse_opt import backends
from sparse_opt.ops import STEP_OPS
from sparse_opt.optim import OPTIMIZERS


@pytest.fixture(autouse=True)
def threads(two_threads):
    """The kernels' threads are tested here."""


@pytest.fixture(params=OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def sparse_optimizer(request):
    """Each optimizer, for tests that apply to all; options turn on optional states such as momentum."""
    own = inspect.signature(request.param).parameters
    options = {option: 0.9 for op in STEP_OPS.values() for option in op.optional.values() if option in own}
    return functools.partial(request.param, **options)


@pytest.fixture(params=["chosen", "reference"])
def backend(request):
    """The default backend, and the one without native objects."""
    return None if request.param == "chosen" else request.param


@pytest.fixture
def autograd_library():
    """For tests of what only the native collection of gradients does; an installed wheel is without it."""
    library, why = backends.autograd_module()
    if library is None:
        pytest.skip("needs sparse_opt._autograd: " + why)


@pytest.fixture
def native(device, autograd_library):
    if backends.choose(device.type) not in ("cpu", "cuda"):
        pytest.skip("needs the extension's backend to be the chosen one")


@pytest.fixture
def few_under_the_interpreter(request):
    if os.environ.get("TRITON_INTERPRET") == "1" and "gradients_are" not in request.node.name:
        pytest.skip("takes minutes under Triton's interpreter; tests/ops runs the kernel there")


@pytest.fixture(params=FIRST_LAYERS)
def first_layer(request):
    """(make, batch) of a model whose first layer is of this kind."""
    return FIRST_LAYERS[request.param]
