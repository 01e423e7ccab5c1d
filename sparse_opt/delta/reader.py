"""Reading a delta log: any logged step, whole or tensor by tensor, and what its headers say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import DeltaLogError
from . import maintenance as delta_verify
from .chain import LogFiles
from .codec import Backend
from .digest import StateDigest
from .files import LogSettings, StepFile, StepHeader, read_header, read_keyframe
from .maintenance import Problem
from .state import StateLayout, read_state
from .writer import StepInfo


class StateDelta:
    """W0 and the state of one step side by side; iterate it as often as needed.

    Each round yields (name, tensor of the base state, tensor of the step), on the CPU, in the model's order. The state
    of the step is held in memory; the base state is read from its file tensor by tensor.
    """

    def __init__(self, base: StepHeader, state: Mapping[str, Tensor], names: Collection[str]) -> None:
        self._base, self._state, self._names = base, state, names

    def __iter__(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, tensor in read_keyframe(self._base, self._names):
            yield name, tensor, self._state[name]


class DeltaReader:
    """What a delta log can be asked; see `DeltaLog`."""

    def __init__(self, directory: Path, backend: Backend | None) -> None:
        self.directory = directory
        self._log_files = LogFiles(directory, backend)

    def _drain(self) -> None:
        """Wait for writes under way, so that what was appended is read."""

    @property
    def _files(self) -> LogFiles:
        self._drain()
        return self._log_files

    def _listed(self) -> dict[int, StepFile]:
        return self._files.steps()

    @property
    def steps(self) -> tuple[int, ...]:
        """The logged steps, ascending, as the directory lists them now."""
        return tuple(self._listed())

    @property
    def layout(self) -> StateLayout:
        """The tensors of the logged state."""
        return self._log_files.layout

    @property
    def metadata(self) -> dict[str, str]:
        """What `create` was given."""
        return dict(self._log_files.base().log_metadata or {})

    @property
    def run_id(self) -> str:
        """32 hex digits that all files of this log share."""
        return self._log_files.base().run_id

    @property
    def settings(self) -> LogSettings:
        """Level, against and keyframe_every, as `create` was given them."""
        settings = self._log_files.base().settings
        assert settings is not None  # the base is a keyframe
        return settings

    @property
    def mask_digest(self) -> str:
        """The digest of the log's mask; empty of a log without one."""
        return self._log_files.base().mask_digest

    def digest(self, step: int) -> str:
        """The xxh3_128 digest of the state at a step, as 32 hex digits: see `StateLayout.state_digest`."""
        return self._files.chain(step)[-1].result_digest

    def load(self, step: int) -> dict[str, Tensor]:
        """The state at a logged step, on the CPU, ready for `model.load_state_dict`.

        Further names of tied tensors are there too and share the tensor of the first name.

        Raises:
            DeltaLogError: the step is not logged, or a file it is rebuilt from is damaged; names file and step.
        """
        state = self._files.state(step)
        return state | {alias: state[name] for alias, name in self.layout.aliases.items()}

    @torch.no_grad()
    def apply_(self, model_or_state: nn.Module | Mapping[str, Tensor], step: int) -> None:
        """Put the state at a logged step into a model, or into the tensors of a state dict, bit for bit.

        The state is rebuilt and verified on the CPU before the model is touched.

        Raises:
            DeltaLogError: as `load`; or names, shapes, dtypes or ties of the model are not the logged ones.
        """
        layout, tensors = read_state(model_or_state)
        self.layout.require_same(layout, f"{self.directory}: step {step}")
        state = self.load(step)
        if isinstance(model_or_state, nn.Module):
            model_or_state.load_state_dict(state)
        else:
            for name, tensor in tensors.items():
                tensor.copy_(state[name])

    def iter_delta(self, step: int, names: Sequence[str] | None = None) -> StateDelta:
        """(name, tensor of the base state, tensor at `step`) for every tensor, or for the named ones.

        Rebuilds the state of `step` once and reads the base tensor by tensor, in each round of iteration again.

        Raises:
            DeltaLogError: as `load`; a name is not in the log.
        """
        for name in names or ():
            self._require_name(name)
        chosen = set(self.layout.names if names is None else names)
        return StateDelta(self._log_files.base(), self._files.state(step), chosen)

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """(step, the named tensor at that step), on the CPU, for ascending logged steps.

        Holds one tensor and reads its records alone, of each patch between the steps once. A yielded tensor has the
        digest that the log says, and is good until the next one is asked for.

        Raises:
            DeltaLogError: as `load`; the name is not in the log; the steps do not ascend.
        """
        self._require_name(name)
        if any(a > b for a, b in pairwise(steps)):
            raise DeltaLogError(f"{self.directory}: steps {list(steps)} do not ascend")
        yield from self._files.tensor_states(name, steps)

    def step_of(self, model_or_state: nn.Module | Mapping[str, Tensor]) -> int | None:
        """The last logged step whose state has the same bits as the model's now, by digest; None if there is none.

        Raises:
            DeltaLogError: the model is not the logged one, or a header is damaged.
        """
        found, tensors = read_state(model_or_state)
        layout = self.layout
        layout.require_same(found, str(self.directory))
        digest = layout.state_digest(StateDigest.start([tensors[name] for name in layout.names]).result())
        headers = (read_header(file) for file in reversed(self._listed().values()))
        return next((header.file.step for header in headers if header.result_digest == digest), None)

    def info(self) -> list[StepInfo]:
        """Kind, changes and bytes of every step, from the headers alone.

        Raises:
            DeltaLogError: a header is damaged.
        """
        return [StepInfo.of(read_header(file)) for file in self._listed().values()]

    def verify(self, on_step: Callable[[int], None] | None = None) -> list[Problem]:
        """Walk the whole log, rebuild every step and compare every digest; an empty list says that all is well.

        Holds one state in memory, and a second one after a problem. `on_step` is called after each step.
        """
        self._drain()
        return delta_verify.verify(self.directory, self._log_files.backend, on_step)

    def _require_name(self, name: str) -> None:
        if name not in self.layout.names:
            raise DeltaLogError(f"{self.directory}: no tensor {name} in the log")
