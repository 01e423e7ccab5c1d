"""`RowFile`: a JSONL file with a row per step in a run's folder, which a resumed run continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...files import write_text


class RowFile:
    """Rows with a key `step`. Begin with `cut`, then `write`, on process 0."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cut(self, last_step: int) -> None:
        """Keep the rows up to `last_step`, those of the checkpoint that a run resumes from; 0 removes the file."""
        if last_step == 0 or not self.path.exists():
            self.path.unlink(missing_ok=True)
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if json.loads(line)["step"] <= last_step]
        write_text(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
