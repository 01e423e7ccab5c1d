"""`Variant`: one way to train a model on several devices; `Training`: a model and optimizer that train in this way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sparse_opt import GraphedStep, MaskSet, SparseAdamW

from ..models import make_model, pair_loss, sequence_logprobs

PATTERNS = ("element", "tile64")
WARM_UP = 5  # steps before a capture: without torch.compile for the check and the count of collectives, and with it
GRAD_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Layout = Literal["local", "replicate", "ddp", "ddp_whole_layers", "fsdp2"]


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    - local: SparseAdamW, every rank for itself (`process_group=False`): the step without communication.
    - replicate: SparseAdamW with a process group; every rank holds the model.
    - ddp: DistributedDataParallel and torch's fused AdamW. torch.compile cuts a layer into a graph for each bucket.
    - ddp_whole_layers: the same, with a graph for each layer, which the host launches faster.
    - fsdp2: `fully_shard`, with SparseAdamW under a mask, or without a pattern with torch's fused AdamW.
    """

    layout: Layout
    pattern: str | None = None  # of the mask; None trains all weights
    grad_dtype: str | None = None  # of compact gradients
    cuda_graphs: bool = False  # the whole step is one graph, with its reductions: `GraphedStep`

    @property
    def name(self) -> str:
        words = (self.layout, self.pattern, self.grad_dtype, "graphs" if self.cuda_graphs else None)
        return "_".join(filter(None, words))


def _sparse(layout: Layout) -> list[Variant]:
    return [Variant(layout, pattern, dtype) for pattern in PATTERNS for dtype in GRAD_DTYPES]


VARIANTS = {
    variant.name: variant
    for variant in (
        *_sparse("local"),
        *_sparse("replicate"),
        Variant("ddp"),
        Variant("ddp_whole_layers"),
        Variant("fsdp2"),
        *_sparse("fsdp2"),
        *(Variant(layout, pattern, "bf16", True) for layout in ("local", "replicate") for pattern in PATTERNS),
    )
}


def default_variants(world_size: int, network: str) -> list[str]:
    """The variants that are measured unless some are named: those with bf16 gradients, without CUDA graphs.

    Replicate on one device is local, and local needs no network. FSDP2 is measured on several devices, and not over
    sockets, where its step takes seconds and has no target.
    """
    layouts = {"local", "ddp", "ddp_whole_layers"}
    if world_size > 1:
        layouts |= {"replicate", "fsdp2"}
    if network == "sockets":
        layouts = {"replicate", "ddp"}
    return [
        name for name, v in VARIANTS.items() if v.layout in layouts and v.grad_dtype != "fp32" and not v.cuda_graphs
    ]


@dataclass
class Training:
    """A model with its optimizer, and how a step is made with them."""

    variant: Variant
    model: nn.Module
    forward: nn.Module  # the module to call: the model, or DDP's wrapper of it
    optimizer: torch.optim.Optimizer
    dpo: bool  # with a reference: the base weights
    graphs: GraphedStep | None = None  # of `whole_step`

    def step(self, micro_batches: Sequence[Tensor]) -> None:
        """One step on the sum of the losses of the micro-batches, each [2, T] token ids; only `local` takes several."""
        (self.graphs or self.whole_step)(*micro_batches)

    def whole_step(self, *micro_batches: Tensor) -> None:
        for ids in micro_batches:
            reference = self._reference(ids) if self.dpo else None
            pair_loss(self.forward, ids, reference).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _reference(self, ids: Tensor) -> Tensor:
        assert isinstance(self.optimizer, SparseAdamW)
        with torch.no_grad(), self.optimizer.base_weights():
            return sequence_logprobs(self.forward, ids)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if self.graphs is None:
                group["lr"] = lr
            else:
                group["lr"].fill_(lr)

    def active_values(self, mask: MaskSet) -> Iterator[tuple[str, slice, Tensor, Tensor]]:
        """What this rank holds of the active elements: (name, slots, weights, first moments), both fp32.

        The slots are a range of the parameter's active elements: all of them, or with FSDP2 those in this rank's rows.
        """
        for name, parameter in self.model.named_parameters():
            if name not in mask or not mask[name].numel():
                continue
            weight, moment = _local(parameter.detach()), _local(self.optimizer.state[parameter]["exp_avg"])
            first = _first_row(parameter) * (parameter.numel() // len(parameter))
            indices = mask[name].to(weight.device, torch.int64)
            ends = torch.searchsorted(indices, torch.tensor([first, first + weight.numel()], device=weight.device))
            slots = slice(*ends.tolist())
            own = indices[slots] - first
            if self.variant.pattern is None:
                moment = moment.flatten()[own]
            yield name, slots, weight.flatten()[own].float(), moment.float()

    def close(self) -> None:
        self.graphs = None  # before the process group ends
        if isinstance(self.optimizer, SparseAdamW):
            self.optimizer.close()


def make_training(
    variant: Variant,
    config: Any,
    mask: MaskSet | None,
    device: torch.device,
    *,
    lr: float,
    seed: int,
    checkpointing: bool = False,
    compiled: bool = False,
    dpo: bool = False,
    compact_weights: bool = False,
) -> Training:
    """Build the model and optimizer of a variant; a collective, except for `local`."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),)) if variant.layout == "fsdp2" else None
    model = make_model(config, device, seed, mesh=mesh, checkpointing=checkpointing, compiled=compiled)
    forward = model
    if mask is None:
        if variant.layout in ("ddp", "ddp_whole_layers"):
            # Read when the layers are compiled, in the first step.
            dynamo_config.optimize_ddp = variant.layout == "ddp"
            forward = DistributedDataParallel(
                model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
            )
        return Training(variant, model, forward, torch.optim.AdamW(model.parameters(), lr=lr, fused=True), dpo)
    assert variant.grad_dtype is not None
    groups: dict[str, dist.ProcessGroup | Literal[False] | None] = {"local": False, "replicate": dist.group.WORLD}
    optimizer = SparseAdamW(
        model,
        mask,
        lr=torch.tensor(lr, device=device) if variant.cuda_graphs else lr,
        grad_dtype=GRAD_DTYPES[variant.grad_dtype],
        keep_base_weights=dpo,
        process_group=groups.get(variant.layout),
        compact_weights=compact_weights,
    )
    training = Training(variant, model, model, optimizer, dpo)
    if variant.cuda_graphs:
        training.graphs = GraphedStep(training.whole_step, optimizer, n_warmup=WARM_UP)
    return training


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first_row(parameter: Tensor) -> int:
    """The first row of the parameter that this rank holds. FSDP2 shards rows as `torch.chunk` does."""
    if not isinstance(parameter, DTensor):
        return 0
    n_rows, mesh = len(parameter), parameter.device_mesh
    return min(n_rows, mesh.get_local_rank() * -(-n_rows // mesh.size()))
