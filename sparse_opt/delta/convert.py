"""Writes the steps of a log into a new one: all of them, or some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..errors import DeltaLogError
from ..files import new_folder, one_line
from ..masks.mask_set import MaskSet
from .files import MASK_NAME
from .log import DeltaLog
from .state import FullState
from .state_log import require_logged, step_states


def convert(
    log: DeltaLog,
    directory: str | Path,
    *,
    steps: Sequence[int] | None = None,
    keyframe_every: int | None = None,
    metadata: Mapping[str, str] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Write the steps of a log into a new one whose states have the same bits, and the same digests.

    The mask is copied too. Holds two states in memory.

    Args:
        directory: missing or empty; renamed into place after everything is written.
        steps: the logged steps to keep, besides the base; None keeps all.
        keyframe_every: as in `DeltaLog.create`; None uses that of `log`.
        metadata: added to that of `log`, and preferred for keys in both.
        on_step: called with each written step.

    Raises:
        DeltaLogError: the log is damaged, a step is not logged, or the directory cannot be written.
    """
    layout, logged = log.layout, log.steps
    for step in steps or ():
        require_logged(log.directory, step, logged)
    kept = logged if steps is None else sorted({logged[0], *steps})

    def states() -> Iterator[tuple[int, FullState]]:
        for step, tensors in step_states(log, kept):
            state = FullState(layout.buffers)
            state.update(tensors)
            state.update({alias: tensors[name] for alias, name in layout.aliases.items()})
            yield step, state

    mask = MaskSet.load(log.directory / MASK_NAME) if log.mask_digest else None
    every, stored = keyframe_every or log.keyframe_every, log.metadata | dict(metadata or {})
    write_log(Path(directory), states(), every, stored, mask, on_step)


def write_log(
    target: Path,
    states: Iterator[tuple[int, Mapping[str, Tensor]]],
    keyframe_every: int | None,
    metadata: Mapping[str, str],
    mask: MaskSet | None = None,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Write (step, state), the first of them step 0, into a new log, which is renamed into place at the end.

    Raises:
        DeltaLogError: the directory cannot be written, or holds something.
    """
    try:
        with new_folder(target) as aside:
            step, base = next(states)
            with DeltaLog.create(aside, base, keyframe_every=keyframe_every, mask=mask, metadata=metadata) as written:
                if on_step is not None:
                    on_step(step)
                for step, state in states:
                    written.append(step, state)
                    if on_step is not None:
                        on_step(step)
    except OSError as error:
        raise DeltaLogError(f"{target}: cannot be written: {one_line(error)}") from error
