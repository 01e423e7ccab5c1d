"""Options of the model, the data and the device, and the name of a model in file names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparse_opt.config import option, require_number_ranges
from sparse_opt.errors import ConfigError
from sparse_opt.option_parser import read_yaml

from ..ranks import Parallel

# Names of subfolders of a run, in these loops and in transformers' Trainer.
_OF_ANY_RUN = re.compile(r"final|adapter|step_\d+|checkpoint-\d+")


@dataclass(kw_only=True)
class ModelOptions:
    """The model, the data and the device, for training and for sampling."""

    policy_name: str = option(
        help="model to train or sample from: hub name or local folder", aliases=("model_name", "model_name_or_path")
    )
    checkpoint: Path | None = option(None, "local folder with other weights of the model policy_name to start from")
    dataset: str = option(
        help="hub name, or local .json, .jsonl or .parquet file",
        aliases=("dataset_name", "dataset_id_or_path"),
        hints={"train_dataset": "dataset"},
    )
    dataset_split: str = option("train", "split of a hub dataset")
    subset_size: int | None = option(None, "use this many examples, drawn with the seed", at_least=1)
    subset: str | None = option(
        None,
        "a number is subset_size; other text is dataset_split, which may be a part such as train[:90%]",
        in_place_of=lambda subset: "subset_size" if subset.isdecimal() else "dataset_split",
    )
    device: str = option("auto", "torch device; auto is cuda if available, else cpu")
    parallel: Parallel = option(
        "auto",
        "processes, which torchrun starts and which share the examples of a step: replicate, each has the model; fsdp, "
        "each has a part of every weight (FSDP2); none, a single process; auto is replicate under torchrun, else none",
        hints={"deepspeed": "parallel=fsdp, which shards weights, gradients and optimizer states as ZeRO 3 does"},
    )
    fsdp: bool | None = option(None, "true is parallel fsdp; false is any other", in_place_of="parallel")
    ddp_timeout: float | None = option(
        None,
        "seconds that a process waits for the others in a collective, before the run fails; none is torch's default",
        above=0,
    )
    dtype: Literal["bf16", "fp16", "fp32"] = option(
        "bf16",
        "dtype of the weights; fp16 trains fp32 weights under fp16 autocast with loss scaling",
        aliases=("precision", "torch_dtype"),
    )
    bf16: bool | None = option(None, "true is dtype bf16; false is fp32", in_place_of="dtype")
    fp16: bool | None = option(None, "true is dtype fp16; false is any other", in_place_of="dtype")
    seed: int = option(
        0,
        "seed of the data order and of all sampling; on a CPU the same seed gives the same results",
        hints={"data_seed": "seed, which is also that of the data order"},
    )
    mount_dir: Path | None = option(None, "folder that relative output folders, and those named by default, are in")

    def __post_init__(self) -> None:
        if self.subset is not None:
            if self.subset.isdecimal():
                self.subset_size = int(self.subset)
            else:
                self.dataset_split = self.subset
            self.subset = None
        require_number_ranges(self)
        if self.fsdp and self.parallel == "auto":
            self.parallel = "fsdp"
        if self.fsdp is not None and self.fsdp != (self.parallel == "fsdp"):
            raise ConfigError(f"option 'fsdp' is {str(self.fsdp).lower()}, and parallel is {self.parallel}: give one")
        self.fsdp = None
        self._apply_dtype_names()

    def _apply_dtype_names(self) -> None:
        """Set `dtype` from the options `bf16` and `fp16`, which override its default, bf16."""
        given = {"bf16": self.bf16, "fp16": self.fp16}
        named = [name for name, on in given.items() if on]
        if len(named) > 1:
            raise ConfigError("options 'bf16' and 'fp16' are true: give one")
        for name in named:
            if self.dtype not in ("bf16", name):
                raise ConfigError(f"option '{name}' is true, and dtype is {self.dtype}: give one")
            self.dtype = name  # type: ignore[assignment]
        if self.fp16 is False and self.dtype == "fp16":
            raise ConfigError("option 'fp16' is false, and dtype is fp16: give one")
        if self.bf16 is False and self.dtype == "bf16":
            self.dtype = "fp32"
        self.bf16 = self.fp16 = None

    def mounted(self, folder: Path) -> Path:
        """The folder, under `mount_dir` unless it is absolute."""
        return folder if self.mount_dir is None else self.mount_dir / folder


def model_slug(name: str) -> str:
    """A model's name as part of a file name: `meta_llama_llama_3_1_8b` for `meta-llama/Llama-3.1-8B`.

    A local folder is named by its last part: `model` for `runs/model`. A folder with the same name in every run
    (`final`, `adapter`, `step_00000100`, `checkpoint-500`) is named by the model that its run started from, which
    options.yaml has, and without options.yaml by the run: `sft_final` for `runs/sft/final`.
    """
    if Path(name).exists():
        path = Path(name).resolve()
        name = path.name
        if _OF_ANY_RUN.fullmatch(name):
            run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
            options = read_yaml(file, "options file") if (file := run / "options.yaml").is_file() else None
            if isinstance(options, dict) and isinstance(trained := options.get("policy_name"), str):
                return model_slug(trained)
            name = f"{run.name}_{name}"
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
