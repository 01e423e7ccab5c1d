"""The ops as Triton kernels: one file per family, with `_x_kernel` next to its launcher `x`.

Launchers have the names and arguments of `sparse_opt.ops` except `backend`, and give the bits of its reference. They
are safe to call directly, without the argument checks of `sparse_opt.ops`, on arguments that passed them once: when
a list has other tensors than in an earlier call, their devices, dtypes and strides are checked again. The optimizer
steps have no defaults for their options here.

`weight_sync` has the kernels of the package `sparse_opt.weight_sync`, which are not ops.

Only `delta_encode` waits for the device. All other launchers can be captured in a CUDA graph, after one call outside of
it that compiles the kernel.
"""

import functools

from . import weight_sync
from .delta_codec import delta_apply_, delta_encode
from .indexed_replace import indexed_replace_
from .indexed_swap import indexed_swap_
from .launch import interpreted
from .masked_grad_gather import masked_grad_gather_
from .step_rules import RULES
from .steps import step
from .tile_weight_grad import tile_weight_grad_

__all__ = [
    "delta_apply_",
    "delta_encode",
    "indexed_replace_",
    "indexed_swap_",
    "interpreted",
    "masked_grad_gather_",
    "tile_weight_grad_",
    "weight_sync",
    *RULES,
]

globals().update({name: functools.partial(step, name) for name in RULES})
