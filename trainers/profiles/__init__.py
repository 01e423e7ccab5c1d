"""Profiles: named sets of option values, as YAML files that say what each setting does and what it costs.

    summary: one line
    settings:
      packing:
        value: true
        stages: [train]
        does: several examples share a row, so that no row is padding
        costs: sums over a row are taken in another order; nothing else changes
        needs: [other]        # optional: settings of this profile without which this one has no effect

Config files, flags and `key=value` words override the values of a profile. The built-in profiles are `conservative`,
`balanced` and `aggressive`, in the folder of this module; other profiles are given by path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sparse_opt.config import read_yaml
from sparse_opt.errors import ConfigError

NAMES = ("conservative", "balanced", "aggressive")
STAGES = ("datagen", "train", "test")

_FOLDER = Path(__file__).parent
_PROFILE_KEYS: dict[str, type] = {"summary": str, "settings": dict}
_SETTING_KEYS: dict[str, type] = {"value": object, "stages": list, "does": str, "costs": str, "needs": list}
_REQUIRED = ("value", "stages", "does", "costs")


@dataclass(frozen=True)
class Setting:
    """One option's value in a profile."""

    key: str
    value: Any
    stages: tuple[str, ...]  # the commands of `sparse-opt train rft` that have the option
    does: str
    costs: str
    needs: tuple[str, ...] = ()  # settings of the same profile without which this one has no effect


@dataclass(frozen=True)
class Profile:
    """A named set of settings, in the order of its file."""

    name: str
    summary: str
    settings: tuple[Setting, ...]

    def values(self, stage: str) -> dict[str, Any]:
        """Option -> value of the settings that a stage has."""
        return {setting.key: setting.value for setting in self.settings if stage in setting.stages}

    def with_needs(self, key: str) -> tuple[Setting, ...]:
        """The setting of this name and all settings that it needs, in the order of the file."""
        by_key = {setting.key: setting for setting in self.settings}
        wanted, waiting = set(), [key]
        while waiting:
            name = waiting.pop()
            if name not in wanted:
                wanted.add(name)
                waiting += by_key[name].needs
        return tuple(setting for setting in self.settings if setting.key in wanted)


def load_profile(name: str) -> Profile:
    """Load the profile of a name in NAMES, or of a YAML file.

    Raises:
        ConfigError: there is no such profile, or the file is not a valid one; the message names the file and the key.
    """
    path = _FOLDER / f"{name}.yaml" if name in NAMES else Path(name).expanduser()
    if name not in NAMES and path.suffix not in (".yaml", ".yml"):
        nearest = get_close_matches(name, NAMES, n=1)
        hint = f"; the nearest is '{nearest[0]}'" if nearest else ""
        raise ConfigError(f"option 'profile' is '{name}': wanted {', '.join(NAMES)} or a .yaml file{hint}")
    content = read_yaml(path, "profile")
    _check_keys(content, _PROFILE_KEYS, tuple(_PROFILE_KEYS), f"profile {path}")
    settings = tuple(_setting(str(key), entry, path) for key, entry in content["settings"].items())
    known = {setting.key for setting in settings}
    for setting in settings:
        if unknown := set(setting.needs) - known:
            raise ConfigError(
                f"profile {path}: {setting.key} needs {', '.join(sorted(unknown))}, which it does not set"
            )
    return Profile(name if name in NAMES else path.stem, content["summary"], settings)


def preset_values(name: str | None, stage: str) -> list[tuple[str, Any, str]]:
    """(option, value, where it comes from) of a profile's settings for a stage, as `config.parse_config` takes them.

    Empty without a name. Raises ConfigError as `load_profile` does.
    """
    if name is None:
        return []
    return [(key, value, f"profile {name}") for key, value in load_profile(name).values(stage).items()]


def _setting(key: str, entry: Any, path: Path) -> Setting:
    where = f"profile {path}: {key}"
    _check_keys(entry, _SETTING_KEYS, _REQUIRED, where)
    stages, needs = tuple(map(str, entry["stages"])), tuple(map(str, entry.get("needs", [])))
    if not stages or not set(stages) <= set(STAGES):
        raise ConfigError(f"{where}: stages are {', '.join(stages) or 'none'}; wanted some of {', '.join(STAGES)}")
    return Setting(key, entry["value"], stages, _words(entry["does"]), _words(entry["costs"]), needs)


def _check_keys(found: Any, kinds: dict[str, type], required: Sequence[str], where: str) -> None:
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: found a {type(found).__name__}; wanted the keys {', '.join(required)}")
    for key in found:
        if key not in kinds:
            nearest = get_close_matches(str(key), kinds, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{where}: unknown key '{key}'; the nearest is '{nearest}'")
    for key in required:
        if key not in found:
            raise ConfigError(f"{where}: the key '{key}' is missing")
    for key, value in found.items():
        if not isinstance(value, kinds[key]):
            raise ConfigError(f"{where}: '{key}' is a {type(value).__name__}; wanted a {kinds[key].__name__}")


def _words(text: str) -> str:
    return " ".join(text.split())
