"""A tiny model's tokenizer, rows for each trainer, and `Lab`, which makes dense and sparse trainers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from sparse_opt import MaskSet
from sparse_opt.integrations import sparse_trainer

WORDS = ["<pad>", "<eos>", "plus", "is", "not", *map(str, range(40))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def rows_of(kind: str, n: int = 9) -> Dataset:
    sums = [(3 * i % 17, 5 * i % 13) for i in range(n)]
    if kind == "Trainer":
        ids = [[5 + a, 2, 5 + b, 3, 5 + a + b, 1] for a, b in sums]
        return Dataset.from_list([{"input_ids": x, "labels": x} for x in ids])
    prompts = [{"prompt": f"{a} plus {b} is"} for a, b in sums]
    if kind == "SFT":
        return Dataset.from_list([{**p, "completion": f" {a + b}"} for p, (a, b) in zip(prompts, sums, strict=True)])
    if kind == "DPO":
        return Dataset.from_list(
            [
                {**p, "chosen": f" {a + b}", "rejected": f" not {a + b + 3}"}
                for p, (a, b) in zip(prompts, sums, strict=True)
            ]
        )
    return Dataset.from_list(prompts)


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that any model can increase: the share of even tokens."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


@dataclass
class Lab:
    """`lab("DPO", mask=m, max_steps=3)` makes a trainer of that kind: sparse with a mask, else the original one."""

    folder: Path
    tokenizer: Any
    root: Path
    device: torch.device
    runs: int = 0

    CLASSES: ClassVar = {
        "Trainer": (Trainer, TrainingArguments),
        "SFT": (SFTTrainer, SFTConfig),
        "DPO": (DPOTrainer, DPOConfig),
        "GRPO": (GRPOTrainer, GRPOConfig),
    }

    def model(self, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(self.folder, dtype=dtype, **config).to(self.device)

    def random_mask(self, density: float = 0.1, without: tuple[str, ...] = ()) -> MaskSet:
        """A random mask; parameters whose names contain one of `without` have no active element."""
        mask = MaskSet.random(self.model(), density=density, seed=7)
        names = [name for name in mask.names if not any(part in name for part in without)]
        return MaskSet({n: mask.indices[n] for n in names}, {n: mask.shapes[n] for n in names})

    def rows(self, kind: str) -> Dataset:
        return rows_of(kind)

    def args(self, kind: str, **changes: Any) -> Any:
        self.runs += 1
        options = {
            "output_dir": str(self.root / f"run{self.runs}"),
            "max_steps": 30,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,  # 9 rows: the last step of an epoch has one batch only
            "learning_rate": 3e-3,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "warmup_steps": 5,
            "lr_scheduler_type": "cosine",
            "optim": "adamw_torch",
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": False,
            "use_cpu": self.device.type == "cpu",
            "report_to": [],
            "disable_tqdm": True,
            "seed": 3,
        }
        if kind == "GRPO":
            options |= {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 4}
        args = self.CLASSES[kind][1](**{**options, **changes})
        args._n_gpu = min(args.n_gpu, 1)  # with several GPUs the Trainer would use DataParallel
        return args

    def __call__(
        self,
        kind: str,
        *,
        mask: Any = None,
        sparse: Any = None,
        model: Any = None,
        given: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Any:
        """`given` is passed to the trainer's constructor, `changes` to its training arguments."""
        options = {
            "model": self.model() if model is None else model,
            "args": self.args(kind, **changes),
            "train_dataset": self.rows(kind),
            "processing_class": self.tokenizer,
        }
        if kind == "GRPO":
            options["reward_funcs"] = even_share
        trainer_class = self.CLASSES[kind][0]
        if mask is not None:
            trainer_class, options = sparse_trainer(trainer_class), {**options, "mask": mask, "sparse": sparse}
        trainer = trainer_class(**{**options, **(given or {})})
        trainer.remove_callback(PrinterCallback)
        return trainer
