"""Maintenance of a delta log: verifies every step, and removes the last ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import DeltaLogError
from ..files import fsync
from .chain import LogFiles, parent_of, read_base, require_member, require_parent
from .files import KEYFRAME, StepFile, StepHeader, list_steps, read_keyframe
from .lock import WriterLock


@dataclass
class Problem:
    """Name of the damaged file, description of the damage, and the steps that cannot be rebuilt because of it."""

    file: str
    message: str
    lost_steps: tuple[int, ...] = ()

    def __str__(self) -> str:
        lost = ", ".join(map(str, self.lost_steps))
        return f"{self.message} (lost steps: {lost})" if lost else self.message


def verify(directory: Path, on_step: Callable[[int], None] | None = None) -> list[Problem]:
    """Return every problem of a log, in the order of its steps; see `DeltaLog.verify`."""
    listed, strays = list_steps(directory)
    problems = [
        Problem(path.name, f"{path}: is not a step file by its name, or a second file of its step") for path in strays
    ]
    files = LogFiles(directory)
    try:
        base = read_base(files, listed)
    except DeltaLogError as error:
        # The base identifies the log, so nothing can be checked without it.
        first = listed[min(listed)].path.name if listed else str(directory)
        problems.append(Problem(first, str(error), tuple(listed)))
    else:
        problems += _Walk(files, base, listed).problems(on_step)
    return problems


class _Walk:
    def __init__(self, files: LogFiles, base: StepHeader, listed: Mapping[int, StepFile]) -> None:
        self.files, self.base, self.listed = files, base, listed
        self.at: StepHeader | None = None
        self.state: dict[str, Tensor] = {}
        self.cause: dict[int, Problem] = {}

    def problems(self, on_step: Callable[[int], None] | None) -> list[Problem]:
        found: list[Problem] = []
        for step, file in self.listed.items():
            try:
                header = self.files.header(file)
                require_member(self.base, header)
                missing = self._missing(header)
                if missing is not None:
                    found.append(missing)
                if header.file.kind != KEYFRAME and parent_of(header) in self.cause:
                    self._lose(step, self.cause[parent_of(header)])
                else:
                    self._rebuild(header)
            except DeltaLogError as error:
                found.append(Problem(file.path.name, str(error)))
                self._lose(step, found[-1])
            if on_step is not None:
                on_step(step)
        return found

    def _missing(self, header: StepHeader) -> Problem | None:
        """Return a problem if the header refers to a step without a file that was not reported before."""
        for step in (header.parent_step, header.previous_step):
            if step is not None and step not in self.listed and step not in self.cause:
                problem = Problem(f"step {step}", f"{header.file.where}: follows step {step}, whose file is missing")
                self._lose(step, problem)
                return problem
        return None

    def _lose(self, step: int, problem: Problem) -> None:
        self.cause[step] = problem
        problem.lost_steps += (step,)

    def _rebuild(self, header: StepHeader) -> None:
        parent = self.at if self.at is not None and self.at.file.step == header.parent_step else None
        self.at = None
        if parent is not None:
            require_parent(header, parent)
        if header.file.kind == KEYFRAME:
            self.state = dict(read_keyframe(header))
        elif parent is not None:
            self.files.advance_(self.state, [header])
        else:
            self.state = self.files.rebuild(self.files.chain(header.file.step))
        self.at = header


def truncate(files: LogFiles, after: int, lock: WriterLock) -> None:
    """Remove the steps after `after`. See `DeltaLog.truncate`."""
    listed = files.steps()
    if after < min(listed):
        raise DeltaLogError(f"{files.directory}: truncating after step {after}: the log begins with step {min(listed)}")
    # The last one first, so that after a crash the remaining steps can still be rebuilt.
    for step in sorted((step for step in listed if step > after), reverse=True):
        lock.require_held(listed[step].where)
        try:
            listed[step].path.unlink()
            fsync(files.directory)
        except OSError as error:
            raise DeltaLogError(f"{listed[step].where}: cannot be removed: {error}") from error
