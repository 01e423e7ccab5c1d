"""Sampling and verification of completions in blocks, shared by the RFT stages `datagen` and `test`.

A block is `prompts_per_batch` prompts. Its random seed depends on the run's seed and the block's number, and its
results are written atomically to one file in `parts/`. A killed run therefore resumes at the first missing block and
produces the same files as an uninterrupted one. A part is never modified after it is written.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import nn

from sparse_opt.config import option, require_count
from sparse_opt.delta.digest import StateDigest
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.option_parser import Setting

from ..data.encoding import require_known_tokens
from ..data.order import chunks
from ..data.prompts import PromptExample, load_prompts
from ..options import CompletionOptions, model_slug
from ..policy.models import load_policy, load_tokenizer, resolve_device
from ..profiles import profile_settings
from ..ranks import Ranks
from ..rewards.functions import Rewards, load_rewards
from ..rollouts import Engine, Sampling, make_engine, vllm_settings
from ..run.lock import RunLock, require_unlocked
from ..run.outputs import check_new_folder
from ..run.reporting.progress import Progress
from ..run.reporting.trackers import make_trackers, require_trackers
from ..run.resuming.resume import is_begun, require_same_options
from ..run.training_run import seed_everything
from .parts import MAY_DIFFER, part_file, prepared_output, read_part, write_part

MatmulPrecision = Literal["highest", "high", "medium"]
TrackerName = Literal["wandb", "tensorboard"]


@dataclass(kw_only=True)
class SamplingOptions(CompletionOptions):
    """Options of sampling and verification, and the folder of their results."""

    prompts_per_batch: int = option(
        32, "prompts whose completions are sampled together, seeded and kept as one block", at_least=1
    )
    max_rows: int | None = option(None, "completions in flight at once; none is all of a block's")
    group_by_length: bool = option(
        False, "engine generate: sample prompts of similar lengths together, where max_rows divides a block"
    )
    share_prompts: bool = option(False, "engine generate: compute a prompt once for all of its completions")
    drop_ended: bool = option(False, "engine generate: remove ended completions whenever half of those at once ended")
    reward_functions: list[str] = option(["math"], "rewards by name or as module:function, several with commas")
    reward_threshold: float = option(1.0, "a completion with at least this reward is right")
    float32_matmul_precision: MatmulPrecision = option(
        "highest", "torch.set_float32_matmul_precision: high and medium let fp32 products round their inputs on a GPU"
    )
    profile: str | None = option(
        None, "conservative, balanced, aggressive, a folder or a .yaml file: values of options that are not given"
    )
    output_dir: Path | None = option(None, "new or empty folder for the results; none is rft_{stage}_{model}")
    resume: bool = option(False, "resume the run in output_dir; from the beginning if there is none yet")
    report_to: list[TrackerName] = option([], "send the report to wandb, tensorboard, or both")
    project_name: str | None = option(None, "project at wandb; none is {model}-rft-subnetwork-emergence")
    run_name: str | None = option(None, "name of the run at wandb; none is the output folder's")

    @classmethod
    def presets(cls, given: dict[str, Any]) -> list[Setting]:
        """The values of `profile` for options that were not given."""
        return profile_settings(given.get("profile"), "sampling")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("prompts_per_batch x n_generations", self.prompts_per_batch * self.n_generations)
        if not self.reward_functions:
            raise ConfigError("option 'reward_functions' is empty: expected a function that verifies completions")
        if self.temperature == 0 and self.n_generations > 1:
            raise ConfigError(
                f"option 'n_generations' is {self.n_generations} at temperature 0: all completions of a prompt would "
                "be the same; expected 1"
            )

    def folder(self, stage: str) -> Path:
        """The folder of the results."""
        return self.mounted(self.output_dir or Path(f"rft_{stage}_{model_slug(self.policy_name)}"))


@dataclass
class CompletionCounts:
    """Counts of completions by outcome."""

    n_prompts: int = 0
    n_completions: int = 0
    n_judged: int = 0  # a reward function applies to them
    n_right: int = 0
    n_answered: int = 0
    n_finished: int = 0
    n_solved: int = 0
    n_tokens: int = 0
    reward_sum: float = 0.0

    def __add__(self, other: CompletionCounts) -> CompletionCounts:
        return CompletionCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def add(self, row: dict[str, Any]) -> None:
        """Add one prompt's row to the counts."""
        self.n_prompts += 1
        self.n_completions += len(row["right"])
        self.n_right += sum(row["right"])
        self.n_answered += sum(row["answered"])
        self.n_finished += sum(row["finished"])
        self.n_solved += any(row["right"])
        self.n_tokens += sum(row["n_tokens"])
        rewards = [reward for reward in row["rewards"] if reward is not None]
        self.n_judged += len(rewards)
        self.reward_sum += sum(rewards)

    def as_dict(self) -> dict[str, Any]:
        """Counts and shares.

        accuracy: share of correct completions among those that could be judged (the mean pass rate of the prompts).
        accuracy_stderr: upper bound of its standard error over prompts, reached if each prompt is always or never
        answered correctly. solved: share of prompts with a correct completion. answer_rate: share of completions in
        which an answer was found. finished: share of completions that ended with EOS.

        Raises:
            DataError: no completion could be judged.
        """
        if not self.n_judged:
            raise DataError(f"no reward function applies to any of {self.n_completions} completions")
        accuracy = self.n_right / self.n_judged
        return {
            "n_prompts": self.n_prompts,
            "n_completions": self.n_completions,
            "n_judged": self.n_judged,
            "n_tokens": self.n_tokens,
            "accuracy": accuracy,
            "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / self.n_prompts),
            "solved": self.n_solved / self.n_prompts,
            "answer_rate": self.n_answered / self.n_completions,
            "finished": self.n_finished / self.n_completions,
            "reward": self.reward_sum / self.n_judged,
            "tokens_per_completion": self.n_tokens / self.n_completions,
        }


@dataclass(frozen=True)
class Sampled:
    """The results of a finished run over all prompts, read from disk."""

    folder: Path
    n_parts: int
    prompts: dict[str, Any]  # counts of the dataset's used and dropped rows
    counts: CompletionCounts
    n_resumed: int  # parts that an earlier run had written
    peak_memory_bytes: int | None
    seconds: dict[str, float]  # of generation and of verification, over all parts
    ranks: Ranks  # the processes that sampled, each its own parts

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per prompt, in the order of the dataset.

        A row has index, prompt, answer (if the dataset has one), and lists with one entry per completion: completions,
        rewards (None if no reward function applies), right, answered, finished, n_tokens.
        """
        for part in range(self.n_parts):
            yield from read_part(self.folder, part)["rows"]

    def report(self, options: SamplingOptions, stage: str, **own: Any) -> dict[str, Any]:
        """The report of a stage: inputs, counts, the stage's own entries, seconds, and the largest peak GPU memory.

        tokens_per_s is the rate of one process. Trackers get the numbers as those of step 1.

        Raises:
            DataError: no completion could be judged.
        """
        report = {
            "algorithm": "rft",
            "stage": stage,
            "policy_name": options.policy_name,
            "dataset": options.dataset,
            "prompts": self.prompts,
            **self.counts.as_dict(),
            **own,
            **self.seconds,
            "tokens_per_s": self.counts.n_tokens / self.seconds["generate_time_s"],
            "peak_memory_bytes": self.peak_memory_bytes,
            "n_parts_resumed": self.n_resumed,
        }
        numbers = {f"{stage}/{name}": n for name, n in report.items() if isinstance(n, int | float)}
        for tracker in make_trackers(options, "rft", self.folder, 1):
            with closing(tracker):
                tracker.log(1, numbers)
        return report


@contextmanager
def sample(options: SamplingOptions, stage: str) -> Iterator[Sampled]:
    """Sample and verify all blocks that are not written yet; the output folder is locked until the context exits.

    Of N ranks, each samples every N-th block. A block is seeded by its number, so it is the same on any rank.

    Raises:
        ConfigError: an option is invalid; the output folder is not empty or, with `resume`, holds a run with other
            options or inputs.
        DataError: the model, the dataset or a part cannot be read.
    """
    ranks = Ranks.of(options.parallel, options.ddp_timeout)
    if ranks.sharded:
        raise ConfigError(
            f"option 'parallel' is fsdp: rft {stage} samples other prompts on each process, with the whole model; "
            "expected auto, none or replicate"
        )
    require_trackers(options)
    folder = options.folder(stage)

    def check_folder() -> bool:
        require_unlocked(folder)
        resuming = options.resume and is_begun(folder)
        if resuming:
            require_same_options(folder, options, MAY_DIFFER)
        else:
            check_new_folder(folder, "output_dir")
        return resuming

    resuming = ranks.on_main(check_folder)
    device = resolve_device(options.device)
    torch.set_float32_matmul_precision(options.float32_matmul_precision)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    tokenizer = load_tokenizer(options)
    rewards = load_rewards(options.reward_functions, options.reward_weights)
    prompts, report = load_prompts(
        options.dataset,
        options.dataset_split,
        tokenizer,
        options.subset_size,
        options.seed,
        max_prompt_length=options.max_prompt_length,
    )
    model = load_policy(options, device).eval()
    require_known_tokens(model, tokenizer, (example.ids for example in prompts))
    inputs = {"prompts": _prompts_digest(prompts), "weights": _weights_digest(model)}
    engine = make_engine(
        options.rollout_engine,
        model,
        tokenizer,
        max_rows=options.max_rows,
        by_length=options.group_by_length,
        share_prompts=options.share_prompts,
        drop_ended=options.drop_ended,
        max_length=max(len(example.ids) for example in prompts) + options.max_completion_length,
        **vllm_settings(options),
    )
    blocks = chunks(prompts, options.prompts_per_batch)
    seconds = {"generate_time_s": 0.0, "verify_time_s": 0.0}
    counts = CompletionCounts()
    with ExitStack() as locked:
        with closing(engine):

            def begin() -> set[int]:
                locked.enter_context(RunLock(folder))
                locked.enter_context(prepared_output(folder, options, inputs, resuming=resuming))
                return {part for part in range(len(blocks)) if part_file(folder, part).is_file()}

            ranks.barrier()  # a rank that fails before this leaves the folder as it was
            there = ranks.on_main(begin)
            own = range(ranks.rank, len(blocks), ranks.size)
            progress = Progress(f"rft {stage}", len(own), hidden=not ranks.is_main)
            with progress, torch.no_grad():
                for n_done, part in enumerate(own, 1):
                    if part not in there:
                        content = _sample_block(options, part, blocks[part], engine, tokenizer, rewards)
                        write_part(folder, part, content)
                    content = read_part(folder, part)
                    for row in content["rows"]:
                        counts.add(row)
                    for name in seconds:
                        seconds[name] += content[name]
                    progress.advance(n_done, _shown(counts, seconds["generate_time_s"]))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        found = ranks.gather((counts, seconds, peak or 0))
        yield Sampled(
            folder,
            len(blocks),
            asdict(report),
            sum((counts for counts, _, _ in found), CompletionCounts()),
            len(there),
            None if peak is None else max(peaks for _, _, peaks in found),
            {name: sum(seconds[name] for _, seconds, _ in found) for name in seconds},
            ranks,
        )


def _sample_block(
    options: SamplingOptions,
    block_number: int,
    block: Sequence[PromptExample],
    engine: Engine,
    tokenizer: Any,
    rewards: Rewards,
) -> dict[str, Any]:
    """The content of a part: rows as in `Sampled.rows`, and the seconds that they took."""
    n = options.n_generations
    sampling = Sampling(options.max_completion_length, options.temperature, options.top_p, options.top_k)
    seed_everything(options.seed, block_number)
    began = time.perf_counter()
    ids = engine.generate([example.ids for example in block], n, sampling).ids
    generated = time.perf_counter()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    repeated = [example for example in block for _ in range(n)]
    totals = rewards.score_examples(repeated, texts, ids).total.tolist()
    scores = [None if math.isnan(total) else total for total in totals]
    answered = rewards.answered(texts)
    verified = time.perf_counter()
    rows = []
    for i, example in enumerate(block):
        of_prompt = slice(i * n, (i + 1) * n)
        rows.append(
            {
                "index": block_number * options.prompts_per_batch + i,
                "prompt": example.prompt,
                "answer": example.columns.get("answer", example.columns.get("solution")),
                "completions": texts[of_prompt],
                "rewards": scores[of_prompt],
                "right": [score is not None and score >= options.reward_threshold for score in scores[of_prompt]],
                "answered": answered[of_prompt],
                "finished": [completion[-1] in engine.eos_ids for completion in ids[of_prompt]],
                "n_tokens": [len(completion) for completion in ids[of_prompt]],
            }
        )
    return {"rows": rows, "generate_time_s": generated - began, "verify_time_s": verified - generated}


def _shown(counts: CompletionCounts, seconds: float) -> dict[str, str]:
    return {
        "accuracy": f"{counts.n_right / max(counts.n_judged, 1):.3f}",
        "answer_rate": f"{counts.n_answered / counts.n_completions:.3f}",
        "tokens_per_s": f"{counts.n_tokens / seconds:.0f}",
    }


def _prompts_digest(prompts: Sequence[PromptExample]) -> str:
    hasher = xxhash.xxh3_128()
    for example in prompts:
        hasher.update(json.dumps([example.ids, example.columns], sort_keys=True, default=str).encode())
    return hasher.hexdigest()


def _weights_digest(model: nn.Module) -> str:
    tensors = model.state_dict()
    digests = StateDigest.start(list(tensors.values())).result()
    return xxhash.xxh3_128_hexdigest(json.dumps(list(zip(tensors, digests, strict=True))).encode())
