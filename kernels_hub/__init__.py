"""The ops of sparse-opt, as a package that Hugging Face's `kernels` loads: the native backend of `sparse_opt.ops`.

The functions are those of `sparse_opt.ops`, documented there and in their docstrings. `backend` is the type of the
tensors' device, or may be left out. The optimizer, masks and other backends are in the package sparse-opt.
"""

from . import ops
from .errors import BackendUnavailable
from .ops import *  # noqa: F403  # all ops, whose names follow from the table of step ops

__all__ = ["BackendUnavailable", *ops.__all__]
