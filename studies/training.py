"""What the studies share: training by `sparse-opt train`, answers and their rewards, masks, and runs in processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from sparse_opt import MaskSet
from sparse_opt.cli.main import main
from sparse_opt.errors import ConfigError
from sparse_opt.files import new_folder
from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.optim import save_merged
from sparse_opt.optim.sparse_optimizer import SparseOptimizer


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines to a file that exists only when it is complete."""
    aside = file.with_suffix(".tmp")
    file.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    aside.replace(file)


def fill_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Replace what is between `<!-- table: NAME -->` and `<!-- end -->` on a page, for the names in `tables`."""
    names = "|".join(tables)
    span = re.compile(rf"(?<=^<!-- table: )({names})( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
    text = page.read_text(encoding="utf-8")
    page.write_text(span.sub(lambda found: f"{found[1]}{found[2]}\n{tables[found[1]]}\n\n", text), encoding="utf-8")


def rounded(rate: float) -> float:
    """A learning rate with six digits, because 3e-5 * 0.3 has seventeen."""
    return float(f"{rate:.6g}")


def beyond(tried: Sequence[float], best: float) -> list[float]:
    """The next learning rate if the best one is the lowest or highest; empty if it is inside.

    The steps repeat those of the decade before: after 0.1, 0.3, 1, 3 come 10 and 30. A single rate has no steps.
    """
    if len(tried) < 2 or min(tried) < best < max(tried):
        return []
    if best >= max(tried):
        return [rounded(min(10 * rate for rate in tried if 10 * rate > 1.01 * best))]
    return [rounded(max(rate / 10 for rate in tried if 1.01 * rate / 10 < best))]


ROOT = Path(__file__).parents[1]
TUNING_SEED = 1000
EARLY = (2, 5, 10)  # percent of the steps of a dense run
WHOLE = ("dense", "sgd", "again", "subnetwork")
ADAPTERS = ("lora", "qlora", "shira", "supertuning")
SOURCES = ("random", "magnitude", "fisher", "snip", "found", *(f"early{percent}" for percent in EARLY))
NF4 = {"dtype": "bfloat16", "load_in_4bit": True, "use_bnb_nested_quant": True}  # TRL's options; NF4 is their default


class Trained(NamedTuple):
    """What a run trains; `parse` reads a word as study.yaml lists them."""

    source: str
    amount: float | None = None  # an adapter's rank, or percent of the weights
    pattern: str | None = None

    @classmethod
    def parse(cls, word: str) -> Trained:
        source, _, rest = word.partition(":")
        amount, _, pattern = rest.partition(":")
        is_mask = source in (*SOURCES, "lean", "nf4")
        if source in WHOLE and not rest:
            return cls(source)
        if (
            not re.fullmatch(r"\d+(\.\d+)?", amount)
            or (pattern or "element") not in PATTERNS
            or (not is_mask and (pattern or source not in ADAPTERS))
        ):
            raise ConfigError(f"trained {word}: expected a word such as dense, lora:8 or random:2.5:tile64")
        return cls(source, float(amount), (pattern or "element") if is_mask else None)

    def __str__(self) -> str:
        amount = "" if self.amount is None else f":{self.amount:g}"
        return self.source + amount + (f":{self.pattern}" if self.pattern not in (None, "element") else "")

    @property
    def is_mask(self) -> bool:
        return self.pattern is not None

    @property
    def has_nf4_base(self) -> bool:
        return self.source in ("nf4", "qlora")


def train(
    algorithm: str, options: Mapping[str, Any], folder: Path, *, merge_into: Path | None = None
) -> dict[str, Any]:
    """Train by `sparse-opt train ALGORITHM` in this process; the model is in `folder`, whose files are removed first.

    Args:
        merge_into: the model that adapters are merged into; None: that of the options.

    Returns:
        log, the rows that TRL logged; step_time_s (median), optimizer_bytes with gradients, and on a GPU
        peak_memory_bytes; n_trained, the values of a mask or of adapters, which are merged into the model.
    """
    from transformers import TrainerCallback

    from sparse_opt.integrations.trl.command_line import parse
    from sparse_opt.integrations.trl.train import train as train_by_trl

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.measured: dict[str, Any] = {}

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self.began)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # accelerate's wrapper
            if isinstance(optimizer, SparseOptimizer):
                of_optimizer = sum(optimizer.nbytes().values())
            else:
                tensors = [value for of in optimizer.state.values() for value in of.values() if torch.is_tensor(value)]
                tensors += [param for group in optimizer.param_groups for param in group["params"]]  # their gradients
                of_optimizer = sum(tensor.nbytes for tensor in tensors)
            self.measured = {
                "log": state.log_history,
                "step_time_s": median(self.seconds),
                "optimizer_bytes": of_optimizer,
                "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            }

    shutil.rmtree(folder, ignore_errors=True)
    recorder = Recorder()
    words = [f"--{name}={value}" for name, value in {**options, "output_dir": folder}.items()]
    train_by_trl(algorithm, parse(algorithm, words), prepare=lambda trainer: trainer.add_callback(recorder))
    measured = recorder.measured
    if "mask" in options:
        measured["n_trained"] = MaskSet.load(options["mask"]).nnz
    if (adapter := folder / "adapter_model.safetensors").is_file():
        from peft import PeftModel

        measured["n_trained"] = sum(tensor.numel() for tensor in load_file(adapter).values())
        model, tokenizer = load(merge_into or options["model_name_or_path"])
        PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return measured


class Answer(NamedTuple):
    """A completion: whether it ended, and its reward is 1."""

    text: str
    ended: bool
    right: bool


def encode(tokenizer: Any, prompt: Any) -> list[int]:
    """The tokens of a prompt: a text, or messages in the tokenizer's chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])


def load(folder: Path) -> tuple[Any, Any]:
    """A model on the GPU, if there is one, and its tokenizer, which pads on the left."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], *, max_new_tokens: int, batch_size: int, n: int = 0
) -> list[list[int]]:
    """`n` completions of each prompt at temperature 1, one after the other; the most likely one if `n` is 0."""
    found: list[list[int]] = []
    chosen = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": n} if n else {}
    for first in range(0, len(prompts), size := max(1, batch_size // max(1, n))):
        batch = tokenizer.pad({"input_ids": prompts[first : first + size]}, return_tensors="pt").to(model.device)
        options = {"do_sample": False, **chosen, "pad_token_id": tokenizer.pad_token_id}
        ids = model.generate(**batch, max_new_tokens=max_new_tokens, **options)
        found += ids[:, batch["input_ids"].shape[1] :].tolist()
    return found


def answers(
    folder: Path, rows: Sequence[dict[str, Any]], reward: str, *, n: int = 0, **options: Any
) -> list[list[Answer]]:
    """The answers of a model to each row's prompt, with rewards by name as of `sparse-opt train grpo`; see `sample`."""
    from sparse_opt.integrations.trl.rewards import load_rewards

    model, tokenizer = load(folder)
    completions = sample(model, tokenizer, [encode(tokenizer, row["prompt"]) for row in rows], n=n, **options)
    repeated = [row for row in rows for _ in range(max(1, n))]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    columns = {name: [row[name] for row in repeated] for name in rows[0] if name != "prompt"}
    rewards = load_rewards([reward])[0](completions=texts, **columns)
    found = [
        Answer(text, tokenizer.eos_token_id in ids, score == 1)
        for text, ids, score in zip(texts, completions, rewards, strict=True)
    ]
    return [found[i : i + max(1, n)] for i in range(0, len(found), max(1, n))]


def options_for(trained: Trained) -> dict[str, Any]:
    """The options of `sparse-opt train` for what is trained, without a mask."""
    if trained.source in ("lora", "qlora"):
        adapters = {"use_peft": "true", "lora_r": int(trained.amount or 0), "lora_target_modules": "all-linear"}
        return adapters | (NF4 if trained.has_nf4_base else {})
    return {"optim": "sgd"} if trained.source == "sgd" else {}


def dequantise(start: Path, folder: Path) -> None:
    """Write the weights that a base in NF4 has, dequantised, to a new folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import ModelConfig, get_quantization_config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"quantization_config": get_quantization_config(ModelConfig(**NF4)), "device_map": {"": device}}
    with new_folder(folder) as aside:
        save_merged(AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16, **options), aside)
        AutoTokenizer.from_pretrained(start).save_pretrained(aside)


def make_mask(
    folder: Path,
    start: Path,
    trained: Trained,
    *,
    seed: int,
    log: tuple[Path, int] | None = None,
    dataset: tuple[Path, int] | None = None,
) -> Path:
    """The file of a mask of all weights together, which is made unless it exists; random ones differ between seeds.

    Args:
        start: folder of the initial model.
        log: for sources in a dense run: its delta log, and the step.
        dataset: for fisher and snip: rows, and how many to score the weights by.
    """
    name = str(trained).replace(":", "_") + (f"_seed{seed}" if trained.source == "random" else "")
    file, aside = folder / f"{name}.safetensors", folder / f"aside_{os.getpid()}_{name}.safetensors"
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    assert trained.amount is not None and trained.pattern is not None
    if trained.source == "random":
        pool: dict[str, Any] = {"pool": "global", "pattern": trained.pattern}
        return MaskSet.random(load(start)[0], density=trained.amount / 100, seed=seed, **pool).save(file)
    words = ["--sparsity_percent", f"{100 - trained.amount:.10g}", "--pattern", trained.pattern, "--pool", "global"]
    words += ["--min_tensor_keep", "0", "--output", str(aside)]
    if log is not None:
        words += ["--delta_log_dir", str(log[0]), "--target_step", str(log[1])]
    else:
        methods = {"magnitude": "weight_magnitude", "fisher": "fisher_gradient", "snip": "snip"}
        words += ["--method", methods[trained.source], "--model_name", str(start)]
    if dataset is not None:
        words += ["--dataset", str(dataset[0]), "--n_samples", str(dataset[1])]
    if main(["mask", "find", *words]):
        raise RuntimeError(f"sparse-opt mask find {' '.join(words)} failed")
    aside.replace(file)
    return file


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of its own, on the first GPU that is visible."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_on_gpu, next(iter(visible_gpus()), ""), function, *args).result()


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [*map(str, range(torch.cuda.device_count()))] if given is None else list(filter(None, given.split(",")))


def _on_gpu(gpu: str, function: Callable[..., Any], *args: Any) -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA starts in this process
    return function(*args)


def work(
    do: Callable[[Any], Any], jobs: Callable[[], Iterator[Hashable]], keep: Callable[[Any, Any], None], workers: int
) -> int:
    """Call `keep(job, do(job))` for all jobs, each in a process of its own; return the number that failed.

    Args:
        jobs: called after each job; yields those that are left and can begin, in their order.
        workers: processes at once, spread over the GPUs that are visible.
    """
    running: dict[Any, Any] = {}
    gpu_of: dict[Any, str] = {}
    failed: set[Any] = set()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        while True:
            for job in jobs():
                if len(running) == workers:
                    break
                if job not in failed and job not in running.values():
                    used = [gpu_of[other] for other in running.values()]
                    gpu_of[job] = min(visible_gpus(), key=used.count, default="")
                    running[pool.submit(_on_gpu, gpu_of[job], do, job)] = job
            if not running:
                return len(failed)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, error = running.pop(future), future.exception()
                if error is None:
                    keep(job, future.result())
                else:
                    failed.add(job)
                    print(f"failed: {job}: {type(error).__name__}: {error}", flush=True)
