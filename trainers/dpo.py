"""Direct Preference Optimization (https://arxiv.org/abs/2305.18290) and its relatives, dense, sparse or with adapters.

The policy learns to prefer the chosen completion of each pair over the rejected one; beta controls how close it stays
to a reference. The reference is the initial policy or another model. Dense training keeps it as a second, frozen model.
Sparse training needs no second model, because `SparseAdamW.base_weights` swaps the initial values of the active
elements in and out; neither does LoRA, which disables its adapters. With `reference: precomputed` no mode needs it
during training. With `share_prompts` both completions of a pair are in one row behind their prompt, which is then
computed once (see `data/shared_prompts.py`).

Not implemented: losses that need more than the four log-probability sums of a pair, and combinations of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_opt.config import option
from sparse_opt.errors import ConfigError

from .data.encoding import TokenBatch, TokenSequence, collate_examples
from .data.shared_prompts import check_shared_prompts, collate_shared_prompts, n_row_tokens
from .options import GraphOptions, LoggedOptions, ReferenceOptions
from .policy.logprobs import completion_logprobs
from .policy.reference import Reference
from .run.reporting.margins import MARGINS_FOLDER, MarginsLog
from .run.reporting.progress import Progress
from .run.reporting.samples import sample_completions
from .run.training_run import TrainingRun

LossType = Literal["sigmoid", "robust", "hinge", "ipo"]
Pairs = Sequence[list[TokenSequence]]  # [chosen, rejected] each


@dataclass(kw_only=True)
class DPOConfig(LoggedOptions, GraphOptions, ReferenceOptions):
    """Train a causal language model on preference pairs by DPO, dense, under a mask or with adapters."""

    beta: float = option(0.1, "strength of the pull towards the reference policy", above=0, aliases=("dpo_beta",))
    loss_type: LossType = option("sigmoid", "loss of a pair: sigmoid (DPO), robust, hinge (SLiC) or ipo")
    label_smoothing: float = option(
        0.0,
        "assumed share of pairs with swapped labels, for the losses sigmoid (then cDPO) and robust",
        at_least=0,
        below=0.5,
    )
    ipo_average: bool = option(False, "loss ipo: take log-probabilities per token, as TRL does, not their sums")
    reference: Literal["weights", "precomputed"] = option(
        "weights", "run the reference in each step, or once over all examples before training"
    )
    share_prompts: bool = option(
        False, "compute the prompt of a pair once: a row holds the prompt and both completions, separated in attention"
    )
    log_margins: bool = option(False, "write each step's margins to log_dir")
    log_dir: Path | None = option(None, "new or empty folder for margins; none is logs/margins in output_dir")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ConfigError(
                f"option 'label_smoothing' is {self.label_smoothing}: loss_type '{self.loss_type}' has none; expected "
                "sigmoid or robust"
            )
        if self.ipo_average and self.loss_type != "ipo":
            raise ConfigError(f"option 'ipo_average' is for loss_type ipo, not '{self.loss_type}'")
        if self.mount_dir is not None and self.output_dir is None:
            self.save_dir = self.save_dir or Path("dpo_model")
            self.log_dir = self.log_dir or MARGINS_FOLDER

    def further_folders(self) -> dict[str, Path]:
        """Adds the folder of the margins."""
        folders = super().further_folders()
        if self.log_margins and self.log_dir is not None:
            folders["log_dir"] = self.mounted(self.log_dir)
        return folders


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    loss_type: LossType = "sigmoid",
    label_smoothing: float = 0.0,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each pair, a function of h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected).

    h is 0 while the policy equals the reference. With e the label smoothing:

    - sigmoid: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h). e = 0 is equation 7 of DPO
      (https://arxiv.org/abs/2305.18290), ln 2 at h = 0; e > 0 is cDPO (https://ericmitchell.ai/cdpo.pdf). TRL 1.16 does
      not support e in this loss.
    - robust: (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e). If labels are wrong with probability
      e, its expectation is the loss under the correct labels (https://arxiv.org/abs/2403.00409, equation 13).
    - hinge: max(0, 1 - beta h), the SLiC loss on policy ratios (https://arxiv.org/abs/2305.10425,
      https://arxiv.org/abs/2309.06657).
    - ipo: (h - 1 / (2 beta))^2 (https://arxiv.org/abs/2310.12036, equation 17).

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: [B] fp32, log-probability sums over the completions.
        beta: strength of the pull towards the reference.
        label_smoothing: e of sigmoid and robust; 0 <= e < 0.5.
        lengths: numbers of trained tokens [B] of the chosen and of the rejected completions. If given, h in ipo is a
            difference of averages per token, as in TRL.

    Returns:
        losses [B], and the implicit rewards beta * (policy - ref) of the chosen [B] and of the rejected completions
        [B], both detached.
    """
    chosen_rewards = beta * (policy_chosen - ref_chosen)
    rejected_rewards = beta * (policy_rejected - ref_rejected)
    if loss_type == "ipo":
        chosen_ratio, rejected_ratio = policy_chosen - ref_chosen, policy_rejected - ref_rejected
        if lengths is not None:
            chosen_ratio, rejected_ratio = chosen_ratio / lengths[0], rejected_ratio / lengths[1]
        losses = ipo_loss(chosen_ratio - rejected_ratio, beta)
    else:
        losses = margin_loss(chosen_rewards - rejected_rewards, loss_type, label_smoothing)
    return losses, chosen_rewards.detach(), rejected_rewards.detach()


def margin_loss(margins: Tensor, loss_type: LossType, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair for the loss types that depend on the margin beta * h alone: [B]; see `dpo_loss`."""
    if loss_type == "hinge":
        return torch.relu(1 - margins)
    right = -F.logsigmoid(margins)
    if label_smoothing == 0.0:
        return right
    wrong = -F.logsigmoid(-margins)  # the loss if the label is wrong
    if loss_type == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def ipo_loss(h: Tensor, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2 of each pair: [B]."""
    return (h - 1 / (2 * beta)) ** 2


def train(config: DPOConfig) -> dict[str, Any]:
    """Run DPO and return its summary: first and last metrics, median times, bytes, and the paths of its files.

    Writes `output_dir/metrics.jsonl` during training and the model to `output_dir/final` at the end.

    Raises:
        SparseOptError: one of its subclasses: before training if the options, data, model or mask do not fit together;
            during training if the loss is not finite.
    """
    run = TrainingRun(config, "dpo", "preference")
    collate = partial(collate_examples, pad_id=run.pad_id, multiple=config.length_multiple)
    if config.share_prompts:
        check_shared_prompts(run.model, _longest_row(run))
        collate = partial(
            collate_shared_prompts,
            pad_id=run.pad_id,
            multiple=config.length_multiple,
            separate_rows=config.has_few_shapes,
        )
    reference = _reference_logprobs(config, run, collate)
    with run:
        margins_log = None
        if config.log_margins and run.ranks.is_main:
            margins_log = MarginsLog(run, config.further_folders().get("log_dir"))

        def evaluate() -> dict[str, Tensor]:
            assert run.eval_data is not None
            found = torch.zeros(3, len(run.eval_data), dtype=torch.float32, device=run.device)
            for rows in run.passes(len(run.eval_data)):
                pairs = run.eval_data[rows]
                batch = collate(pairs).to(run.device)
                policy = completion_logprobs(run.model, batch)
                found[:, rows] = torch.stack(
                    _losses(config, batch, policy, reference.of([batch], reference.known([pairs]))[0])
                )
            losses, chosen, rejected = run.ranks.sum(found)
            return {"loss": losses.mean(), **_reward_metrics(chosen, rejected)}

        def take_step(batches: Iterable[TokenBatch], known: Sequence[Tensor]) -> Tensor:
            batches, n_pairs = list(batches), config.examples_per_step
            with run.time("reference"):
                ref_logprobs = reference.of(batches, known)
            found = torch.zeros(3, n_pairs, dtype=torch.float32, device=run.device)
            with run.time("forward_backward"):
                passes = run.training_passes(n_pairs)
                for (rows, is_last), batch, ref in zip(passes, batches, ref_logprobs, strict=True):
                    losses, chosen, rejected = _losses(config, batch, completion_logprobs(run.model, batch), ref)
                    # The mean over all pairs of the step, independent of the number of forward passes and ranks.
                    run.backward(losses.sum() / n_pairs, is_last)
                    found[:, rows] = torch.stack([losses.detach(), chosen, rejected])
            run.update()
            return found

        training_step = run.whole_step(take_step)
        for step in run.steps(evaluate):
            examples = run.examples_of(step)
            known = reference.known([examples[rows] for rows in run.passes(len(examples))])
            losses, chosen, rejected = run.ranks.sum(training_step(run.batches(step, collate), known))
            if margins_log is not None:
                margins_log.write(step, chosen - rejected)
            if run.samples_due(step):
                run.log_samples(step, sample_completions(run, [pair[0] for pair in examples[: config.batch_size]]))
            computed = {"n_computed_tokens": sum(map(n_row_tokens, examples))} if config.share_prompts else {}
            run.log(
                step,
                n_tokens=sum(len(sequence.ids) for pair in examples for sequence in pair),
                loss=losses.mean(),
                **_reward_metrics(chosen, rejected),
                **computed,
            )
        return run.finish()


def _losses(config: DPOConfig, batch: TokenBatch, policy: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`dpo_loss` of a batch of pairs, from log-probability sums [2B] of the policy and of the reference."""
    (policy_chosen, policy_rejected), (ref_chosen, ref_rejected) = _halves(policy), _halves(ref)
    lengths = None
    if config.ipo_average:
        chosen_lengths, rejected_lengths = _halves(batch.n_trained_of_sequences())
        lengths = chosen_lengths, rejected_lengths
    return dpo_loss(
        policy_chosen,
        policy_rejected,
        ref_chosen,
        ref_rejected,
        config.beta,
        config.loss_type,
        config.label_smoothing,
        lengths,
    )


def _longest_row(run: TrainingRun) -> int:
    return max(map(n_row_tokens, [*run.data, *(run.eval_data or [])]))


def _halves(values: Tensor) -> Tensor:
    """[2, B] for [2B]; B may be 0."""
    return values.view(2, len(values) // 2)


def _reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    return {
        "rewards_chosen": chosen.mean(),
        "rewards_rejected": rejected.mean(),
        "margin": (chosen - rejected).mean(),
        "accuracy": (chosen > rejected).float().mean(),
    }


# The reference's log-probabilities

Collate = Callable[[Pairs], TokenBatch]


@dataclass(frozen=True)
class _ReferenceLogprobs:
    """The reference's log-probability sums of batches of pairs: precomputed, or by forward passes of the reference."""

    precomputed: _KnownLogprobs | None
    reference: Reference | None

    def known(self, groups: Sequence[Pairs]) -> list[Tensor]:
        """The sums [2B] of each group of pairs, or nothing if they are not precomputed."""
        return [] if self.precomputed is None else [self.precomputed.of(pairs) for pairs in groups]

    def of(self, batches: Sequence[TokenBatch], known: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sums [2B] of each batch; `known` is the result of `known` for the same pairs."""
        if self.reference is None:
            return known
        with torch.no_grad(), self.reference.weights():
            return [completion_logprobs(self.reference.model, batch) for batch in batches]


def _reference_logprobs(config: DPOConfig, run: TrainingRun, collate: Collate) -> _ReferenceLogprobs:
    if config.reference == "precomputed":
        return _ReferenceLogprobs(_precompute(config, run, collate), None)
    return _ReferenceLogprobs(None, _reference(config, run))


def _reference(config: DPOConfig, run: TrainingRun) -> Reference:
    """The reference during training. A model of its own is checked like the policy."""
    reference = run.reference()
    if config.share_prompts and config.ref_name is not None:
        with reference.weights():
            check_shared_prompts(reference.model, _longest_row(run))
    return reference


class _KnownLogprobs:
    """Log-probability sums [2, n] of n pairs, keyed by `id(pair)`; the run's data keeps the pairs alive.

    Of a pair that is repeated, the first sums are kept.
    """

    def __init__(self, pairs: Pairs, logprobs: Tensor):
        self._device = logprobs.device
        self._of: dict[int, tuple[float, float]] = {}
        for pair, *sums in zip(pairs, *logprobs.tolist(), strict=True):
            self._of.setdefault(id(pair), (sums[0], sums[1]))

    def of(self, pairs: Pairs) -> Tensor:
        """The sums of the chosen completions, then those of the rejected ones: [2B] fp32."""
        columns = torch.tensor([self._of[id(pair)] for pair in pairs], dtype=torch.float32, device="cpu").T
        return columns.reshape(-1).to(self._device)


def _precompute(config: DPOConfig, run: TrainingRun, collate: Collate) -> _KnownLogprobs:
    """Compute the reference's sums of all training pairs that the run uses, and of the evaluation pairs.

    The pairs are batched as in the first epoch, so that on a CPU the steps of that epoch get the same bits as with
    `reference: weights`. Later epochs batch the pairs differently, which can change the rounding of a sum.
    """
    first_epoch = -(-len(run.data) // config.examples_per_step)
    batches = [run.examples_of(step) for step in range(1, min(config.n_steps, first_epoch) + 1)]
    pairs: list[list[TokenSequence]] = []
    passes: list[slice] = []
    for batch in [*batches, run.eval_data or []]:
        passes += run.passes(len(pairs) + len(batch), start=len(pairs))
        pairs += batch
    logprobs = torch.zeros(2, len(pairs), dtype=torch.float32, device=run.device)

    # Before the first step the policy equals the reference in every mode.
    reference = Reference(run.model, nullcontext) if config.ref_name is None else _reference(config, run)
    progress = Progress("dpo reference", len(passes), hidden=not run.ranks.is_main)
    with torch.no_grad(), reference.weights(), progress:
        for n, rows in enumerate(passes, 1):
            sums = completion_logprobs(reference.model, collate(pairs[rows]).to(run.device))
            logprobs[:, rows] = _halves(sums)
            progress.advance(n, {})
    return _KnownLogprobs(pairs, run.ranks.sum(logprobs))
