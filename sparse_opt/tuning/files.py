"""Tables that `sparse-opt bench kernels --tune` measured: one JSON file for each GPU and versions, in the cache folder.

The folder is $XDG_CACHE_HOME/sparse-opt/tuning, by default in ~/.cache.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..errors import TuningError
from . import Tuning, builtin, why_invalid

AGAIN = "run `sparse-opt bench kernels --tune` again"


@dataclass(frozen=True)
class Key:
    """What a table was measured for."""

    device: str  # its name
    compute_capability: str
    torch: str
    triton: str  # "none" without Triton
    sparse_opt: str = __version__


@dataclass(frozen=True)
class SavedTable:
    """A table that was measured, and when: YYYY-MM-DD."""

    tuning: Tuning
    date: str
    path: Path


class Chosen(NamedTuple):
    """The table of a GPU, which one it is, and "" or why an older one is not used."""

    tuning: Tuning
    source: str
    warning: str = ""


def choose(key: Key) -> Chosen:
    """Return the table that was measured for `key`, or else the one that comes with the package.

    Raises:
        TuningError: as `load`.
    """
    if (saved := load(key)) is not None:
        return Chosen(saved.tuning, f"tuned on {saved.date} ({saved.path})")
    older = stale(key)
    warning = f"{older[-1]} was measured with other versions and is not used: {AGAIN}" if older else ""
    return Chosen(*builtin(key.device, key.compute_capability), warning)


def cache_folder() -> Path:
    """Return the folder of what this package keeps between runs, which need not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path is invalid and to be ignored: https://specifications.freedesktop.org/basedir-spec/latest/
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "sparse-opt"


def folder() -> Path:
    """Return the folder of the tables, which need not exist."""
    return cache_folder() / "tuning"


def path_of(key: Key) -> Path:
    """Return the file of the table for `key`."""
    versions = [f"torch{key.torch}", f"triton{key.triton}", f"sparse_opt{key.sparse_opt}"]
    return folder() / f"{_of_gpu(key)}_{'_'.join(map(_word, versions))}.json"


def _of_gpu(key: Key) -> str:
    return f"{_word(key.device)}_sm{key.compute_capability}"


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text)


def load(key: Key) -> SavedTable | None:
    """Return the table for `key`, or None if none was measured.

    Raises:
        TuningError: the file cannot be read, is no such table, or is that of another key.
    """
    path = path_of(key)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TuningError(_broken(path, str(error).partition("\n")[0])) from error
    expected = {"key": dict, "tuning": dict, "date": str}
    if not isinstance(content, dict) or any(not isinstance(content.get(k), kind) for k, kind in expected.items()):
        raise TuningError(_broken(path, "it has no key, tuning and date"))
    for name, value in asdict(key).items():
        if content["key"].get(name) != value:
            raise TuningError(_broken(path, f"it is for {name} {content['key'].get(name)!r}, expected {value!r}"))
    if why := why_invalid(content["tuning"]):
        raise TuningError(_broken(path, why))
    return SavedTable(Tuning(**content["tuning"]), content["date"], path)


def _broken(path: Path, why: str) -> str:
    return f"the kernel tuning of this GPU, {path}, cannot be used: {why}; delete the file, or {AGAIN}"


def stale(key: Key) -> list[Path]:
    """Return the tables for this GPU that were measured with other versions."""
    return sorted(path for path in folder().glob("*.json") if path.name.startswith(f"{_of_gpu(key)}_torch"))


def why_unwritable() -> str:
    """Create the folder. Return "" if files can be written there, otherwise the cause in one line."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return "" if os.access(folder(), os.W_OK | os.X_OK) else f"{folder()} is not writable"


def save(key: Key, tuning: Tuning, measurements: Sequence[Mapping[str, Any]]) -> Path:
    """Write the table for `key`, in place of an earlier one, with the times that it follows from. Return its file.

    Raises:
        TuningError: the file cannot be written; an earlier one has not changed.
    """
    from ..files import written_aside  # imports safetensors, which the kernels do not need

    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    content = {"key": asdict(key), "date": date, "tuning": asdict(tuning), "measurements": list(measurements)}
    path = path_of(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise TuningError(f"the kernel tuning was not saved in {path}: {error}") from error
    return path
