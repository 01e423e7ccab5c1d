"""`sparse-opt train rft show_optimizations`: what each profile sets and costs, from the profiles' files themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparse_opt.config import option

from ..memory import bytes_per_weight
from ..profiles import NAMES, Part, profile_file, profile_settings
from .datagen import DatagenConfig
from .train import RFTConfig

_PARTS: dict[Part, str] = {"train": "rft train", "sampling": "rft datagen, rft test"}


@dataclass(kw_only=True)
class ShowConfig:
    """Print what each profile sets and costs: the comments of its files, and the memory per weight."""

    profile: str | None = option(None, "one profile: a name, a folder or a .yaml file; none shows conservative, "
                                 "balanced and aggressive")  # fmt: skip


def show_optimizations(config: ShowConfig) -> dict[str, Any]:
    """The settings of the profiles, their bytes per weight, and a text with their comments.

    Raises:
        ConfigError: there is no such profile, or its file is not valid.
    """
    names = NAMES if config.profile is None else (config.profile,)
    profiles = {name: _profile(name) for name in names}
    lines: list[str] = []
    for name, found in profiles.items():
        sizes = f"{found['train_bytes_per_weight']:g} bytes per weight in training"
        lines += [f"{name}: {sizes}, {found['sampling_bytes_per_weight']:g} in sampling", ""]
        for part, stages in _PARTS.items():
            lines += [f"  {stages} ({found['files'][part]})", ""]
            lines += [f"    {line}".rstrip() for line in found["text"][part].splitlines()] + [""]
    lines.append("Set by --profile NAME for options that are not given; --config FILE reads the same files.")
    return {"profiles": profiles, "text": "\n".join(lines)}


def _profile(name: str) -> dict[str, Any]:
    files = {part: profile_file(name, part) for part in _PARTS}
    settings = {part: {key: value for key, value, _ in profile_settings(name, part)} for part in _PARTS}
    train, sampling = settings["train"], settings["sampling"]
    density = train.get("mask_density")
    dtype = {"fp32": 4, "bf16": 2, "fp16": 2}
    return {
        "settings": settings,
        "files": {part: str(file) for part, file in files.items()},
        "text": {part: file.read_text(encoding="utf-8") for part, file in files.items()},
        "train_bytes_per_weight": bytes_per_weight(
            train.get("dtype", RFTConfig.dtype),
            train.get("mode", "dense"),
            mask_density=density,
            master_weights=train.get("master_weights"),
            lean=train.get("lean", False),
        ),
        "sampling_bytes_per_weight": dtype[sampling.get("dtype", DatagenConfig.dtype)],
    }
