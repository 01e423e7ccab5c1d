"""The kernels read the arguments of step ops by their position: it must be that of the schema."""

import pytest
import torch

from sparse_opt import backends
from sparse_opt.ops.step_ops import STEP_OPS


@pytest.mark.parametrize("op", STEP_OPS)
def test_the_kernels_of_a_step_read_the_arguments_of_its_schema(op):
    module, cause = backends.native_module()
    if module is None:
        pytest.skip("needs the extension: " + cause)
    schema = getattr(torch.ops.sparse_opt_native, op).default._schema
    assert module.step_arguments()[op] == [argument.name for argument in schema.arguments]
