"""Profiles of RFT: packaged config files, one for training and one for sampling (`datagen` and `test`).

`--profile balanced` reads `balanced/train.yaml` or `balanced/sampling.yaml` of this folder before all config files, so
that every other value wins. `--config` reads the same files. A profile of one's own is a folder with these two files,
or one file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sparse_opt.errors import ConfigError
from sparse_opt.option_parser import Setting, read_settings
from sparse_opt.option_values import nearest

Part = Literal["train", "sampling"]
NAMES = ("conservative", "balanced", "aggressive")


def profile_settings(profile: str | None, part: Part) -> list[Setting]:
    """Return one part of a profile, given by its name in NAMES or by path; no settings if `profile` is None.

    Raises:
        ConfigError: there is no such profile, or its file is not valid; the message names it.
    """
    if profile is None:
        return []
    path = profile_file(profile, part)
    settings = read_settings(path, "profile")
    if not settings:
        raise ConfigError(f"profile {path} is empty; expected 'key: value' lines")
    return settings


def profile_file(profile: str, part: Part) -> Path:
    """The config file of one part of a profile, given by its name in NAMES or by path; it may not exist.

    Raises:
        ConfigError: `profile` is neither a name, a folder nor a .yaml file.
    """
    path = Path(__file__).parent / profile if profile in NAMES else Path(profile).expanduser()
    if path.is_dir():
        path /= f"{part}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"option 'profile' is '{profile}', neither a folder nor a .yaml file{nearest(profile, NAMES)}"
        )
    return path
