"""`VerifiedCheckpointCallback`: a manifest in each checkpoint of a transformers Trainer, by which damage is detected.

The manifest, `sparse_opt_manifest.json`, is written last:

    {
     "format": "sparse-opt Trainer checkpoint",
     "format_version": 1,
     "run": "5f0c...",        the run that saved the checkpoint
     "files": {"config.json": {"size": 652, "xxh3_128": "..."}, ...},
     "xxh3_128": "..."        digest of the other keys, as compact JSON with sorted keys
    }
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from transformers import TrainerCallback

from ..errors import DataError
from ..files import fsync, one_line, written_aside
from ..tensors import compact_json
from .callback import on_process_0

MANIFEST = "sparse_opt_manifest.json"
_HEAD = {"format": "sparse-opt Trainer checkpoint", "format_version": 1}
_DIGEST = "xxh3_128"
# A Trainer loads these in place of a model in several files. Other files may be added to a checkpoint.
_LOADED_FIRST = ("model.safetensors", "pytorch_model.bin")


class CheckpointError(DataError):
    """No run can resume from a checkpoint; the message names the last intact one of a run next to it."""

    def __init__(self, problem: str, folder: Path, run: str = "") -> None:
        self._problem, self._folder, self._intact = problem, folder, _last_intact(folder, run)
        super().__init__(self.text("resume_from_checkpoint='{}'"))

    def text(self, remedy: str) -> str:
        """The message with this remedy, in which `{}` is the last intact checkpoint."""
        if self._intact is None:
            none = f"no other checkpoint in {self._folder.parent} is intact"
            return f"{self._problem}; {none}: start again, in another folder"
        return f"{self._problem}; the last intact one is {self._intact.name}: {remedy.format(self._intact)}"


class VerifiedCheckpointCallback(TrainerCallback):
    """Completes each checkpoint of any transformers or TRL trainer by a manifest; `sparse_trainer` adds it itself.

        trainer.add_callback(VerifiedCheckpointCallback())
        VerifiedCheckpointCallback.require_intact(checkpoint)
        trainer.train(resume_from_checkpoint=checkpoint)

    Checkpoints of a hyperparameter search get no manifest. The Trainer removes old checkpoints before it calls this, so
    a run that is killed in between has no intact one with `save_total_limit=1`.
    """

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_hyper_param_search:
            complete(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    @staticmethod
    def require_intact(folder: str | Path, run: str = "") -> str:
        """Compare a checkpoint's files with its manifest; return the run that saved it. Reads all of the files.

        Args:
            run: name only checkpoints of this run as intact ones.

        Raises:
            CheckpointError: the checkpoint is damaged or incomplete; names it, and the last intact one next to it.
        """
        folder = Path(folder)
        try:
            return _verified(folder)
        except DataError as error:
            raise CheckpointError(str(error), folder, run) from error


def complete(folder: Path, run: str = "") -> None:
    """Write the manifest of a checkpoint when all processes have saved their files; all of them must call this."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    on_process_0(lambda: write_manifest(folder, run), DataError)


def _last_intact(damaged: Path, run: str) -> Path | None:
    """The last intact checkpoint of a run next to another checkpoint."""
    matches = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in damaged.parent.glob("checkpoint-*")}
    others = {path: int(match[1]) for path, match in matches.items() if match and path.name != damaged.name}
    for path in sorted(others, key=others.__getitem__, reverse=True):
        try:
            found = _verified(path)
        except DataError:
            continue
        if run in (found, ""):
            return path
    return None


def write_manifest(folder: Path, run: str = "") -> None:
    """Flush the files of a complete checkpoint to disk, then write its manifest.

    Raises:
        DataError: a file cannot be read, or the manifest cannot be written.
    """
    try:
        files = _files(folder)
        for path in files.values():
            fsync(path)
        content = {**_HEAD, "run": run, "files": {name: _entry(path) for name, path in files.items()}}
        with written_aside(folder / MANIFEST) as aside:
            aside.write_text(json.dumps({**content, _DIGEST: _digest(content)}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"checkpoint {folder}: cannot write {MANIFEST}: {one_line(error)}") from error


def _verified(folder: Path) -> str:
    """The run in the manifest of an intact checkpoint."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise DataError(f"checkpoint {folder}: has no {MANIFEST}, so it was not completely written")
    try:
        try:
            content = json.loads(manifest.read_bytes())
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or content.pop(_DIGEST, None) != _digest(content):
            raise DataError(f"checkpoint {folder}: damaged: {MANIFEST} does not have its own digest")
        if {key: content.get(key) for key in _HEAD} != _HEAD:
            raise DataError(f"checkpoint {folder}: {MANIFEST} is not of {_HEAD['format']} version 1")
        expected, found = content["files"], _files(folder)
        for name in expected:
            if name not in found:
                raise DataError(f"checkpoint {folder}: damaged: {name} is missing")
            if (entry := _entry(found[name])) != expected[name]:
                was, should = (f"{e['size']} bytes of digest {e[_DIGEST]}" for e in (entry, expected[name]))
                raise DataError(f"checkpoint {folder}: damaged: {name} has {was}, expected {should}")
    except OSError as error:
        raise DataError(f"checkpoint {folder}: damaged: cannot be read: {one_line(error)}") from error
    if added := [name for name in _LOADED_FIRST if name in found and name not in expected]:
        raise DataError(f"checkpoint {folder}: {added[0]} is not in its {MANIFEST}: remove the file")
    return str(content["run"])


def _entry(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"size": path.stat().st_size, _DIGEST: digest.hexdigest()}


def _digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(compact_json(content).encode("ascii"))


def _files(folder: Path) -> dict[str, Path]:
    """Path relative to the folder -> path; of hidden files, which file systems create, only those of torch."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {n: p for n, p in paths.items() if n != MANIFEST and (p.name == ".metadata" or not p.name.startswith("."))}
