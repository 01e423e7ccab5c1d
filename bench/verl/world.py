"""The processes of `bench verl`: both engines in each, compared after their first update, then timed in turns.

Two engines with the same weights compute the same gradients of a batch except for rounding: verl's engine computes
whole matrices of gradients, and with a mask of tiles the sparse one adds the products of a tile in another order. Of N
sequences of all ranks the gradient is a sum of N matrices (2 N of tied embeddings). Each engine rounds each of them to
the dtype of the backward pass, by at most u of its values (u = 2^-9 in bf16); sums are fp32. If the gradients of
different sequences are uncorrelated, the norm of the sum is sqrt(2 N) times that of one, and the norm of the difference
at most 2 u sqrt(2 N) of it. AdamW's first update is +-lr, and an error e of the gradient changes the signs of at most
sqrt(4 e) of its norm; see `bench.distributed.reference`.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.reference import CHECK_LR, compared, first_step
from ..distributed.variants import Variant
from ..harness import job_main
from ..models import make_model
from ..ranks import Ranks
from ..timing import measure
from .engines import EngineTraining, make_batch, make_engine, make_loss

DENSE, SPARSE = "fsdp2", "sparse_fsdp2"

UNIT_ROUNDOFF = 2.0**-9  # of the bf16 forward and backward pass, verl's default


class EngineWorld(Ranks):
    """The processes with verl's engines; the model is in the folder of the masks."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.fused_kernels = self.args.fused_kernels != "none"
        self.model = Path(self.args.mask_dir) / f"{self.args.shape}_{self.args.seed}"

    def engines(self) -> dict[str, Any]:
        """Measure verl's engine and the sparse one; return the comparison of their first updates, and their rows.

        Engines whose first updates differ are not timed, and have no rows.
        """
        self._write_model()
        mask = self.mask(self.args.pattern)
        trainings: dict[str, EngineTraining] = {}
        first: list[list[tuple[str, slice, Tensor, Tensor]]] = []
        norms: list[float] = []  # of the first gradients, before they are clipped
        rows: list[dict[str, Any]] = []
        batch: Any = None
        for strategy in (DENSE, SPARSE):
            self.print(f"{strategy}: building the engine")
            held_by_others = self.allocated()
            training = trainings[strategy] = self._training(strategy)
            if batch is None:
                batch = self._batch(training.log_probs(self._batch()))
            first_step(training, [batch])
            norms.append(training.grad_norm)
            first.append(
                [(name, at, w.cpu().clone(), m.cpu().clone()) for name, at, w, m in training.active_values(mask)]
            )
            training.set_lr(self.args.learning_rate)
            training.step([batch])
            self.reset_peak()
            training.step([batch])
            peak = self.peak()
            row: dict[str, Any] = {"engine": strategy, "peak_memory_bytes": None, "held_bytes": None}
            if peak is not None:
                row["peak_memory_bytes"] = peak - held_by_others
                row["held_bytes"] = self.allocated() - held_by_others  # between updates
            rows.append(row)
        check = self._compare(first, norms)
        if not check["met"]:
            return {"rows": [], "check": check}
        gc.collect()
        gc.freeze()
        variants = {strategy: partial(training.step, [batch]) for strategy, training in trainings.items()}
        timings = measure(variants, device=self.device, n_warmup=1, n_rounds=self.args.n_rounds, clock=self.clock)
        gc.unfreeze()
        for row in rows:
            row |= vars(timings[row["engine"]])
        return {"rows": rows, "check": check}

    def _write_model(self) -> None:
        """Write the model, unless an earlier run has left it in the folder."""
        if self.rank == 0 and not (self.model / "config.json").is_file():
            self.print(f"writing a model of the shape {self.args.shape}")
            made: Any = make_model(self.config, self.device, self.args.seed)
            made.save_pretrained(self.model)
            del made
            self.release_memory()
        self.barrier()

    def _training(self, strategy: str) -> EngineTraining:
        args = self.args
        optimizer: dict[str, Any] = {
            "lr": args.learning_rate,
            "weight_decay": 0.0,
            "clip_grad": args.clip_grad,
            "total_training_steps": 10**6,
        }
        if strategy == SPARSE:
            optimizer["override_optimizer_config"] = {"mask": str(self.mask_file(args.pattern))}
        engine = make_engine(
            self.model,
            strategy,
            engine={"model_dtype": args.model_dtype, "use_torch_compile": False},
            optimizer=optimizer,
            network={
                "enable_gradient_checkpointing": args.gradient_checkpointing,
                "use_remove_padding": False,
                "use_fused_kernels": self.fused_kernels,
                "fused_kernel_options": {"impl_backend": args.fused_kernels if self.fused_kernels else None},
                "override_config": {"attn_implementation": args.attention},
            },
        )
        variant = Variant("fsdp2") if strategy == DENSE else Variant("fsdp2", args.pattern, "fp32")
        loss = make_loss(args.micro_batch_size)
        return EngineTraining(variant, engine.module, engine.module, engine.optimizer, False, engine, loss)

    def _batch(self, old_log_probs: Tensor | None = None) -> Any:
        args = self.args
        return make_batch(
            n=args.batch_size,
            length=args.sequence_length,
            vocab=self.config.vocab_size,
            ranks=self.size,
            micro_batch_size=args.micro_batch_size,
            fused_kernels=self.fused_kernels,
            seed=args.seed + self.rank,
            old_log_probs=old_log_probs,
        )

    def _compare(self, first: list[list[tuple[str, slice, Tensor, Tensor]]], norms: list[float]) -> dict[str, Any]:
        """The errors of the sparse engine's first update, their tolerances, and whether they are met; a collective.

        Args:
            first: of each engine the active elements on this rank after the update, as `Training.active_values`.
        """
        args = self.args
        # What clipping has multiplied the gradients with: by the norm of all gradients, and of the active ones.
        scales = [min(1.0, args.clip_grad / (norm + 1e-6)) for norm in norms]
        # Sums of squares: error of moments, moments, error of updates, and updates, each of which is +-CHECK_LR.
        sums = torch.zeros(4, dtype=torch.float64, device="cpu")
        pairs = zip(*first, strict=True)
        for (name, slots, weights, moments), (other, other_slots, other_weights, other_moments) in pairs:
            assert (name, slots) == (other, other_slots)
            expected, error = moments.double() / scales[0], other_moments.double() / scales[1]
            error -= expected
            update = other_weights.double() - weights.double()
            updates = torch.full_like(update, CHECK_LR)
            sums += torch.stack([part.square().sum() for part in (error, expected, update, updates)])
        sums = sums.to(self.device)
        dist.all_reduce(sums)
        return compared(sums, 2 * UNIT_ROUNDOFF * (2 * args.batch_size * self.size) ** 0.5)


def run(job: dict[str, Any]) -> dict[str, Any]:
    result = EngineWorld(job).engines()
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    sys.exit(job_main(run))
