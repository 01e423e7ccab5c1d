"""SparseAdamW: AdamW over the active elements of a mask."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..masks.mask_set import MaskSet, RandomMask
from .options import SharedOptions
from .sparse_optimizer import Params, SparseOptimizer


class SparseAdamW(SparseOptimizer):
    """AdamW that trains the active elements of a mask; its cost scales with their number.

    Equals `torch.optim.AdamW` with gradients multiplied by the mask and decay applied to active elements only
    (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101). Arithmetic is fp32 for every storage dtype.

    With 16-bit weights and neither `master_weights` nor `stochastic_rounding`, updates smaller than half a unit in the
    last place are lost, as in torch: a bf16 weight w does not change for updates under about |w| / 512.

    docs/optimizer.md has an example, the guarantees and the costs of each argument.

    Args:
        params: a model, `model.named_parameters()`, or parameter groups whose 'params' are (name, parameter) pairs.
        mask: the elements that may change, by parameter name; or `RandomMask(0.025, "tile64")`, drawn for these
            parameters. A number is the density of a `RandomMask` of single elements.
        lr: a float, or a tensor of one element (needed to change it under a CUDA graph).
        betas, eps, weight_decay: as in `torch.optim.AdamW`.
        grads: 'compact': a hook gathers the active elements of each gradient and frees the dense gradient;
            micro-batches accumulate in the compact buffer. `param.grad` stays None, so clip with `clip_grad_norm_` or
            `max_grad_norm` of this class. `step` consumes the compact gradients: another step without a backward pass
            in between does nothing. 'dense': gradients stay in `param.grad`, and each step reads them at the active
            elements, as in torch.
        max_grad_norm: clip the global norm of the active gradients to this value in each step.
        state_dtype: dtype of both moments, torch.float32 or torch.bfloat16. Use bfloat16 with `stochastic_rounding`: a
            second moment with beta2 = 0.999 decays by less than half a bf16 unit per step.
        grad_dtype: dtype of the compact gradient.
        master_weights: keep fp32 master weights for the active elements of 16-bit parameters.
        stochastic_rounding: round 16-bit stores of the step up or down at random, reproducibly.
        seed: seed of the stochastic rounding.
        freeze_inactive: call `requires_grad_(False)` on parameters with no active element, so that their gradients are
            never computed; `close()` undoes it.
        keep_base_weights: keep a copy of the current active weights, for `base_weights()`.
        offload_base_weights: keep that copy of parameters on a GPU in pinned host memory. Not with `fully_shard`.
        compact_weights: keep another copy of the active weights up to date, so that the step and `base_weights()` read
            none of them from the model. Writes by other code through `.data` must be followed by
            `refresh_master_weights()`; other writes are noticed. Not with `fully_shard`.
        amp_scaling: make compact gradients visible to `torch.amp.GradScaler`, through a parameter of one element that
            is appended to the first group. grads='dense' does not need it.
        model: the module that the parameters belong to, if `params` is not the module itself. Needed for
            `tile_backward`.
        tile_backward: with a mask of pattern tile64 or tile128 and grads='compact', compute only the active tiles of
            the weight gradients of linear layers and embeddings, whose `forward` is replaced. None: where the weight's
            density makes it faster; True: wherever possible; False: nowhere. `tiled_parameters` lists the parameters.
            docs/masks.md lists the layers and uses that are not supported; their gradients stay dense.
        backend: reference, cpu, triton or cuda; the default is chosen by `sparse_opt.backends`.
        process_group: average the compact gradients over the ranks of this `torch.distributed.ProcessGroup`, next to
            the backward pass. Every rank holds the whole model, not wrapped in DistributedDataParallel. False: train on
            this process's own gradients, or with grads='dense' on those that DistributedDataParallel has averaged.
            None: the same, but raises if torch.distributed runs several processes. For a model under `fully_shard`
            (FSDP2), None is the group of its device mesh, and each rank holds the state of its rows.

    Raises:
        ValueError: the mask has no active element, or one in a parameter that does not require grad; a parameter is in
            two groups; an option is out of range; tile_backward=True and no parameter supports it; several processes
            run, and process_group does not say how to train; a DTensor is not sharded by `fully_shard` on its first
            dimension alone.
        RuntimeError: the ranks of the process group have different parameters, options, masks or weights.
        MaskError: the mask does not fit the model (lists the mismatches), or a parameter with active elements shares
            memory with a different parameter.
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
