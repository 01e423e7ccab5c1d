"""Rejection-sampling fine-tuning (RFT, https://arxiv.org/abs/2308.01825) with the stages of KramCoder/ADL-3:

    sparse-opt train rft datagen --model_name_or_path LARGE --dataset_name data/train.json --output_dir data
    sparse-opt train rft train --model_name_or_path SMALL --dataset_name data/rft.json --use_peft --output_dir rft_model
    sparse-opt train rft test --model_name_or_path rft_model --dataset_name data/valid.json --output_dir rft_test

`datagen` samples completions of each question and keeps verified ones, `train` is TRL's SFTTrainer on them, and `test`
measures the accuracy. Rows are arrays, [question, answer] or [question, answer, reasoning], or objects with prompt and
answer (`train`: prompt and completion).

| stage | files in the output folder |
|---|---|
| datagen | rft.json, arrays with reasoning (of objects rft.jsonl: prompt, completion); samples.jsonl, report.json |
| train | the model or adapter, as `sparse-opt train sft` |
| test | results.jsonl, a row for each prompt; report.json |

Completions are written when they are sampled: a killed `datagen` or `test` continues when its command is repeated. Each
batch has a random seed of its own, so the rows are those of a run that was not killed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import is_torch_tf32_available
from trl import ScriptArguments
from trl.trainer.utils import hash_module

from sparse_opt.errors import ConfigError, DataError, SparseOptError
from sparse_opt.files import write_text
from sparse_opt.integrations.run_folder import RunFolder
from sparse_opt.integrations.trl.command_line import Recipe, make_parser, parse
from sparse_opt.integrations.trl.data import MissingDataset, load_rows, rows_digest
from sparse_opt.integrations.trl.mask_arguments import option
from sparse_opt.integrations.trl.rewards import load_rewards, number_in
from sparse_opt.integrations.trl.train import train as train_with_trl
from sparse_opt.options import nearest
from sparse_opt.progress import hide_progress_bars, with_time_left
from sparse_opt.tables import table

from ..sampling import Sampling, generate, stop_ids

Profile = Literal["conservative", "balanced", "aggressive"]
PROFILES = get_args(Profile)
PROFILE_HELP = "values of options that are not given; 'sparse-opt train rft show_optimizations' lists them"
SAMPLES = {"datagen": "samples.jsonl", "test": "results.jsonl"}
REPORT_FILE = "report.json"
QUESTION = "rft_question"  # column of rows that were arrays
# Option of `train` -> its value in each profile, and why. An option that is given wins over the profile.
TRAINING: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "per_device_train_batch_size": ((32, 32, 32), "a step in one forward pass; if memory is short: 8, and 4 passes"),
    "gradient_accumulation_steps": ((1, 1, 1), "the product of both is the examples of a step"),
    "gradient_checkpointing": ((False, False, False), "true: recompute activations, slower, least memory"),
    "fp16": ((False, False, False), "for a GPU without bf16 units; it switches bf16 off"),
    "bf16": ((False, True, True), "16-bit matrix units; slow on a CPU that has none"),
    "tf32": ((True, None, None), "on a GPU: fp32 products round their inputs to 10 bits of mantissa"),
    "dtype": (("float32", "float32", "bfloat16"), "of the weights: dense training takes 16 bytes per fp32 weight"),
    "mask_density": ((None, None, 0.1), "train a random tenth: 4 bytes per weight; not with --mask or --use_peft"),
    "torch_compile": ((False, False, False), "true pays after the minute that it takes: long runs of large models"),
    "optim": (("adamw_torch_fused",) * 3, "dense: one kernel for all weights, the same arithmetic"),
    "train_sampling_strategy": (("group_by_length",) * 3, "examples of similar lengths together: little padding"),
    "packing": ((False, False, False), "true needs flash attention, which keeps packed examples apart"),
    "dataloader_num_workers": ((0, 0, 0), "rows are tokenized before training: workers only pad them"),
    "dataloader_pin_memory": ((True, True, True), "page-locked batches, copied to a GPU while it computes"),
    "lr_scheduler_type": (("cosine",) * 3, "with the warm-up the usual schedule of fine-tuning"),
    "warmup_steps": ((0.03, 0.03, 0.03), "below 1 it is the share of all steps"),
}
# The same of `datagen` and `test`.
SAMPLING: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "dtype": (("float32", "bfloat16", "bfloat16"), "of the weights and the key-value cache"),
    "tf32": ((True, False, False), "on a GPU: fp32 products round their inputs to 10 bits of mantissa"),
    "batch_size": ((256, 512, 1024), "completions at once: memory of their key-value cache"),
}

# Messages before the question in style chat.
SHOTS = [
    ("system", "You convert units. Work in short steps, and give the result as a number in <answer> and </answer>."),
    ("user", "How many minutes are 4 hours?"),
    ("assistant", "1 hour is 60 minutes. 4 * 60 = <answer>240</answer>"),
    ("user", "Express 2500 g in kg."),
    ("assistant", "1 kg is 1000 g. 2500 / 1000 = <answer>2.5</answer>"),
]


@dataclass(kw_only=True)
class TrainArguments:
    """Options of `train` in addition to those of `sparse-opt train sft`."""

    profile: Profile | None = option(None, PROFILE_HELP)  # noqa: RUF009
    group_by_length: bool = option(False, "--train_sampling_strategy group_by_length, its name in transformers 5")
    logging_dir: str | None = option(None, "TensorBoard's; sets TENSORBOARD_LOGGING_DIR, its place in transformers 5")


@dataclass(kw_only=True)
class SamplingArguments:
    """Measure the accuracy on prompts with known answers."""

    model_name_or_path: str | None = option(None, "name or folder of a model or an adapter")
    dataset_name: str | None = option(None, "file, folder or dataset of the hub")
    dataset_split: str = option("train", "split of it; train[:100] is the first 100 rows")
    output_dir: str | None = option(None, "folder of the results")
    oversample: int = option(15, "completions of each question", "--num_generations")
    temperature: float = option(0.7, "0 takes the most likely token")
    max_completion_length: int = option(100, "tokens of a completion")
    batch_size: int = option(128, "completions at once, but at least those of one question")
    verifier: str = option("number", "number (within 5 %%), exact_match or the import path of a reward function")
    style: Literal["plain", "chat"] = option("plain", "prompt of a question in an array: it alone, or after --shots")
    shots: str | None = option(None, "JSON array of messages, in place of a system message and two unit conversions")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "of the weights")
    tf32: bool = option(False, "on a GPU: round the inputs of fp32 products")
    use_cpu: bool = option(False, "sample on the CPU although there is a GPU")
    seed: int = option(42, "of the completions")
    profile: Profile | None = option(None, PROFILE_HELP)  # noqa: RUF009

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "dataset_name", "output_dir"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} is missing")
        for name in ("oversample", "max_completion_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}, expected 1 or more")
        if self.temperature < 0 or (self.temperature == 0 and self.oversample > 1):
            raise ConfigError(f"--temperature is {self.temperature}, expected more than 0, or 0 with --oversample 1")


@dataclass(kw_only=True)
class DatagenArguments(SamplingArguments):
    """Sample completions of each question, verify them, and keep right ones that ended with EOS."""

    keep: Literal["first", "shortest", "all"] = option("first", "of a question's right ones: one, or all that differ")


def run(argv: Sequence[str]) -> int:
    """Run the stage that the first word names, with the options after it, and return 0."""
    usage = f"sparse-opt train rft {' | '.join(STAGES)}"
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: {usage}\n\n{__doc__}\n'sparse-opt train rft STAGE --help' lists the options of a stage.")
        return 0
    if not argv or argv[0] not in STAGES:
        found = f"unknown stage '{argv[0]}'{nearest(argv[0], STAGES)}" if argv else "the stage is missing"
        raise ConfigError(f"{found}: {usage}")
    return STAGES[argv[0]](argv[1:])


def train(argv: Sequence[str]) -> int:
    """SFT with TRL on kept completions, dense, under a mask or with LoRA."""
    recipe = Recipe(
        "rft train",
        TrainArguments,
        defaults={"lora_dropout": 0.0, "lora_target_modules": ["all-linear"]},
        description="Fine-tune on kept completions with TRL's SFTTrainer: all weights, those of a mask, or adapters.",
        aliases={"use_compile": "torch_compile", "warmup_ratio": "warmup_steps"},
        translate=_with_profile,
    )
    hide_progress_bars()
    options = parse("sft", argv, recipe)
    if options.recipe.logging_dir is not None:
        if "tensorboard" not in options.training.report_to:
            raise ConfigError("--logging_dir is TensorBoard's folder: give --report_to tensorboard, or leave it out")
        os.environ["TENSORBOARD_LOGGING_DIR"] = options.recipe.logging_dir
    try:
        rows = load_rows(options.script, "sft", from_array=_demonstration)
    except MissingDataset as error:
        raise ConfigError(f"{error}: 'sparse-opt train rft datagen' writes it") from error
    return train_with_trl("sft", options, rows=rows)


def _with_profile(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    if values["group_by_length"] and "train_sampling_strategy" not in given:
        values["train_sampling_strategy"] = "group_by_length"
    names = set(TRAINING)
    if values["fp16"] and "bf16" not in given:
        values["bf16"] = False
        names -= {"bf16", "dtype"}
    if values["use_peft"] or values["mask"] is not None:
        names -= {"mask_density"}
    _set_profile(values, given, {name: TRAINING[name] for name in names})
    return values


def _set_profile(values: dict[str, Any], given: set[str], settings: dict[str, Any]) -> None:
    if values["profile"] is None:
        return
    for name, (of_profiles, _) in settings.items():
        if name not in given and (name != "tf32" or is_torch_tf32_available()):
            values[name] = of_profiles[PROFILES.index(values["profile"])]


def _question(row: list[Any]) -> tuple[str, Any, str | None]:
    if len(row) not in (2, 3) or not all(isinstance(row[i], str) for i in (0, 2) if i < len(row)):
        raise ValueError("expected [question, answer] or [question, answer, reasoning]")
    if isinstance(row[1], bool) or not isinstance(row[1], str | int | float):
        raise ValueError(f"expected a number or text as the answer of {row[0]!r}")
    return row[0].strip(), row[1], row[2].strip() if len(row) == 3 else None


def _demonstration(row: list[Any]) -> dict[str, Any]:
    """The completion begins with the space, because tokenizers merge a space with the word that follows it."""
    question, answer, reasoning = _question(row)
    return {"prompt": question, "completion": f" {reasoning or f'<answer>{answer}</answer>'}"}


def datagen(argv: Sequence[str]) -> int:
    """Write the kept completions, and return 0."""
    options = _parse("datagen", DatagenArguments, argv, style="chat")
    rows, report = _sample("datagen", options)
    of_arrays, kept, n_questions = QUESTION in rows[0], list[Any](), 0
    for row in rows:
        outcomes = zip(row["completions"], row["right"], row["finished"], strict=True)
        right = list(dict.fromkeys(text for text, is_right, ended in outcomes if is_right and ended))
        n_questions += bool(right)
        if options.keep != "all":
            right = right[:1] if options.keep == "first" else sorted(right, key=len)[:1]
        for text in right:
            is_text = isinstance(row["prompt"], str)
            completion = text if is_text else [{"role": "assistant", "content": text}]
            pair = {"prompt": row["prompt"], "completion": completion}
            kept.append([row[QUESTION], row["answer"], text.strip()] if of_arrays else pair)
    lines = [json.dumps(row, ensure_ascii=False) for row in kept]
    file = Path(options.output_dir, "rft.json" if of_arrays else "rft.jsonl")
    write_text(file, "[\n" + ",\n".join(lines) + "\n]\n" if of_arrays else "".join(f"{line}\n" for line in lines))
    write_text(file.with_name(REPORT_FILE), json.dumps({**report, "n_kept": len(kept)}, indent=1))
    print(f"kept {len(kept)} completions, of {n_questions} of {len(rows)} questions, in {file}")
    return 0


def test(argv: Sequence[str]) -> int:
    """Write results.jsonl, print the accuracy, and return 0."""
    options = _parse("test", SamplingArguments, argv, oversample=1, temperature=0.0)
    _, report = _sample("test", options)
    write_text(Path(options.output_dir, REPORT_FILE), json.dumps(report, indent=1))
    print(f"results: {Path(options.output_dir, SAMPLES['test'])}")
    return 0


test.__test__ = False  # type: ignore[attr-defined]  # pytest would collect a function of this name


def _parse(stage: str, arguments: type, argv: Sequence[str], **defaults: Any) -> Any:
    parser = make_parser(f"rft {stage}", (arguments,), str(arguments.__doc__))
    parser.set_defaults(**defaults)
    values = vars(parser.parse_words(argv))
    _set_profile(values, set(parser.given), SAMPLING)
    (options,) = parser.parse_dict(values)
    return options


def _sample(stage: str, options: SamplingArguments) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Sample and verify what is not written yet; returns one row for each prompt, and the report.

    A row has index, prompt, the columns of the dataset, and lists of completions, rewards (None where the verifier
    does not judge), right, finished (whether it ended with EOS) and n_tokens.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"rft {stage} runs in one process: give each its part, as --dataset_split 'train[:50%]'")
    hide_progress_bars()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    (verify,) = load_rewards([options.verifier])
    dataset = _prompts(options)
    rows = list(dataset)
    model, tokenizer = _load(options)
    ids = [_tokens(tokenizer, row["prompt"]) for row in rows]
    longest = max(map(len, ids)) + options.max_completion_length
    if longest > (room := getattr(model.config, "max_position_embeddings", longest)):
        raise ConfigError(f"prompts with --max_completion_length need {longest} tokens, and the model takes {room}")
    run = {name: value for name, value in vars(options).items() if name not in ("output_dir", "keep")}
    run |= {"stage": stage, "rows": rows_digest(dataset), "weights": hash_module(model)}
    file = Path(str(options.output_dir), SAMPLES[stage])
    lock = RunFolder(str(options.output_dir))
    lock.begin(None, newest=False, saves=True)
    try:
        order = sorted(range(len(rows)), key=lambda i: -len(ids[i]))  # the longest first: little padding
        step = max(1, options.batch_size // options.oversample)
        done = _written(file, run, step, len(rows))
        n_resumed, started = len(done), time.monotonic()
        batches = [order[first : first + step] for first in range(n_resumed, len(rows), step)]
        with file.open("a", encoding="utf-8") as out:
            for batch in with_time_left(batches, what=f"rft {stage}", unit="prompts", n_before=n_resumed):
                set_seed((options.seed + 1_000_003 * batch[0]) % 2**32)
                sampled = _completions(model, tokenizer, [ids[i] for i in batch], options)
                new = [{"index": i, **rows[i], **row} for i, row in zip(batch, sampled, strict=True)]
                _judge(new, verify)
                out.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in new))
                out.flush()
                done += new
        seconds = time.monotonic() - started
        n_tokens = sum(sum(row["n_tokens"]) for row in done[n_resumed:])
        done.sort(key=lambda row: row["index"])
        write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in done))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {file} is kept: repeat the command to continue") from None
    except torch.OutOfMemoryError as error:
        raise SparseOptError(f"out of memory at --batch_size {options.batch_size}: lower it") from error
    finally:
        lock.end()
    rate = n_tokens / seconds if n_tokens else None
    timing = {"n_prompts_resumed": n_resumed, "seconds": seconds, "tokens_per_s": rate}
    return done, {"run": run, **_statistics(done, options.verifier), **timing}


def _prompts(options: SamplingArguments) -> Any:
    """Rows with prompt, the columns that verifiers may read, and, of arrays, the question."""
    shots = [{"role": role, "content": content} for role, content in SHOTS]
    if options.shots is not None:
        try:
            found = json.loads(Path(options.shots).read_text(encoding="utf-8"))
            shots = [{"role": message["role"], "content": message["content"]} for message in found]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"--shots {options.shots}: expected an array of messages with role, content") from error

    def from_array(row: list[Any]) -> dict[str, Any]:
        question, answer, _ = _question(row)
        messages = [*shots, {"role": "user", "content": question}]
        return {"prompt": question if options.style == "plain" else messages, QUESTION: question, "answer": answer}

    script = ScriptArguments(dataset_name=options.dataset_name, dataset_train_split=options.dataset_split)
    return load_rows(script, "grpo", from_array=from_array)


def _load(options: SamplingArguments) -> tuple[Any, Any]:
    name = options.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dtype = getattr(torch, options.dtype)
    model, loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    if loaded["missing_keys"]:
        raise DataError(f"{name} lacks the weight {min(loaded['missing_keys'])} of its {type(model).__name__}")
    device = None if options.use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return model.to(device or "cpu").eval(), tokenizer


def _tokens(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise ConfigError("the model has no chat template, which prompts of messages need: give --style plain, or text")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def _written(file: Path, run: dict[str, Any], step: int, n_rows: int) -> list[dict[str, Any]]:
    """The rows of whole batches that an earlier run with these options wrote; the file is cut after them."""
    report = file.with_name(REPORT_FILE)
    if not file.exists():
        write_text(report, json.dumps({"run": run}, indent=1))
        return []
    try:
        earlier = json.loads(report.read_text(encoding="utf-8"))["run"]
        lines = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        rows = [json.loads(line) for line in lines]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{file} or {report} cannot be read ({error!r}): remove {file} to sample again") from error
    for name, value in run.items():
        if earlier.get(name) != value:
            found = f"{file} is of a run with {name} {earlier.get(name)!r}, and this one has {value!r}"
            raise ConfigError(f"{found}: choose another --output_dir, or remove the file")
    if len(rows) < n_rows:
        rows = rows[: len(rows) // step * step]
        os.truncate(file, sum(map(len, lines[: len(rows)])))
    return rows


def _completions(model: Any, tokenizer: Any, prompts: list[list[int]], options: Any) -> list[dict[str, Any]]:
    """completions, finished and n_tokens of each prompt."""
    ends, n = stop_ids(model, tokenizer), options.oversample
    sampling = Sampling(options.max_completion_length, options.temperature)
    sampled = generate(model, prompts, sampling, pad_id=tokenizer.pad_token_id, eos_ids=ends, n=n)
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    finished = [tokens[-1] in ends for tokens in sampled]
    lengths = [len(tokens) for tokens in sampled]
    of_prompts = [slice(first, first + n) for first in range(0, len(texts), n)]
    return [{"completions": texts[i], "finished": finished[i], "n_tokens": lengths[i]} for i in of_prompts]


def _judge(rows: list[dict[str, Any]], verify: Callable[..., Any]) -> None:
    """Add rewards and right to the rows."""
    repeated = [row for row in rows for _ in row["completions"]]
    texts: list[Any] = [text for row in rows for text in row["completions"]]
    if not isinstance(rows[0]["prompt"], str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    columns = rows[0].keys() - {"index", "prompt", "completions", "finished", "n_tokens"}
    values = {name: [row[name] for row in repeated] for name in columns}
    rewards = verify(completions=texts, prompts=[row["prompt"] for row in repeated], **values)
    rewards = asyncio.run(rewards) if inspect.iscoroutine(rewards) else rewards
    for row in rows:
        n = len(row["completions"])
        row["rewards"], rewards = rewards[:n], rewards[n:]
        row["right"] = [reward is not None and reward >= 1 for reward in row["rewards"]]


def _statistics(rows: list[dict[str, Any]], verifier: str) -> dict[str, Any]:
    """Shares of right completions and of solved prompts; prints the accuracy.

    accuracy_stderr is an upper bound of the standard error over prompts, reached if each is always or never solved.
    """
    texts = [text for row in rows for text in row["completions"]]
    n_judged = sum(reward is not None for row in rows for reward in row["rewards"])
    if not n_judged:
        raise DataError(f"--verifier {verifier} judges none of {len(texts)} completions: check the answers")
    accuracy = sum(sum(row["right"]) for row in rows) / n_judged
    found = {"n_prompts": len(rows), "n_completions": len(texts), "accuracy": accuracy}
    found["accuracy_stderr"] = math.sqrt(accuracy * (1 - accuracy) / len(rows))
    found["solved"] = sum(any(row["right"]) for row in rows) / len(rows)
    found["finished"] = sum(sum(row["finished"]) for row in rows) / len(texts)
    line = f"accuracy {accuracy:.4f} +- {found['accuracy_stderr']:.4f} (standard error, {len(rows)} prompts)"
    if verifier == "number":
        found["answer_rate"] = sum(number_in(text) is not None for text in texts) / len(texts)
        line += f", answer rate {found['answer_rate']:.4f}"
    print(line)
    return found


def show_optimizations(argv: Sequence[str]) -> int:
    """Print what each profile sets, and why."""
    if argv:
        raise ConfigError(f"'show_optimizations' takes no options, found '{argv[0]}'")
    for stages, settings in (("rft train", TRAINING), ("rft datagen, rft test", SAMPLING)):
        cells = [[name, *map(str, values), why] for name, (values, why) in settings.items()]
        print(f"{table([stages, *PROFILES, ''], cells, n_words=5)}\n")
    print("--profile NAME sets these, unless they are given")
    return 0


STAGES = {"datagen": datagen, "train": train, "test": test, "show_optimizations": show_optimizations}
