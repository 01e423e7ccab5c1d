"""The ops as Triton kernels: one file per family, `_x_kernel` beside its launcher `x`.

Launchers have the names and arguments of `sparse_opt.ops`, less `backend`, and give the bits of its reference. They
are safe to call directly, without the argument checks of `sparse_opt.ops`, on arguments that passed them once: when
a list holds other tensors than in a call before, its devices, dtypes and strides are looked at again.

No launcher but `delta_encode` waits for the device, and all the others can be captured in a CUDA graph, after one
call outside of it that compiles the kernel.
"""

from .delta_codec import delta_apply_, delta_encode
from .indexed_adamw import indexed_adamw_
from .indexed_sgd import indexed_sgd_
from .indexed_swap import indexed_swap_
from .launch import interpreted
from .masked_grad_gather import masked_grad_gather_
from .tile_weight_grad import tile_weight_grad_

__all__ = [
    "delta_apply_",
    "delta_encode",
    "indexed_adamw_",
    "indexed_sgd_",
    "indexed_swap_",
    "interpreted",
    "masked_grad_gather_",
    "tile_weight_grad_",
]
