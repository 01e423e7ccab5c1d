"""DeltaReader: reads any step of a delta log, whole or tensor by tensor, and the information in its headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import DeltaLogError
from . import maintenance
from .chain import LogFiles
from .codec import Backend
from .digest import StateDigest
from .files import LogSettings, read_header
from .maintenance import Problem
from .state import StateLayout, read_state
from .writer import StepInfo


class DeltaReader:
    """The reading methods of `DeltaLog`."""

    def __init__(self, directory: Path, backend: Backend | None) -> None:
        self.directory = directory
        self._log_files = LogFiles(directory, backend)

    def _drain(self) -> None:
        """Wait for pending writes, so that appended steps can be read."""

    @property
    def _files(self) -> LogFiles:
        self._drain()
        return self._log_files

    @property
    def steps(self) -> tuple[int, ...]:
        """The logged steps, ascending, as the directory lists them now."""
        return tuple(self._files.steps())

    @property
    def layout(self) -> StateLayout:
        """The tensors of the logged state."""
        return self._log_files.layout

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata passed to `create`."""
        return dict(self._log_files.base().log_metadata or {})

    @property
    def run_id(self) -> str:
        """32 hex digits that all files of this log share."""
        return self._log_files.base().run_id

    @property
    def settings(self) -> LogSettings:
        """Level, against and keyframe_every, as passed to `create`."""
        settings = self._log_files.base().settings
        assert settings is not None  # the base is a keyframe
        return settings

    @property
    def mask_digest(self) -> str:
        """The digest of the log's mask; empty if the log has none."""
        return self._log_files.base().mask_digest

    def digest(self, step: int) -> str:
        """Return the xxh3_128 digest of the state at a step, 32 hex digits: see `StateLayout.state_digest`."""
        return self._files.chain(step)[-1].result_digest

    def load(self, step: int) -> dict[str, Tensor]:
        """Return the state at a logged step, on the CPU, ready for `model.load_state_dict`.

        Further names of tied tensors are included and share the tensor of the first name.

        Raises:
            DeltaLogError: the step is not logged, or a file it is rebuilt from is damaged; names file and step.
        """
        state = self._files.state(step)
        return state | {alias: state[name] for alias, name in self.layout.aliases.items()}

    @torch.no_grad()
    def apply_(self, model_or_state: nn.Module | Mapping[str, Tensor], step: int) -> None:
        """Copy the state at a logged step into a model, or into the tensors of a state dict, bit for bit.

        The state is rebuilt and verified on the CPU before the model is changed. If the log has no buffers, as one that
        was converted from `.pt` files, those of the model do not change.

        Raises:
            DeltaLogError: as `load`; or names, shapes, dtypes or ties of the model are not the logged ones.
        """
        layout, tensors = read_state(model_or_state)
        self.layout.require_same(layout.within(self.layout), f"{self.directory}: step {step}")
        state = self.load(step)
        if isinstance(model_or_state, nn.Module):
            model_or_state.load_state_dict(state, strict=False)  # the names have been compared
        else:
            for name, tensor in tensors.items():
                tensor.copy_(state[name])

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, the named tensor at that step), on the CPU, for ascending logged steps.

        Holds one tensor, and reads only its records, once from each patch between the steps. A yielded tensor is
        verified by its digest, and is valid until the next one is requested.

        Raises:
            DeltaLogError: as `load`; the name is not in the log; the steps do not ascend.
        """
        if name not in self.layout.names:
            raise DeltaLogError(f"{self.directory}: no tensor {name} in the log")
        if any(a > b for a, b in pairwise(steps)):
            raise DeltaLogError(f"{self.directory}: steps {list(steps)} do not ascend")
        yield from self._files.tensor_states(name, steps)

    def step_of(self, model_or_state: nn.Module | Mapping[str, Tensor]) -> int | None:
        """Return the last logged step whose state has the model's current bits, by digest; None if there is none.

        Raises:
            DeltaLogError: the model is not the logged one, or a header is damaged.
        """
        found, tensors = read_state(model_or_state)
        layout = self.layout
        layout.require_same(found, str(self.directory))
        digest = layout.state_digest(StateDigest.start([tensors[name] for name in layout.names]).result())
        headers = (read_header(file) for file in reversed(self._files.steps().values()))
        return next((header.file.step for header in headers if header.result_digest == digest), None)

    def info(self) -> list[StepInfo]:
        """Return kind, changes and bytes of every step, from the headers alone.

        Raises:
            DeltaLogError: a header is damaged.
        """
        return [StepInfo.of(read_header(file)) for file in self._files.steps().values()]

    def verify(self, on_step: Callable[[int], None] | None = None) -> list[Problem]:
        """Rebuild every step of the log and compare every digest; return the problems found.

        Holds one state in memory, and a second one after a problem. `on_step` is called after each step.
        """
        self._drain()
        return maintenance.verify(self.directory, self._log_files.backend, on_step)
