"""The output folder of the RFT stages that sample: options, digests of the inputs, and one file per finished block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparse_opt.errors import ConfigError, DataError
from sparse_opt.files import one_line, written_aside

from ..run.outputs import OPTIONS_FILE, begin_outputs, check_new_folder, write_text, writing
from ..run.resuming.manifest import DIGEST_KEY, content_digest
from ..run.resuming.resume import require_same_options

INPUTS_FILE = "inputs.json"
PARTS_FOLDER = "parts"
# Options that may differ when a run is resumed.
MAY_DIFFER = {"resume", "mount_dir", "output_dir", "parallel", "fsdp", "ddp_timeout", "vllm_server_base_url"}
MAY_DIFFER |= {"report_to", "project_name", "run_name"}


@contextmanager
def prepared_output(folder: Path, options: Any, inputs: dict[str, str], *, resuming: bool) -> Iterator[None]:
    """Write options and input digests to a locked folder, or check them against those of the run to resume.

    A new run that fails before its first part leaves no files.
    """
    file = folder / INPUTS_FILE
    if resuming:
        require_same_options(folder, options, MAY_DIFFER)
        # The file is missing if the run was killed right after its start; then it has no part either.
        found = _read_json(file) if file.exists() or _has_parts(folder) else inputs
        for name, digest in inputs.items():
            if found.get(name) != digest:
                raise ConfigError(
                    f"option 'resume': the {name} have digest {digest}; expected {found.get(name)}, as in the run in "
                    f"{folder}"
                )
    else:
        check_new_folder(folder, "output_dir")
        begin_outputs(folder, options)
    try:
        (folder / PARTS_FOLDER).mkdir(exist_ok=True)
        if not file.exists():
            write_report(file, inputs)
        yield
    finally:
        if not resuming and not _has_parts(folder):
            for path in (folder / OPTIONS_FILE, file):
                path.unlink(missing_ok=True)
            if (folder / PARTS_FOLDER).is_dir():
                (folder / PARTS_FOLDER).rmdir()


def _has_parts(folder: Path) -> bool:
    parts = folder / PARTS_FOLDER
    return parts.is_dir() and any(parts.iterdir())


def part_file(folder: Path, part: int) -> Path:
    """The path of a part."""
    return folder / PARTS_FOLDER / f"{part:06d}.json"


def write_part(folder: Path, part: int, content: dict[str, Any]) -> None:
    """Write one block's rows and seconds with their digest."""
    digest = {DIGEST_KEY: content_digest(content)}
    write_text(part_file(folder, part), json.dumps({**content, **digest}, allow_nan=False))


def read_part(folder: Path, part: int) -> dict[str, Any]:
    """Read what `write_part` wrote. Raises DataError if the file is damaged."""
    file = part_file(folder, part)
    content = _read_json(file, "; remove it to sample it again")
    found, expected = content_digest(content), content.get(DIGEST_KEY)
    if found != expected:
        raise DataError(f"{file}: damaged: it has digest {found}, expected {expected}; remove it to sample it again")
    return content


def _read_json(file: Path, hint: str = "") -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {one_line(error)}{hint}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: cannot be read: holds a {type(content).__name__}, expected an object{hint}")
    return content


def write_lines(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    """Write rows as JSON lines, atomically."""
    with writing(path), written_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as indented JSON, atomically."""
    write_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")
