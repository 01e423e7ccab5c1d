"""Reinforcement-learned teachers (https://arxiv.org/abs/2506.08388): train a model to explain known solutions.

The policy is a teacher: given a question and its solution, it writes an explanation. The reward is the log-probability
that a student assigns to the solution given question and explanation, minus the divergence between teacher and student
on the explanation, where the student sees only the question:

    reward = sum_i a_i red_i(log p_student(solution | question, explanation))
             - sum_j k_j red_j(log p_teacher - log p_student on the explanation's tokens) + format

Options and defaults are those of https://github.com/SakanaAI/RLT, cfgs/run_cfg/teacher_rlt.yaml. The divergence of a
token is the plain difference of its log-probabilities, which may be negative; both models use the sampling temperature;
format is -1 if the end tag is missing, and the whole completion is then scored as the explanation. Unlike there, the
student reads the teacher's tokens instead of retokenizing its text, so that both score the same tokens; whitespace
around the solution and the tags is not scored. TRL's GRPOTrainer samples and updates.
"""

from __future__ import annotations

import json
import os
import random
import re
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, make_dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from trl import GRPOConfig
from trl.models.utils import prepare_fsdp
from trl.trainer.utils import add_fused_lm_head

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.files import write_text
from sparse_opt.integrations.references import BaseWeightsReference, evaluating
from sparse_opt.integrations.trl.command_line import GRPOScriptArguments, Recipe, parse
from sparse_opt.integrations.trl.data import read_rows
from sparse_opt.integrations.trl.mask_arguments import option
from sparse_opt.integrations.trl.records import solution_reader
from sparse_opt.integrations.trl.rewards import checked
from sparse_opt.integrations.trl.row_file import RowFile
from sparse_opt.integrations.trl.train import train

from ..batches import applying_chat_template
from ..pretrained import load_config_from, load_tokenizer_from, max_positions, reading

FIELD = re.compile(r"\{(question|solution|explanation)\}")
# Options of the originals with one meaning here: names, the values that have it, and what to do instead of others.
_FIXED = {
    name: (values.split(), instead)
    for names, values, instead in (
        ("normalize_log_prob_fn normalize_kl_fn", "none", "the reward has the plain log-probabilities"),
        ("clip_log_prob clip_kl use_schulman_kl_estimation", "100000 false", "the reward has plain log-probabilities"),
        ("unbias_log_probabilities unbias_teacher_log_probs", "true", "TRL divides the logits by --temperature"),
        ("student_model_init_kwargs", "none", "the student is loaded as the teacher is: --model_init_kwargs"),
        ("use_vllm_server use_ray", "false", "use --use_vllm --vllm_mode server --vllm_server_base_url URL"),
        ("enforce_eager", "false", "use a mask, --vllm_weights sparse and --vllm_options, or a vLLM server"),
        ("enable_prefix_caching", "true", "use a mask, --vllm_weights sparse and --vllm_options, or a vLLM server"),
        ("dataset_id_or_path", "none", "use --dataset_name"),
        ("wandb_project", "none", "set WANDB_PROJECT, and use --report_to wandb"),
        ("save_final_model", "true", "the model is always saved in --output_dir"),
        ("offload zero1 deepspeed", "none", "use --offload_untrained_models, a mask, or FSDP2 (`fsdp: true` in YAML)"),
        ("reward_funcs reward_model_name_or_path", "none", "rlt has a reward of its own"),
        ("dataset_streaming remove_unused_columns", "false", "rlt needs all rows and columns"),
    )
    for name in names.split()
}


@dataclass(kw_only=True)
class RLTOptions:
    """Options of `sparse-opt train rlt` in addition to those of `sparse-opt train grpo`."""

    student_model: str | None = option(None, "model with the teacher's vocabulary; default: the initial teacher")
    answer_log_prob_coeff: list[float] = option([1.0, 0.01], "weights of the solution's reductions")  # noqa: RUF009
    reduction_log_prob_fn: list[str] = option(["mean", "min"], "of the solution: mean, sum, min, max")  # noqa: RUF009
    kl_penalty_reward_coeff: list[float] = option([3.0, 0.03], "weights of the divergence's reductions")  # noqa: RUF009
    reduction_kl_fn: list[str] = option(["mean", "max"], "of log p_teacher - log p_student")  # noqa: RUF009
    not_matched_penalty: float = option(-1.0, "added to the reward if the explanation has no end tag")
    unbias_student_log_probs_temp: float | None = option(None, "the student's temperature; default: --temperature")
    max_prompt_length: int | None = option(16384, "leave out rows whose prompt has more tokens")
    train_batch_size: int | None = option(None, "completions of a step; sets --gradient_accumulation_steps")
    generation_aggregation_steps: int | None = option(None, "forward passes to sample for at once; default: a step's")
    offload_untrained_models: bool = option(False, "keep student and reference in host memory while not in use")
    activate_debugging_logs: bool = option(False, "write the parts of all rewards to reward_parts.jsonl")
    save_completions_probability: float | None = option(None, "share of the completions to write there")
    sft_rows: str | None = option(None, "write the teacher's prompts with known explanations to this file, and end")

    teacher_system: str = option(
        "You are given a question and write its solution first, between <|begin_of_solution|> and "
        "<|end_of_solution|>. Then you explain, between <|begin_of_explanation|> and <|end_of_explanation|>, how one "
        "comes to this solution: step by step, with the steps apart by empty lines, so that a reader who has only the "
        "question could follow and find the solution.",
        "system text of the teacher; may be empty, as the student's",
    )
    teacher_user: str = option("{question}", "the teacher's question")
    teacher_start: str = option(
        "<|begin_of_solution|>\n\n{solution}\n\n<|end_of_solution|>\n\n<|begin_of_explanation|>\n\n",
        "given beginning of the teacher's answer; the explanation follows",
    )
    explanation_end: str = option("<|end_of_explanation|>", "the tag that ends the teacher's explanation")
    student_system: str = option(
        "You think about a question first, step by step, between <|begin_of_thought|> and <|end_of_thought|>, and then "
        "write its solution between <|begin_of_solution|> and <|end_of_solution|>.",
        "system text of the student",
    )
    student_user: str = option("{question}", "the student's question")
    student_answer: str = option(
        "<|begin_of_thought|>\n\n{explanation}<|end_of_thought|>\n\n<|begin_of_solution|>\n\n{solution}\n\n"
        "<|end_of_solution|>",
        "the student's answer",
    )


_of_trl = GRPOScriptArguments.__dataclass_fields__ | GRPOConfig.__dataclass_fields__
_fields = [(n, str | None, option(None, " or ".join(values))) for n, (values, _) in _FIXED.items() if n not in _of_trl]
_Options = make_dataclass("_Options", _fields, bases=(RLTOptions,), kw_only=True)


def _translate(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """The values of the command line, with TRL's and the mask's options that follow from the originals'."""
    used = dict(values)
    for name in ("student_model", *_FIXED):  # words of Hydra and YAML
        used[name] = None if str(values[name]).lower() in ("none", "null") else values[name]
    for name, (fixed, instead) in _FIXED.items():
        if used[name] is not None and str(used[name]).lower() not in fixed:
            raise ConfigError(f"--{name} {used[name]} is not supported: {instead}")
    _check_reward(used)
    is_sparse = used["mask"] is not None or used["mask_density"] is not None
    if used["student_model"] is None:
        if (own := used["unbias_student_log_probs_temp"]) not in (None, used["temperature"]):
            found = f"--unbias_student_log_probs_temp is {own}, and the student is the reference"
            raise ConfigError(f"{found} of --temperature {used['temperature']}: give both alike, or a --student_model")
        if used["sync_ref_model"]:
            raise ConfigError("--sync_ref_model changes the reference, which is the student: give a --student_model")
        if is_sparse and used["keep_base_weights"] is False:
            raise ConfigError("--keep_base_weights is false, but the base weights are the student: set it to true")
        used["keep_base_weights"] = True if is_sparse else used["keep_base_weights"]
    if used["offload_untrained_models"]:
        if used["sync_ref_model"] or used["fsdp"]:
            raise ConfigError("--offload_untrained_models excludes --sync_ref_model and --fsdp: leave it or them out")
        used["offload_base_weights"] = is_sparse or used["offload_base_weights"]
    steps = used["gradient_accumulation_steps"]
    if (total := used["train_batch_size"]) is not None:
        at_once = used["per_device_train_batch_size"] * int(os.environ.get("WORLD_SIZE", "1"))
        if total % at_once or steps not in (1, total // at_once):
            expected = f"expected a multiple of the {at_once} completions of a forward pass of all processes"
            left_out = f"--gradient_accumulation_steps (found {steps}) left out"
            raise ConfigError(f"--train_batch_size is {total}: {expected}, and {left_out}")
        steps = used["gradient_accumulation_steps"] = total // at_once
    if (together := used["generation_aggregation_steps"]) is not None:
        if together < 1 or steps % together or used["steps_per_generation"] not in (None, together):
            expected = f"expected a divisor of the {steps} forward passes of a step (--gradient_accumulation_steps)"
            left_out = "--steps_per_generation, its name in TRL, left out"
            raise ConfigError(f"--generation_aggregation_steps is {together}: {expected}, and {left_out}")
        used["steps_per_generation"] = together
    return used


def _check_reward(values: dict[str, Any]) -> None:
    pairs = {"answer_log_prob_coeff": "reduction_log_prob_fn", "kl_penalty_reward_coeff": "reduction_kl_fn"}
    for weights, reductions in pairs.items():
        n_weights, hows = len(values[weights]), values[reductions]
        if n_weights != len(hows) or not set(hows) <= _REDUCTIONS.keys():
            given = f"--{weights} has {n_weights} values for --{reductions} {' '.join(hows)}"
            raise ConfigError(f"{given}: expected one for each, of {', '.join(_REDUCTIONS)}")
    temperature, share = values["unbias_student_log_probs_temp"], values["save_completions_probability"]
    if temperature is not None and temperature <= 0:
        raise ConfigError(f"--unbias_student_log_probs_temp is {temperature}, expected a number above 0")
    if share is not None and not 0 <= share <= 1:
        raise ConfigError(f"--save_completions_probability is {share}, expected a share from 0 to 1")
    for names, expected in (
        (("teacher_system", "teacher_user", "teacher_start"), ["question", "solution"]),
        (("student_system", "student_user"), ["question"]),
        (("student_answer",), ["explanation", "solution"]),
        (("explanation_end",), []),
    ):
        text = "".join(values[name] for name in names)
        found = FIELD.findall(text)
        if not text or (found if names[0] == "student_answer" else sorted(set(found))) != expected:
            raise ConfigError(f"--{', --'.join(names)}: found {text[:80]!r}, expected text with the fields {expected}")


def teacher_rows(options: Any, tokenizer: Any, student_tokenizer: Any, *, test: bool = False) -> Dataset:
    """The dataset's rows for GRPOTrainer: prompt, solution, explanation, and the student's token ids around the latter.

    A tokenizer with a chat template gets the system and user texts as messages and the rest as the beginning of the
    assistant's turn; one without gets the texts one after another, verbatim.
    """
    texts, name, limit = options.recipe, options.script.dataset_name, options.recipe.max_prompt_length
    before, middle, _ = FIELD.split(texts.student_answer)[::2]
    given = read_rows(options.script, test=test)
    read, rows, longest = solution_reader(given.column_names, name, texts.student_answer), [], [0, 0]
    for number, given_row in enumerate(given, 1):
        try:
            row = read(given_row)
        except DataError as error:
            raise DataError(f"{name}, row {number}: {error}") from error
        start = _prompt(student_tokenizer, texts.student_system, texts.student_user, before, row)
        of_row = (start, middle, row["solution"])
        pieces = [student_tokenizer(text, add_special_tokens=not i)["input_ids"] for i, text in enumerate(of_row)]
        joined = [token for piece in pieces for token in piece]
        whole = student_tokenizer("".join(of_row))["input_ids"]
        if student_tokenizer.decode(joined) != student_tokenizer.decode(whole):
            raise DataError(f"{name}, row {number}: the tokenizer changes the text if its pieces are tokenized apart")
        prompt = _prompt(tokenizer, texts.teacher_system, texts.teacher_user, texts.teacher_start, row)
        n_tokens = len(tokenizer(prompt)["input_ids"])
        if limit is None or n_tokens <= limit:
            longest = [max(longest[0], n_tokens), max(longest[1], len(joined))]
            ids = dict(zip(("student_start", "student_middle", "solution_ids"), pieces, strict=True))
            rows.append({"explanation": None, **row, "prompt": prompt, **ids})
    if len(rows) < len(given):
        text = f"{name}: {len(given) - len(rows)} of {len(given)} prompts are longer than --max_prompt_length {limit}"
        if not rows:
            raise DataError(text)
        warnings.warn(f"{text}, and are left out", stacklevel=2)
    teacher = options.model.model_name_or_path
    for model, n_tokens in zip((teacher, texts.student_model or teacher), longest, strict=True):
        positions, total = max_positions(load_config_from(model)), n_tokens + options.training.max_completion_length
        if positions is not None and total > positions:
            found = f"the longest row has {n_tokens} tokens, with --max_completion_length {total}"
            raise ConfigError(f"{found}, more than the max_position_embeddings of {model}, {positions}")
    return Dataset.from_list(rows)


def _prompt(tokenizer: Any, system: str, user: str, start: str, row: dict[str, str]) -> str:
    system, user, start = (FIELD.sub(lambda found: row[found[1]], text) for text in (system, user, start))
    if tokenizer.chat_template is None:
        return system + user + start
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    with applying_chat_template():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # TRL tokenizes text with special tokens, which would repeat the template's BOS.
    adds_bos = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    return (text.removeprefix(tokenizer.bos_token) if adds_bos else text) + start


def _write_sft_rows(rows: Dataset, options: Any) -> int:
    file, end = Path(options.recipe.sft_rows), options.recipe.explanation_end
    if file.exists():
        raise ConfigError(f"--sft_rows {file} exists: choose another file, or remove it")
    if None in rows["explanation"]:
        raise DataError("--sft_rows: the dataset has no column explanation, reasoning_trace or reasoning")
    file.parent.mkdir(parents=True, exist_ok=True)
    demonstrations = ({"prompt": row["prompt"], "completion": row["explanation"] + end} for row in rows)
    write_text(file, "".join(json.dumps(row) + "\n" for row in demonstrations))
    print(f"{len(rows)} rows in {file}")
    return 0


# The reward

_REDUCTIONS: dict[str, Any] = {"mean": Tensor.mean, "sum": Tensor.sum, "min": Tensor.min, "max": Tensor.max}


def teacher_reward(solution: Tensor, divergence: Tensor, is_closed: bool, options: RLTOptions) -> dict[str, float]:
    """The reward of a completion by the formula in the module docstring, its parts, and their reductions.

    Args:
        solution: log-probabilities of the solution under the student, [S] fp32.
        divergence: the teacher's minus the student's log-probabilities of the explanation, [E] fp32. Without a token,
            each of its reductions is minus `not_matched_penalty`, as in the original.
        is_closed: whether the end tag is present.
    """
    penalty = options.not_matched_penalty
    parts = {"reward_solution": 0.0, "reward_kl": 0.0, "reward_format": 0.0 if is_closed else penalty}
    for how, weight in zip(options.reduction_log_prob_fn, options.answer_log_prob_coeff, strict=True):
        parts[f"solution_logprob_{how}"] = reduced = float(_REDUCTIONS[how](solution)) if len(solution) else penalty
        parts["reward_solution"] += weight * reduced
    for how, weight in zip(options.reduction_kl_fn, options.kl_penalty_reward_coeff, strict=True):
        parts[f"explanation_kl_{how}"] = reduced = float(_REDUCTIONS[how](divergence)) if len(divergence) else -penalty
        parts["reward_kl"] -= weight * reduced
    return {"reward": parts["reward_solution"] + parts["reward_kl"] + parts["reward_format"], **parts}


@torch.no_grad()
def piece_logprobs(trainer: Any, model: nn.Module, rows: list[Any], scored: list[int]) -> list[list[Tensor]]:
    """Log-probabilities of pieces of each row, [N] fp32 on the CPU, at the temperature of the model's fused head.

    `rows` has the token ids of each row in pieces, of which the first is not empty; `scored` indices of pieces, not 0.
    """
    device, args = trainer.accelerator.device, trainer.args
    ids = [torch.tensor([token for piece in row for token in piece], dtype=torch.int64, device="cpu") for row in rows]
    input_ids = pad_sequence(ids, batch_first=True).to(device)
    attention_mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(device)
    first = min(len(row[0]) for row in rows)
    n_scored = max(1, input_ids.shape[1] - first)
    per_pass = args.per_device_train_batch_size if trainer.model.training else args.per_device_eval_batch_size
    with evaluating(trainer.model):
        values = trainer._get_per_token_logps_and_entropies(model, input_ids, attention_mask, n_scored, per_pass)[0]
    ends = [[end - first for end in accumulate(map(len, row))] for row in rows]
    lines = zip(values.float().cpu(), ends, strict=True)
    return [[line[end[index - 1] : end[index]] for index in scored] for line, end in lines]


def split_explanation(tokenizer: Any, completion: Sequence[int], tag: str, eos_ids: Sequence[int]) -> tuple[int, bool]:
    """The number of explanation tokens at the start of a completion, and whether the end tag closes the explanation.

    A token that contains the tag's first character belongs to the tag, with all its characters. Without the tag, the
    explanation is the completion without a final EOS.
    """
    n = len(completion)
    if tag not in tokenizer.decode(completion):
        return n - int(n > 0 and completion[-1] in eos_ids), False
    end = bisect_left(range(n), True, key=lambda count: tag in tokenizer.decode(completion[:count]))
    after = bisect_left(range(end), True, key=lambda at: tag not in tokenizer.decode(completion[at:end]))
    return after - 1, True


class StudentReward:
    """The reward function for GRPOTrainer. Call `prepare` with the trainer before training."""

    __name__ = "teacher_reward"

    def __init__(self, options: Any) -> None:
        self._options, self._recipe = options, options.recipe
        self._share = 1.0 if self._recipe.activate_debugging_logs else self._recipe.save_completions_probability or 0.0
        self._file: RowFile | None = None

    def prepare(self, trainer: Any) -> None:
        """Load the student, or take the trainer's reference. Raises ConfigError or DataError if that is impossible."""
        if trainer.is_deepspeed_enabled:
            raise ConfigError("rlt does not support DeepSpeed: start with torchrun, with FSDP2 for large models")
        self._trainer, name, reference = trainer, self._recipe.student_model, getattr(trainer, "ref_model", None)
        self._has_adapter = name is None and self._options.model.use_peft
        if name is None and self._options.mask.is_sparse:
            reference = reference or BaseWeightsReference(trainer)
        is_loaded = name is not None or (reference is None and not self._has_adapter)
        self._student = self._load(name) if is_loaded else reference or trainer.model
        # Models in host memory, except from their first forward pass to the end of scoring.
        models = {reference, self._student} - {None, trainer.model}
        self._offloaded = models if self._recipe.offload_untrained_models else set()
        for model in self._offloaded:
            model.to("cpu").register_forward_pre_hook(self._to_device)

    def _load(self, name: str | None) -> Any:
        args, accelerator = self._trainer.args, self._trainer.accelerator
        given = {key: value for key, value in args.model_init_kwargs.items() if key != "revision" or name is None}
        name = name or self._options.model.model_name_or_path
        with reading(f"a student from {name}"):
            student = AutoModelForCausalLM.from_pretrained(name, **given)
        temperature = self._recipe.unbias_student_log_probs_temp or args.temperature
        student.requires_grad_(False).eval()
        add_fused_lm_head(student, temperature=temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
        if self._trainer.is_fsdp_enabled:
            return prepare_fsdp(student, accelerator)
        return accelerator.prepare_model(student, evaluation_mode=True)

    def _to_device(self, model: nn.Module, _: Any) -> None:
        model.to(self._trainer.accelerator.device)

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        trainer, tokenizer, tag = self._trainer, self._trainer.processing_class, self._recipe.explanation_end
        ends = [split_explanation(tokenizer, ids, tag, trainer.eos_token_ids) for ids in completion_ids]
        explanations = [ids[:n] for ids, (n, _) in zip(completion_ids, ends, strict=True)]
        written = list(zip(tokenizer(text=prompts)["input_ids"], explanations, strict=True))
        teacher = piece_logprobs(trainer, trainer.model, written, [1])
        for model in self._offloaded - {self._student}:
            model.to("cpu")
        start, middle, solution = (columns[name] for name in ("student_start", "student_middle", "solution_ids"))
        read = list(zip(start, explanations, middle, solution, strict=True))
        with trainer.model.disable_adapter() if self._has_adapter else nullcontext():
            student = piece_logprobs(trainer, self._student, read, [1, 3])
        for model in self._offloaded:
            model.to("cpu")
        rewards = [
            teacher_reward(solved, of_teacher - of_student, is_closed, self._recipe)
            | {"explanation_length": length, "format_rate": float(is_closed)}
            for (of_teacher,), (of_student, solved), (length, is_closed) in zip(teacher, student, ends, strict=True)
        ]
        for name in rewards[0].keys() - {"reward"}:  # TRL logs the reward
            columns["log_metric"](name, sum(row[name] for row in rewards) / len(rewards))
            columns["log_extra"](name, [row[name] for row in rewards])
        if self._share and trainer.model.training:
            texts = zip(prompts, completions, columns["solution"], rewards, strict=True)
            self._write([{"prompt": p, "completion": c, "solution": solution} | row for p, c, solution, row in texts])
        return [row["reward"] for row in rewards]

    def _write(self, rows: list[dict[str, Any]]) -> None:
        """Append the rows of all processes, or a share of them, to the file of process 0."""
        rows = gather_object(rows)
        if not self._trainer.accelerator.is_main_process:
            return
        n_steps, seed = self._trainer.state.global_step, self._trainer.args.seed
        if self._file is None:
            self._file = RowFile(Path(self._trainer.args.output_dir) / "reward_parts.jsonl")
            self._file.cut(n_steps)
        for row in rows:
            if random.Random(f"{seed} {n_steps} {row['prompt']} {row['completion']}").random() < self._share:
                self._file.write({"step": n_steps + 1, **row})


RECIPE = Recipe(
    "rlt",
    _Options,
    defaults={
        "temperature": 0.7,
        "beta": 0.04,
        "loss_type": "grpo",
        "lr_scheduler_type": "constant",
        "use_bias_correction_kl": False,
    },
    description="Train a teacher to explain known solutions, rewarded by what its student learns (arXiv:2506.08388).",
    epilog="""columns of the dataset: question, problem or prompt, and solution or answer; or conversations
the teacher's initial SFT, and its training:
  sparse-opt train rlt --model_name_or_path M --dataset_name D --sft_rows teacher.jsonl
  sparse-opt train sft --model_name_or_path M --dataset_name teacher.jsonl --output_dir start
  sparse-opt train rlt --model_name_or_path start --dataset_name D --student_model S --output_dir teacher""",
    translate=_translate,
)


def run(argv: Sequence[str]) -> int:
    """Train a teacher as the words after `sparse-opt train rlt` say, or write rows for its SFT; returns 0."""
    # The originals' launchers take `offload` and `zero1` as words of their own.
    options = parse("grpo", [f"{word}=true" if word in ("offload", "zero1") else word for word in argv], RECIPE)
    teacher, student = str(options.model.model_name_or_path), options.recipe.student_model
    tokenizer = load_tokenizer_from(teacher)
    student_tokenizer = tokenizer if student is None else load_tokenizer_from(student)
    if different := min(student_tokenizer.get_vocab().items() ^ tokenizer.get_vocab().items(), default=None):
        found = f"--student_model {student} has another vocabulary than the teacher: the id of {different[0]!r} differs"
        raise ConfigError(f"{found}; expected the same, because the student reads the teacher's tokens")
    rows = teacher_rows(options, tokenizer, student_tokenizer)
    if options.recipe.sft_rows is not None:
        return _write_sft_rows(rows, options)
    evaluates, reward = options.training.eval_strategy != "no", StudentReward(options)
    tests = teacher_rows(options, tokenizer, student_tokenizer, test=True) if evaluates else None
    return train("grpo", options, rows=rows, test_rows=tests, rewards=[checked(reward)], prepare=reward.prepare)
