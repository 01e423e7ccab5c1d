"""Reinforcement-learned teachers (https://arxiv.org/abs/2506.08388): train a policy to explain known solutions.

The policy is a teacher: given a question and its solution, it writes an explanation. The reward is the log-probability
that a student assigns to the solution given question and explanation, minus the divergence between teacher and student
on the explanation, where the student sees only the question:

    reward = sum_i a_i red_i(log p_student(solution | question, explanation))
             - sum_j k_j red_j(log p_teacher - log p_student on the explanation's tokens) + format

Defaults are those of https://github.com/SakanaAI/RLT, cfgs/run_cfg/teacher_rlt.yaml: reductions mean and min with
a = (1, 0.01), mean and max with k = (3, 0.03); the divergence of a token is the plain difference of log-probabilities,
which may be negative; both models use the sampling temperature, 0.7; format is -1 if the end tag is missing, and the
whole completion is then scored as the explanation. The policy is updated as in GRPO.

Unlike there, the student reads the teacher's tokens instead of retokenizing its text, so that both score the same
tokens; whitespace around the solution and the tags is not scored. Not implemented: a reference that is synchronised
with the policy (`sync_ref_model`), the k3 estimate of the divergence, and transformations of the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_opt.config import option
from sparse_opt.errors import ConfigError

from .data.loaders import LoadData
from .data.order import chunks
from .data.solved_questions import Templates
from .data.teacher_data import LessonReport, TeacherExample, load_teacher_examples, split_explanation
from .grpo import GroupOptions, LossType, check_rows, group_advantages, update_on_rollout
from .policy.models import resolve_device
from .policy.reference import Reference, load_frozen, placed
from .ranks import Ranks
from .rewards.student import load_student_tokenizer, require_student_positions, spans, student_logprobs
from .rollouts import Rollout, configured_engine
from .run.rollout_step import (
    completion_metrics,
    engine_agreement,
    reference_logprobs,
    sample_rollout,
    sample_rows,
)
from .run.training_run import TrainingRun

Reduction = Literal["mean", "sum", "min", "max"]

PARTS_FILE = "reward_parts.jsonl"


@dataclass(kw_only=True)
class RLTConfig(Templates, GroupOptions):
    """Train a teacher to explain known solutions so that a student finds them likely."""

    learning_rate: float = option(1e-6, "peak learning rate")
    lr_schedule: Literal["linear", "cosine", "constant"] = option(
        "constant", "learning rate after warm-up, to step n_steps"
    )
    temperature: float = option(0.7, "sampling temperature, of the teacher's log-probabilities too")
    beta: float = option(0.04, "weight of the k3 divergence from the reference in the loss; 0 needs no reference")
    loss_type: LossType = option("grpo", "how the loss is averaged over tokens; grpo is the paper's")

    student_model: str | None = option(
        None, "student: hub name or local folder, with the policy's vocabulary; none uses the reference"
    )
    student_temperature: float | None = option(
        None,
        "temperature of the student's log-probabilities; none is the sampling temperature",
        aliases=("unbias_student_log_probs_temp",),
        above=0,
    )
    offload_untrained_models: bool = option(
        False, "keep student and reference in the host's memory while they are not used"
    )
    generation_aggregation_steps: int | None = option(
        None,
        "sample for this many forward passes of training at once; none samples the step's whole rollout at once",
        at_least=1,
    )
    activate_debugging_logs: bool = option(
        False, f"write the parts of every completion's reward to {PARTS_FILE} in the output folder"
    )
    solution_coefficients: list[float] = option(
        [1.0, 0.01], "weights of the solution's reductions", aliases=("answer_log_prob_coeff",)
    )
    solution_reductions: list[Reduction] = option(
        ["mean", "min"], "reductions of the student's log-probabilities", aliases=("reduction_log_prob_fn",)
    )
    kl_coefficients: list[float] = option(
        [3.0, 0.03], "weights of the divergence's reductions", aliases=("kl_penalty_reward_coeff",)
    )
    kl_reductions: list[Reduction] = option(
        ["mean", "max"],
        "reductions of teacher's minus student's log-probabilities",
        aliases=("reduction_kl_fn",),
    )
    format_penalty: float = option(1.0, "penalty of an explanation without its end tag", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_templates()
        if self.reward_functions:
            raise ConfigError("option 'reward_functions': rlt has its own reward; expected none")
        for name in ("solution", "kl"):
            coefficients, reductions = getattr(self, f"{name}_coefficients"), getattr(self, f"{name}_reductions")
            if len(coefficients) != len(reductions):
                raise ConfigError(
                    f"option '{name}_coefficients' has {len(coefficients)} values, {name}_reductions {len(reductions)}"
                )
        if self.ref_name is not None and self.student_model is not None and self.beta == 0:
            raise ConfigError(
                f"a reference ({self.ref_name}) is used with beta, or as the student: set --beta above 0, or no "
                "student_model"
            )
        if self.offload_untrained_models and self.parallel == "fsdp":
            raise ConfigError(
                "option 'offload_untrained_models' moves whole models, and parallel fsdp shards them: expected one of "
                "the two"
            )
        if self.generation_aggregation_steps is not None:
            at_once = self.batch_size * self.generation_aggregation_steps
            if at_once % self.n_generations or self.completions_per_step % at_once:
                raise ConfigError(
                    f"batch_size {self.batch_size} x generation_aggregation_steps {self.generation_aggregation_steps} "
                    f"= {at_once} completions sampled at once: expected a multiple of n_generations "
                    f"{self.n_generations} that divides the step's {self.completions_per_step}"
                )


# The reward


@dataclass(frozen=True)
class TeacherReward:
    """The parts of each completion's reward, all [R] fp32."""

    solution: Tensor  # weighted reductions of the student's log-probabilities
    kl: Tensor  # weighted reductions of the divergence; subtracted
    format: Tensor
    reduced: dict[str, Tensor]  # each unweighted reduction: solution_logprob_mean, explanation_kl_max, ...

    @property
    def total(self) -> Tensor:
        """solution - kl + format."""
        return self.solution - self.kl + self.format


def teacher_reward(
    solution_logprobs: Tensor,
    solution_mask: Tensor,
    teacher_logprobs: Tensor,
    student_logprobs: Tensor,
    explanation_mask: Tensor,
    closed: Tensor,
    *,
    solution_reductions: Sequence[Reduction] = ("mean", "min"),
    solution_coefficients: Sequence[float] = (1.0, 0.01),
    kl_reductions: Sequence[Reduction] = ("mean", "max"),
    kl_coefficients: Sequence[float] = (3.0, 0.03),
    format_penalty: float = 1.0,
) -> TeacherReward:
    """The reward of the formula in the module docstring, with its parts.

    Args:
        solution_logprobs: [R, S] fp32, of the solution tokens under the student.
        solution_mask: [R, S] bool.
        teacher_logprobs, student_logprobs: [R, E] fp32, of the same explanation tokens under both models.
        explanation_mask: [R, E] bool. Values outside the masks have no effect, even if they are not finite.
        closed: [R] bool, whether the end tag is present.
        format_penalty: penalty for a missing end tag. An empty explanation has no divergence: each of its reductions is
            then this penalty, as in the original.

    Raises:
        ValueError: shapes differ, a solution has no tokens, or the numbers of coefficients and reductions differ.
    """
    if solution_logprobs.shape != solution_mask.shape or not (
        teacher_logprobs.shape == student_logprobs.shape == explanation_mask.shape
    ):
        shapes = [list(t.shape) for t in (solution_logprobs, solution_mask)]
        spans = [list(t.shape) for t in (teacher_logprobs, student_logprobs, explanation_mask)]
        raise ValueError(f"solutions have shapes {shapes} and explanations {spans}, expected [R, S] and [R, E]")
    empty = int((~solution_mask.any(dim=1)).sum())
    if empty:
        raise ValueError(f"{empty} of {len(solution_mask)} solutions have no token, expected at least one in each")
    divergence = teacher_logprobs - student_logprobs
    reduced: dict[str, Tensor] = {}
    for how in solution_reductions:
        reduced[f"solution_logprob_{how}"] = reduce_span(solution_logprobs, solution_mask, how, empty=-format_penalty)
    for how in kl_reductions:
        reduced[f"explanation_kl_{how}"] = reduce_span(divergence, explanation_mask, how, empty=format_penalty)
    solution, kl = torch.zeros(2, len(closed), dtype=torch.float32, device=closed.device)
    for how, coefficient in zip(solution_reductions, solution_coefficients, strict=True):
        solution = solution + coefficient * reduced[f"solution_logprob_{how}"]
    for how, coefficient in zip(kl_reductions, kl_coefficients, strict=True):
        kl = kl + coefficient * reduced[f"explanation_kl_{how}"]
    return TeacherReward(solution, kl, torch.where(closed, solution.new_zeros(()), -format_penalty), reduced)


def reduce_span(values: Tensor, mask: Tensor, how: Reduction, *, empty: float) -> Tensor:
    """The mean, sum, min or max of each row's values inside the mask, `empty` for rows without any: [R] for [R, N].

    Raises:
        ValueError: the reduction is unknown.
    """
    if how in ("mean", "sum"):
        result = torch.where(mask, values, 0.0).sum(dim=1)
        if how == "mean":
            result = result / mask.sum(dim=1).clamp(min=1)
    elif how in ("min", "max"):
        outside = torch.inf if how == "min" else -torch.inf
        inside = torch.where(mask, values, outside)
        result = inside.amin(dim=1) if how == "min" else inside.amax(dim=1)
    else:
        raise ValueError(f"reduction is {how!r}, expected mean, sum, min or max")
    return torch.where(mask.any(dim=1), result, empty)


# The loop


@dataclass(frozen=True)
class ScoredRollout:
    """The rewards of a rollout, and for each completion its explanation's length and whether the end tag is present."""

    reward: TeacherReward
    explanation_lengths: list[int]
    closed: list[bool]

    def means(self) -> dict[str, Tensor | float]:
        """Statistics averaged over the completions."""
        reward, n = self.reward, len(self.closed)
        return {
            "reward": reward.total.mean(),
            "reward_solution": reward.solution.mean(),
            "reward_kl": -reward.kl.mean(),
            "reward_format": reward.format.mean(),
            **{name: values.mean() for name, values in reward.reduced.items()},
            "format_rate": sum(self.closed) / n,
            "explanation_length": sum(self.explanation_lengths) / n,
        }

    def rows(self, sampled: Rollout, examples: Sequence[TeacherExample], tokenizer: Any) -> list[dict[str, Any]]:
        """One log row per completion, with the parts of its reward."""
        columns: dict[str, Tensor | Sequence[Any]] = {
            "solution": [example.solved.solution for example in examples],
            "reward": self.reward.total,
            "reward_solution": self.reward.solution,
            "reward_kl": -self.reward.kl,
            "reward_format": self.reward.format,
            **self.reward.reduced,
            "explanation_length": self.explanation_lengths,
            "completion_length": [len(completion) for completion in sampled.completions],
            "closed": self.closed,
        }
        completions = [tokenizer.decode(completion) for completion in sampled.completions]
        return sample_rows([example.text for example in examples], completions, columns)


def score_rollout(
    config: RLTConfig,
    run: TrainingRun,
    student: Reference,
    sampled: Rollout,
    examples: Sequence[TeacherExample],
    eos_ids: Sequence[int],
) -> ScoredRollout:
    """The rewards of a rollout; `examples` holds one example per row of the rollout."""
    found = [
        split_explanation(run.tokenizer, completion, config.explanation_end, eos_ids)
        for completion in sampled.completions
    ]
    lengths, closed = [length for length, _ in found], [is_closed for _, is_closed in found]
    sequences = [
        example.student_sequence(completion[:length])
        for example, completion, length in zip(examples, sampled.completions, lengths, strict=True)
    ]
    with torch.no_grad(), student.weights():
        scored = student_logprobs(
            student.model,
            sequences,
            pad_id=run.pad_id,
            temperature=config.student_temperature or config.temperature,
            rows_per_pass=config.batch_size,
            device=run.device,
            ranks=run.ranks,
        )
    starts = [sequence.prompt_length for sequence in sampled.sequences]
    teacher, _ = spans(sampled.logprobs, sampled.batch.first_trained, starts, lengths)
    reward = teacher_reward(
        scored.solution,
        scored.solution_mask,
        teacher,
        scored.explanation,
        scored.explanation_mask,
        torch.tensor(closed, dtype=torch.bool, device=run.device),
        solution_reductions=config.solution_reductions,
        solution_coefficients=config.solution_coefficients,
        kl_reductions=config.kl_reductions,
        kl_coefficients=config.kl_coefficients,
        format_penalty=config.format_penalty,
    )
    return ScoredRollout(reward, lengths, closed)


def train(config: RLTConfig) -> dict[str, Any]:
    """Run RLT and return its summary; outputs and errors as in `dpo.train`."""
    # Before the run writes files, so that a failed load leaves none.
    student = None
    if config.student_model is not None:
        student = load_frozen(config.student_model, config.dtype)
        student = placed(
            student,
            resolve_device(config.device),
            offload=config.offload_untrained_models,
            sharded=Ranks.of(config.parallel).sharded,
        )
    run = TrainingRun(config, "rlt", _loader(config))
    reference = None
    if config.beta > 0 or student is None:
        reference = run.reference(offload=config.offload_untrained_models)
    check_rows(run, reference)
    student = student or reference
    assert student is not None
    at_once = config.generation_aggregation_steps and config.batch_size * config.generation_aggregation_steps
    engine = configured_engine(config, run.model, run.tokenizer, at_once=at_once)
    with closing(engine), run:
        parts = run.row_file(PARTS_FILE) if config.activate_debugging_logs else None

        def explain(examples: Sequence[TeacherExample], n: int) -> tuple[Rollout, ScoredRollout, list[TeacherExample]]:
            sampled = sample_rollout(run, engine, examples, n, config.completions_per_row)
            of_rows = [example for example in examples for _ in range(n)]
            with run.time("reward"):
                return sampled, score_rollout(config, run, student, sampled, of_rows, engine.eos_ids), of_rows

        def evaluate() -> dict[str, Tensor | float]:
            """Statistics of one explanation per example."""
            data = run.eval_data or []
            means: dict[str, Tensor | float] = {}
            sequences, ended = [], []
            for part in chunks(data, config.completions_per_step):
                sampled, scored, _ = explain(part, 1)
                for name, value in scored.means().items():
                    means[name] = means.get(name, 0.0) + value * (len(part) / len(data))
                sequences += sampled.sequences
                ended.append(sampled.ended)
            return means | completion_metrics(sequences, torch.cat(ended))

        for step in run.steps(evaluate):
            sampled, scored, examples = explain(run.examples_of(step), config.n_generations)
            agreement = engine_agreement(config, sampled)
            advantages = group_advantages(scored.reward.total, config.n_generations)
            ref_logprobs = reference_logprobs(run, reference if config.beta > 0 else None, sampled)
            statistics = update_on_rollout(run, sampled, advantages, ref_logprobs=ref_logprobs)
            if run.samples_due(step) or parts is not None:
                rows = scored.rows(sampled, examples, run.tokenizer)
                run.log_samples(step, rows)
                if parts is not None:
                    for row in rows:
                        parts.write({"step": step, **row})
            groups = scored.reward.total.view(-1, config.n_generations)
            run.log(
                step,
                sampled.batch.n_tokens,
                **statistics,
                **agreement,
                **scored.means(),
                **completion_metrics(sampled.sequences, sampled.ended),
                reward_std=groups.std(dim=1).mean(),
            )
        return run.finish()


def _loader(config: RLTConfig) -> LoadData:
    def load(
        dataset: str, split: str, tokenizer: Any, subset_size: int | None, seed: int
    ) -> tuple[list[TeacherExample], LessonReport]:
        student_tokenizer = None
        if config.student_model is not None:
            student_tokenizer = load_student_tokenizer(config.student_model, tokenizer)
        examples, report = load_teacher_examples(
            dataset,
            split,
            tokenizer,
            config,
            student_tokenizer=student_tokenizer,
            max_prompt_length=config.max_prompt_length,
            subset_size=subset_size,
            seed=seed,
        )
        student_name = config.student_model or config.ref_name or config.policy_name
        require_student_positions(student_name, examples, config.max_completion_length)
        return examples, report

    return load
