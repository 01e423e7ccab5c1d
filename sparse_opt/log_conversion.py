"""Any log of states written anew as a delta log: logs of `.pt` files, or a delta log at another level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from .atomic_files import one_line
from .delta_files import MASK_NAME, LogSettings
from .delta_log import DeltaLog
from .errors import DeltaLogError
from .log_reading import step_states
from .masks import MaskSet
from .new_folders import new_folder
from .state_log import StateLog


def convert(
    log: StateLog,
    directory: str | Path,
    *,
    level: str | None = None,
    against: Literal["previous", "base"] | None = None,
    keyframe_every: int | None = None,
    metadata: Mapping[str, str] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Write every step of a log into a new delta log whose states have the same bits, and the same digests.

    The directory appears when all of it is written, or not at all. Two states are held in memory.

    Args:
        log: read from its first step to its last.
        directory: missing or empty.
        level, against, keyframe_every: as in `DeltaLog.create`; None takes those of a delta log that is converted,
            whose mask is taken over as well, and else the usual ones.
        metadata: beside that of `log`, and before it where both have a key.
        on_step: called with each step that is written.

    Raises:
        DeltaLogError: the log is damaged, has buffers, which a state alone cannot tell from parameters, or does not
            begin with step 0; the directory cannot be written.
    """
    target = Path(directory)
    layout, steps = log.layout, log.steps
    if layout.buffers:
        raise DeltaLogError(
            f"{log.directory}: {len(layout.buffers)} of its tensors are buffers, the first of them "
            f"{min(layout.buffers)}: they would be parameters in the new log"
        )
    if steps[0] != 0:
        raise DeltaLogError(f"{log.directory}: begins with step {steps[0]}, wanted 0")
    settings, mask = LogSettings(), None
    if isinstance(log, DeltaLog):
        settings = log.settings
        mask = MaskSet.load(log.directory / MASK_NAME) if log.mask_digest else None
    states = (
        (step, state | {alias: state[name] for alias, name in layout.aliases.items()})
        for step, state in step_states(log, steps)
    )
    try:
        with new_folder(target) as aside:
            base = next(states)[1]
            with DeltaLog.create(
                aside,
                base,
                level=level or settings.level,
                against=against or ("base" if settings.against == "base" else "previous"),
                keyframe_every=settings.keyframe_every if keyframe_every is None else keyframe_every,
                mask=mask,
                metadata=dict(log.metadata) | dict(metadata or {}),
            ) as written:
                _call(on_step, 0)
                for step, state in states:
                    written.append(step, state)
                    _call(on_step, step)
    except OSError as error:
        raise DeltaLogError(f"{target}: cannot be written: {one_line(error)}") from error


def _call(on_step: Callable[[int], None] | None, step: int) -> None:
    if on_step is not None:
        on_step(step)
