"""The training stage of rejection-sampling fine-tuning (RFT, https://arxiv.org/abs/2308.01825), the second of three:

    sparse-opt train rft datagen --model_name M --dataset train.jsonl --output_dir round_1      # sample, verify, keep
    sparse-opt train rft train --model_name M --dataset round_1/kept.jsonl --output_dir rft_1   # SFT on what was kept
    sparse-opt train rft test --model_name rft_1/final --dataset test.jsonl                     # accuracy, answer rate

A second round starts from the model of the first. `--profile conservative|balanced|aggressive` sets options that are
not given, see `profiles`.

This stage is `sft.train` with the paper's learning rate; the other stages are in `datagen` and `evaluate`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from sparse_opt.config import option
from sparse_opt.errors import ConfigError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.option_parser import Setting

from .. import sft
from ..options import model_slug
from ..policy.pretrained import parameter_shapes
from ..profiles import profile_settings
from ..ranks import Ranks
from .datagen import DatagenConfig, datagen
from .evaluate import TestConfig, test
from .sampling import MatmulPrecision


@dataclass(kw_only=True)
class RFTConfig(sft.SFTConfig):
    """Supervised fine-tuning on completions that were sampled and found right."""

    learning_rate: float = option(2e-5, "peak learning rate")
    learning_rate_scale: float = option(
        1.0,
        "multiplies the learning rate; for profiles, because masks and dense training need different rates",
        above=0,
    )
    mask_density: float | None = option(
        None,
        "in mode sparse without a mask file: make a random mask of this share, drawn with the seed, in masks/",
        above=0,
        at_most=1,
    )
    mask_pattern: Literal["element", "run16", "run32", "tile64", "tile128"] = option(
        "element", "pattern of the random mask"
    )
    float32_matmul_precision: MatmulPrecision = option(
        "highest", "torch.set_float32_matmul_precision: high and medium let fp32 products round their inputs on a GPU"
    )
    profile: str | None = option(
        None, "conservative, balanced, aggressive, a folder or a .yaml file: values of options that are not given"
    )

    @classmethod
    def presets(cls, given: dict[str, Any]) -> list[Setting]:
        """The values of `profile` for options that were not given.

        Its learning-rate scale applies to its mode only, and its master weights not to `lean`, which has none.
        """
        presets = profile_settings(given.get("profile"), "train")
        mode = {key: value for key, value, _ in presets}.get("mode")
        if mode is not None and given.get("mode", mode) != mode:
            presets = [preset for preset in presets if preset[0] != "learning_rate_scale"]
        if given.get("lean"):
            presets = [preset for preset in presets if preset[0] != "master_weights"]
        return presets

    def __post_init__(self) -> None:
        if self.mode == "sparse" and self.mask is None and self.mask_density is not None:
            self.mask = self._random_mask_file()
        super().__post_init__()

    def _random_mask_file(self) -> Path:
        """The path of the random mask, which may not exist yet."""
        share = re.sub(r"[^0-9a-z]+", "_", f"{100 * (self.mask_density or 0):.4g}")
        name = f"{model_slug(self.policy_name)}_random_{share}pct_{self.mask_pattern}_seed{self.seed}.safetensors"
        folder = Path("masks") if self.mount_dir is None else self.mount_dir / "masks"
        return folder / name

    @property
    def makes_mask(self) -> bool:
        """Whether the mask is a random one of `mask_density` instead of a given file."""
        return self.mode == "sparse" and self.mask_density is not None and self.mask == self._random_mask_file()


def train(config: RFTConfig) -> dict[str, Any]:
    """Fine-tune on the kept rows and return the summary; outputs and errors as in `sft.train`.

    The saved options hold the scaled learning rate and a scale of 1, so that they reproduce the run.

    Raises:
        ConfigError: as in `sft.train`; or the file of the random mask exists and holds another mask.
        DataError: as in `sft.train`.
    """
    scaled = config.learning_rate * config.learning_rate_scale
    config = replace(config, learning_rate=scaled, learning_rate_scale=1.0)
    torch.set_float32_matmul_precision(config.float32_matmul_precision)
    if config.makes_mask:
        Ranks.of(config.parallel, config.ddp_timeout).on_main(lambda: _make_mask(config))
    summary = {**sft.train(config, "rft"), "stage": "train"}
    return {**summary, "text": _text(summary)}


def _make_mask(config: RFTConfig) -> None:
    assert config.mask is not None and config.mask_density is not None
    shapes = parameter_shapes(config.policy_name)
    mask = MaskSet.random(shapes, density=config.mask_density, pattern=config.mask_pattern, seed=config.seed)
    if not config.mask.is_file():
        config.mask.parent.mkdir(parents=True, exist_ok=True)
        mask.save(config.mask)
    elif MaskSet.load(config.mask) != mask:
        raise ConfigError(
            f"option 'mask_density': {config.mask} holds another mask than the random one of {config.policy_name} at "
            f"density {config.mask_density}; remove it, or name a mask file: --mask FILE"
        )


def _text(summary: dict[str, Any]) -> str:
    last, median, data = summary["last"], summary["median"], summary["data"]
    lines = [
        f"rft train {summary['mode']}: {summary['n_steps']} steps on {data['n_examples']} examples",
        f"step       {median['step_time_s']:.3f} s (median), {last['tokens_per_s']:.0f} tokens/s",
        f"checkpoint {summary['checkpoint']}",
        f"metrics    {summary['metrics_file']}",
    ]
    return "\n".join(lines)


# Stages that run in turn -> their options classes, and the functions that run them and return summaries.
STAGES: dict[str, tuple[type, Any]] = {
    "datagen": (DatagenConfig, datagen),
    "train": (RFTConfig, train),
    "test": (TestConfig, test),
}
