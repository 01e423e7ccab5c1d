"""SparseAdamW: AdamW over the active elements of a mask."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..masks.mask_set import MaskSet
from .options import SharedOptions
from .sparse_optimizer import Params, SparseOptimizer


class SparseAdamW(SparseOptimizer):
    """AdamW that trains the active elements of a mask; its cost scales with their number.

    Equals `torch.optim.AdamW` with gradients multiplied by the mask and decay applied to active elements only
    (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101). Arithmetic is fp32 for every storage dtype.

    With 16-bit weights and neither `master_weights` nor `stochastic_rounding`, updates smaller than half a unit in the
    last place are lost, as in torch: a bf16 weight w does not change for updates under about |w| / 512.

    Args:
        params: a model, `model.named_parameters()`, or parameter groups whose 'params' are (name, parameter) pairs.
            Parameters with no active element are frozen, so that their gradients are never computed.
        mask: the elements that may change, by parameter name.
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
        freeze_inactive: call `requires_grad_(False)` on parameters with no active element; `close()` undoes it.
        keep_base_weights: keep a copy of the current active weights, for `base_weights()`.
        offload_base_weights: keep that copy of parameters on a GPU in pinned host memory. `base_weights()` then copies
            it to the GPU, where it stays until the context is left. Not with `fully_shard`.
        compact_weights: keep another copy of the active weights up to date, so that the step and `base_weights()` read
            none of them from the model, and write only those that change; masters serve as the copy where there are
            any. Writes to the weights by other code are noticed by their version counters, and cost a pass; writes
            through `.data` are not, and must be followed by `refresh_master_weights()`. Not with `fully_shard`.
        amp_scaling: make compact gradients visible to `torch.amp.GradScaler`, through a parameter of one element that
            is appended to the first group. grads='dense' does not need it.
        model: the module that the parameters belong to, if `params` is not the module itself. Needed for
            `tile_backward`.
        tile_backward: with a mask of pattern tile64 or tile128 and grads='compact', the linear layers and embeddings
            of the model (`torch.nn.Linear`, transformers' `Conv1D`, `torch.nn.Embedding`) compute only the active tiles
            of their weight gradients, and no dense gradient. Forward pass and input gradients keep their bits. The
            layers' `forward` is replaced; `detach` and `close` restore it. None: use it where the weight's density
            makes it faster; True: wherever possible; False: nowhere. `tiled_parameters` lists the parameters that use
            it. Not supported: weights of several linear layers, parametrized layers, subclasses, layers with another
            forward, weights with other hooks, embeddings with max_norm, scale_grad_by_freq or sparse; their gradients
            stay dense. Those of an embedding and of the output layer that is tied to it are added. The gradient of a
            use of the weight outside its layers is dense and is added to the tiles, and so is an embedding's under
            `torch.compile`. Differentiating twice (create_graph=True) raises, and so does torch's compiled autograd of
            linear layers, unless the model itself is compiled. Under `torch.compile`, and on the backends reference and
            triton, `torch.autograd.grad` of a linear layer's weight raises.
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
        mask: MaskSet,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, mask, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **shared)
