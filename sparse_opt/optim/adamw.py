"""SparseAdamW: AdamW over the active elements of a mask."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..masks.mask_set import MaskSet, RandomMask
from .options import SharedOptions
from .sparse_optimizer import Params, SparseOptimizer


class SparseAdamW(SparseOptimizer):
    """AdamW that trains the active elements of a mask; its cost scales with their number.

    Equals `torch.optim.AdamW` with gradients multiplied by the mask and decay on active elements only (Loshchilov and
    Hutter, https://arxiv.org/abs/1711.05101), in fp32 arithmetic. docs/optimizer.md has examples, guarantees and costs.

    Args:
        params: a model, `model.named_parameters()`, or parameter groups whose 'params' are (name, parameter) pairs.
        mask: the elements that may change, by parameter name; or `RandomMask(0.025, "tile64")`, drawn for these
            parameters. A number is the density of a `RandomMask` of single elements.
        lr: a float, or a tensor of one element (needed to change it under a CUDA graph).
        betas: as in `torch.optim.AdamW`.
        eps: as there.
        weight_decay: as there.
        grads: 'compact': a hook gathers each gradient and frees it, `param.grad` stays None, and `step` consumes the
            gradients. 'dense': gradients stay in `param.grad`.
        max_grad_norm: clip the global norm of the active gradients to this value in each step.
        state_dtype: dtype of both moments, torch.float32 or torch.bfloat16.
        grad_dtype: dtype of the compact gradient.
        master_weights: keep fp32 copies of the active elements of 16-bit parameters.
        stochastic_rounding, seed: round 16-bit stores up or down at random. Without this or master weights, updates
            smaller than half a unit in the last place of a 16-bit weight are lost.
        freeze_inactive: set `requires_grad=False` on parameters without active elements; `close()` undoes it.
        keep_base_weights, offload_base_weights: keep the current active weights for `base_weights()`, in host memory.
        compact_weights: keep a copy of the active weights, so that the step reads none of them from the model.
        amp_scaling: show compact gradients to `torch.amp.GradScaler`.
        model: the module that the parameters belong to, if `params` is not the module itself.
        tile_backward: compute only active tiles of weight gradients: None where faster, True everywhere, False nowhere.
        backend: reference, cpu, triton or cuda; None is the fastest that can run.
        process_group: average compact gradients over the ranks of this `torch.distributed.ProcessGroup`; do not wrap
            the model in DistributedDataParallel. False: train on this process's own gradients. None: as False, but
            an error if several processes run; for a model under `fully_shard`, the group of its device mesh.

    Raises:
        ValueError: an option is out of range, or does not fit the parameters or the mask.
        MaskError: the mask does not fit the model, or a parameter with active elements shares memory with another.
        RuntimeError: the ranks have different parameters, options, masks or weights.
        BackendUnavailable: the named backend cannot run on the parameters' device.
    """

    _op = "indexed_adamw_"

    def __init__(
        self,
        params: Params,
        mask: MaskSet | RandomMask | float,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, mask, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **shared)
