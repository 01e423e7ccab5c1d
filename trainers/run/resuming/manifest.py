"""The manifest of a checkpoint, `manifest.json`: sizes and digests of its files, to detect damage before loading.

    {
     "format": "sparse-opt checkpoint",
     "format_version": 1,
     "files": {"config.json": {"size": 652, "xxh3_128": "..."}, "model.safetensors": {...}, ...},
     "xxh3_128": "..."        digest of the other keys, as compact JSON with sorted keys
    }

`files` lists every other file by its path relative to the folder. The manifest is written last. Hidden files are not
part of a checkpoint: they are never read, and file systems and desktops create some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from sparse_opt.errors import DataError
from sparse_opt.files import fsync, one_line, written_aside
from sparse_opt.tensors import compact_json

MANIFEST_FILE = "manifest.json"

_FORMAT = "sparse-opt checkpoint"
_VERSION = 1
DIGEST_KEY = "xxh3_128"
# Bytes per read. Larger reads are no faster: 16 GB/s from the page cache, on one core of a virtual machine.
_CHUNK = 1 << 22


class NoManifestError(DataError):
    """A checkpoint has no manifest, so its files cannot be verified."""


def write_manifest(folder: Path) -> None:
    """Flush the files of a complete checkpoint folder to disk, then write its manifest. Raises OSError."""
    files = _files(folder)
    for path in files.values():
        fsync(path)
    content: dict[str, Any] = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "files": {name: {"size": path.stat().st_size, DIGEST_KEY: file_digest(path)} for name, path in files.items()},
    }
    content[DIGEST_KEY] = content_digest(content)
    with written_aside(folder / MANIFEST_FILE) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def require_intact(folder: Path) -> None:
    """Compare a checkpoint's files with its manifest; reads all of them.

    Raises:
        NoManifestError: there is no manifest.
        DataError: the manifest is damaged; or a file is missing, is not in the manifest, or has another size or digest.
            The message names the file.
    """
    expected = _read_manifest(folder)
    found = _files(folder)
    for name in expected:
        if name not in found:
            raise DataError(f"checkpoint {folder}: damaged: {name} is missing")
    for name in found:
        # transformers selects files by name, so an additional file can change what is loaded.
        if name not in expected:
            raise DataError(f"checkpoint {folder}: {name} is not in its {MANIFEST_FILE}; remove the file")
    try:
        for name, path in found.items():
            size = path.stat().st_size
            if size != expected[name]["size"]:
                raise DataError(
                    f"checkpoint {folder}: damaged: {name} has {size} bytes, expected {expected[name]['size']}"
                )
        for name, path in found.items():
            digest = file_digest(path)
            if digest != expected[name][DIGEST_KEY]:
                raise DataError(
                    f"checkpoint {folder}: damaged: {name} has digest {digest}, expected {expected[name][DIGEST_KEY]}"
                )
    except OSError as error:
        raise DataError(f"checkpoint {folder}: cannot be read: {one_line(error)}") from error


def file_digest(path: Path) -> str:
    """xxh3_128 of a file's bytes, as 32 hex digits. Raises OSError."""
    hasher = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while n_read := file.readinto(buffer):
            hasher.update(view[:n_read])
    return hasher.hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    """Path relative to the folder -> path, of every file that is not hidden, the manifest excepted."""
    paths = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    return {
        relative.as_posix(): path
        for relative, path in paths.items()
        if relative != Path(MANIFEST_FILE) and not any(part.startswith(".") for part in relative.parts)
    }


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> its size and digest."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        raise NoManifestError(
            f"checkpoint {folder}: has no {MANIFEST_FILE}: it was not completely written, or an older version wrote it"
        )
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"checkpoint {folder}: damaged: {MANIFEST_FILE} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict) or content.get(DIGEST_KEY) != content_digest(content):
        raise DataError(f"checkpoint {folder}: damaged: {MANIFEST_FILE} does not have its own digest")
    if (content.get("format"), content.get("format_version")) != (_FORMAT, _VERSION):
        raise DataError(
            f"checkpoint {folder}: {MANIFEST_FILE} is {content.get('format')!r} version "
            f"{content.get('format_version')!r}, expected {_FORMAT!r} version {_VERSION}"
        )
    files = content.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and entry.keys() == {"size", DIGEST_KEY} for entry in files.values()
    ):
        raise DataError(f"checkpoint {folder}: 'files' in {MANIFEST_FILE} is not file -> size and {DIGEST_KEY}")
    return files


def content_digest(content: dict[str, Any]) -> str:
    """xxh3_128 of the other keys of a JSON object than DIGEST_KEY, as 32 hex digits."""
    others = {key: value for key, value in content.items() if key != DIGEST_KEY}
    return xxhash.xxh3_128_hexdigest(compact_json(others).encode("ascii"))
