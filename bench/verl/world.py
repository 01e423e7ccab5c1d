"""The processes of `bench verl`: both engines in each, compared after their first update, then timed in turns.

Two engines with the same weights compute the same gradients of a batch except for rounding: verl's engine computes
whole matrices of gradients, and with a mask of tiles the sparse one adds the products of a tile in another order. Of N
sequences of all ranks the gradient is a sum of N matrices (2 N of tied embeddings). Each engine rounds each of them to
the dtype of the backward pass, by at most u of its values (u = 2^-9 in bf16); sums are fp32. If the gradients of
different sequences are uncorrelated, the norm of the sum is sqrt(2 N) times that of one, and the norm of the difference
at most 2 u sqrt(2 N) of it. AdamW's first update is +-lr, and an error e of the gradient changes the signs of at most
sqrt(4 e) of its norm; see `bench.distributed.variants`.
"""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl  # noqa: F401  # registers the engines
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.utils.losses import ppo_loss

from sparse_opt.integrations.verl.options import set_strategy

from ..distributed.reference import CHECK_LR, compared, first_step
from ..distributed.variants import Training, Variant
from ..harness import job_main
from ..models import make_model
from ..ranks import Ranks
from ..timing import measure

DENSE, SPARSE = "fsdp2", "sparse_fsdp2"

UNIT_ROUNDOFF = 2.0**-9  # of the bf16 forward and backward pass, verl's default


def make_engine(
    model: Path,
    strategy: str,
    *,
    engine: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    network: Mapping[str, Any],
    saved: Sequence[str] = (),
) -> BaseEngine:
    """Build and initialize an engine for a model without a tokenizer; a collective.

    Args:
        model: folder of a Hugging Face checkpoint.
        strategy: fsdp2, or sparse_fsdp2.
        engine, optimizer, network: options of verl's FSDPEngineConfig, FSDPOptimizerConfig and HFModelConfig.
        saved: the contents of its checkpoints.
    """
    config = FSDPEngineConfig(strategy="fsdp2", **engine)
    set_strategy(config, strategy)  # verl's class refuses strategies of others, and verl's FSDPActorConfig does this
    built = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=HFModelConfig(path=str(model), load_tokenizer=False, **network),
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(**optimizer),
        checkpoint_config=CheckpointConfig(save_contents=list(saved), load_contents=list(saved)),
    )
    built.initialize()
    return built


@dataclass(kw_only=True)
class EngineTraining(Training):
    """An engine that makes actor updates; `model` and `optimizer` are the engine's.

    Attributes:
        grad_norm: of the last update, before it was clipped.
    """

    engine: BaseEngine
    loss: Any  # verl's loss function
    grad_norm: float = 0.0

    def step(self, micro_batches: Sequence[Any]) -> None:
        """One actor update on a batch, which the engine divides into micro-batches; verl's TrainingWorker does this."""
        (batch,) = micro_batches
        with self.engine.train_mode():
            output = self.engine.train_batch(batch, self.loss)
            self.engine.lr_scheduler_step()
        self.grad_norm = float(output["metrics"]["grad_norm"])

    @torch.no_grad()
    def log_probs(self, batch: Any) -> Tensor:
        """The log-probabilities of the responses' tokens under the present weights, [B, response] fp32 on the CPU."""
        with self.engine.eval_mode():
            output = self.engine.infer_batch(batch)
        response = len(batch["responses"][0])
        # The value at a token is that of the next one.
        rows = [row[-response - 1 : -1].float().cpu() for row in output["model_output"]["log_probs"].unbind()]
        return torch.stack(rows)


def make_batch(args: Namespace, vocab: int, rank: int, ranks: int, old_log_probs: Tensor | None = None) -> Any:
    """A rank's part of a batch of prompts and responses with advantages, in verl's layout without padding.

    The first half of each sequence is its prompt. Token ids and advantages are random, and follow from the seed.

    Args:
        old_log_probs: [n, response], of the policy that has generated the responses; None: zeros.
    """
    n, length = args.batch_size, args.sequence_length
    generator = torch.Generator().manual_seed(args.seed + rank)
    tokens = torch.randint(vocab, (n, length), generator=generator)
    advantages = torch.randn(n, 1, generator=generator)
    prompt = length // 2
    response = length - prompt
    ones = torch.ones(n, response)
    columns = {
        "input_ids": tokens,
        "prompts": tokens[:, :prompt],
        "responses": tokens[:, prompt:],
        "position_ids": torch.arange(length).expand(n, -1),
        "loss_mask": ones.long(),
        "response_mask": ones.long(),
        "old_log_probs": torch.zeros(n, response) if old_log_probs is None else old_log_probs,
        "advantages": advantages * ones,
    }
    return tensordict_utils.get_tensordict(
        tensor_dict={
            name: torch.nested.as_nested_tensor([row.clone() for row in rows], layout=torch.jagged)
            for name, rows in columns.items()
        },
        non_tensor_dict={
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": args.micro_batch_size,
            "temperature": 1.0,
            "global_batch_size": n * ranks,
            "pad_mode": "no_padding",
            "pad_token_id": 0,
            "use_fused_kernels": args.fused_kernels != "none",
            "calculate_entropy": False,
        },
    )


class EngineWorld(Ranks):
    """The processes with verl's engines; the model is in the folder of the masks."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
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
                sizes = self.args, self.config.vocab_size, self.rank, self.size
                batch = make_batch(*sizes, training.log_probs(make_batch(*sizes)))
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
        args, fused = self.args, self.args.fused_kernels
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
                "use_fused_kernels": fused != "none",
                "fused_kernel_options": {"impl_backend": None if fused == "none" else fused},
                "override_config": {"attn_implementation": args.attention},
            },
        )
        variant = Variant("fsdp2") if strategy == DENSE else Variant("fsdp2", args.pattern, "fp32")
        # verl's clipped policy loss with its default options: the mean over all tokens of responses.
        per_gpu = args.micro_batch_size
        config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=per_gpu)
        loss = partial(ppo_loss, config=config)
        return EngineTraining(variant, engine.module, engine.module, engine.optimizer, False, engine=engine, loss=loss)

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
