"""Optimizers that train the active elements of a mask.

How a gradient travels from autograd to the weights, with grads='compact':

1. Autograd accumulates the gradient of a parameter in `param.grad`. A post-accumulate-grad hook passes it to the
   parameter's `Receiver` (collector.py). A tiled layer (tile_layers.py) never computes the dense gradient: the `Route`
   of a linear layer (tile_backward.py) passes the two operands of the product instead, that of an embedding
   (tile_embedding.py) the active elements.
2. `GradientCollector` (collector.py) decides for the whole optimizer whether the gradient is accepted: not inside
   `base_weights()`, and not after clipping. The first gradient after a step drops those that the step has used.
3. The `GradientBuffer` (gradient_buffer.py) of the parameter's bucket adds the active elements to its flat tensor
   `values`, and computes their sum of squares in the same pass. While steps 1 and 2 have nothing to decide, the native
   buffer receives gradients directly in C++, without the interpreter's lock.
4. With a process group, the `GradientReducer` (reduction.py) replaces the values by their mean over the ranks, piece by
   piece: during the backward pass a `BackwardNotifier` (backward_notifier.py) reports to it which pieces are complete.
   After it all ranks have the same values, and nothing below communicates. ranks/group.py has the collectives.
5. Clipping (clipping.py) adds up the sums of squares of all buffers; the norm gives the coefficient of the next step.
6. `Bucket.prepare_step` (buckets.py) prepares the call of the step's op on the parameters, the buffer's values and the
   bucket's state. Once all buckets are prepared and checked, the calls are made, and the collector marks the gradients
   as used.

Parameters are in one bucket (buckets.py), and their gradients in one buffer, if one op call can take them all: same
parameter group, device, dtype and layout of the indices. binding.py builds both from a mask, and is the only place that
chooses between the native and the Python implementation.

Under FSDP2 each rank stores a `Shard` (sharding.py) of each parameter, and autograd accumulates gradients into another,
unsharded parameter. Steps 1 to 5 are those of the whole, unsharded parameters; the op, the state and the base weights
are those of the shards' local tensors. Without FSDP2 all three are the parameter itself.
"""

from .adamw import SparseAdamW
from .graphed_step import GraphedStep
from .lion import SparseLion
from .options import SharedOptions
from .sgd import SparseSGD
from .sparse_optimizer import SparseOptimizer

OPTIMIZERS = (SparseAdamW, SparseLion, SparseSGD)

__all__ = [
    "OPTIMIZERS",
    "GraphedStep",
    "SharedOptions",
    "SparseAdamW",
    "SparseLion",
    "SparseOptimizer",
    "SparseSGD",
]
