"""A walk over a whole delta log that rebuilds every step and says which file costs which steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from .delta_chain import advance_, parent_of, read_base, read_chain, rebuild, require_member, require_parent
from .delta_files import KEYFRAME, StepFile, StepHeader, list_steps, read_header, read_keyframe
from .delta_state import StateLayout
from .errors import DeltaLogError


@dataclass(frozen=True)
class Problem:
    """The file at fault (its name), what is wrong, and the steps that cannot be rebuilt because of it."""

    file: str
    message: str
    lost_steps: tuple[int, ...]

    def __str__(self) -> str:
        lost = ", ".join(map(str, self.lost_steps))
        return f"{self.message} (lost steps: {lost})" if lost else self.message


@dataclass
class _Finding:
    file: str
    message: str
    lost: list[int] = field(default_factory=list)


def verify(directory: Path) -> list[Problem]:
    """Every problem of a log, in the order of its steps; see `DeltaLog.verify`."""
    files, strays = list_steps(directory)
    findings = [
        _Finding(path.name, f"{path}: is no file of this log's naming, or a second one of its step") for path in strays
    ]
    try:
        base = read_base(directory, files)
    except DeltaLogError as error:
        # Without the base nothing says what belongs to the log.
        first = files[min(files)].path.name if files else str(directory)
        findings.append(_Finding(first, str(error), list(files)))
    else:
        assert base.layout is not None  # the base is a keyframe
        findings += _Walk(base, base.layout, files).findings()
    return [Problem(f.file, f.message, tuple(f.lost)) for f in findings]


class _Walk:
    def __init__(self, base: StepHeader, layout: StateLayout, files: Mapping[int, StepFile]) -> None:
        self.base, self.layout, self.files = base, layout, files
        self.at: StepHeader | None = None
        self.state: dict[str, Tensor] = {}
        self.cause: dict[int, _Finding] = {}

    def findings(self) -> list[_Finding]:
        found: list[_Finding] = []
        for step, file in self.files.items():
            try:
                header = read_header(file)
                require_member(self.base, header)
                parent = header.parent_step
                if parent is not None and parent not in self.files:
                    found.append(self._missing(header, parent))
                if header.file.kind == KEYFRAME or parent_of(header) not in self.cause:
                    self._rebuild(header)
                else:
                    self._lose(step, self.cause[parent_of(header)])
            except DeltaLogError as error:
                found.append(_Finding(file.path.name, str(error)))
                self._lose(step, found[-1])
        return found

    def _missing(self, header: StepHeader, step: int) -> _Finding:
        finding = _Finding(f"step {step}", f"{header.file.where}: follows step {step}, whose file is missing")
        self._lose(step, finding)
        return finding

    def _lose(self, step: int, finding: _Finding) -> None:
        self.cause[step] = finding
        finding.lost.append(step)

    def _rebuild(self, header: StepHeader) -> None:
        parent = self.at if self.at is not None and self.at.file.step == header.parent_step else None
        self.at = None
        if parent is not None:
            require_parent(header, parent)
        if header.file.kind == KEYFRAME:
            self.state = dict(read_keyframe(header))
        elif parent is not None:
            advance_(self.state, self.layout, [header])
        else:
            self.state = rebuild(self.layout, read_chain(self.base, self.files, header.file.step))
        self.at = header
