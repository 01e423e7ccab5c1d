"""PtDeltaLog: reads logs of `.pt` files, `base_state.pt` and `deltas_step_{n}.pt`, that other tools have written.

Both are plain dictionaries, name -> dense tensor, written by torch.save. The tools that are known to write them
(https://github.com/ScottBiggs2/Reinforcement-Casino and its relatives, public) take `model.named_parameters()`:

    base_state.pt        every parameter before training, `param.detach().float().cpu()`
    deltas_step_{n}.pt   `param.detach().float().cpu() - base_state[name]` after optimizer step n
    run_metadata.json    sometimes; its `model_name` is kept as `model`

so a bf16 model is logged in fp32, the difference is always taken to the base, a tied parameter appears under its first
name alone, and buffers are missing. Dictionaries in other dtypes (bf16 differences, a bf16 base) are read as well.

The state at step n is base + delta, added in fp32 (fp64 where one of the two is) and rounded to the dtype of the base:
the inverse of what was written, as in the tools' own code to rebuild a checkpoint. It has the bits of the run's weights
except where the subtraction has lost them: a weight that became -0.0 is read as 0.0, and a weight that shrank by more
than 2**16 (bf16 weights, fp32 files) is read with fewer digits. The files do not show which weights these are.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ...errors import DeltaLogError
from ...files import one_line
from ...tensors import as_bits, dtype_name
from ..digest import StateDigest
from ..maintenance import Problem
from ..state import StateLayout, read_state
from ..state_log import require_logged
from ..writer import StepInfo
from .files import file_version, list_pt_files, map_tensors, require_checksums

METADATA_FILE = "run_metadata.json"
Against = Literal["base", "previous"]


class PtDeltaLog:
    """The states of a log of `.pt` files, read tensor by tensor. The module's docstring describes files and arithmetic.

    Files are mapped, and unpickled with `weights_only=True`. Before the first tensor of a file is used, the checksums
    of all its records are compared, which torch.load does not do; this reads the file once more. A file that is written
    to or replaced afterwards is refused; truncating a file ends the process. A parameter of the base that is missing
    from a step's file keeps its value, with a warning. Files in the format of torch before 1.6 have no checksums and
    are refused.

    Args:
        directory: contains the files.
        base_state: the base's file, if it is not `base_state.pt` in the directory.
        against: the state that the differences were taken to. Every known tool uses the base; `previous` is for files
            with the change since the previous step. The files do not record which it is.
        dtype: return floating-point tensors in this dtype instead of the base's. A value that this dtype cannot hold
            exactly is an error.

    Raises:
        DeltaLogError: there is no such log in the directory, or its base cannot be read.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        base_state: str | Path | None = None,
        against: Against = "base",
        dtype: torch.dtype | None = None,
    ) -> None:
        if against not in ("base", "previous"):
            raise DeltaLogError(f"against is {against!r}, expected base or previous")
        self.directory = Path(directory)
        self.against = against
        self.dtype = dtype
        self._files = list_pt_files(self.directory, None if base_state is None else Path(base_state))
        self._read: dict[int, dict[str, Tensor]] = {}
        self._versions: dict[int, tuple[int, ...]] = {}
        self._sound: set[int] = set()
        self._digests: dict[int, str] = {}
        content = self._load(0)
        odd = [name for name, tensor in content.items() if _kind(tensor) == "other"]
        if odd:
            raise DeltaLogError(f"{self._where(0)}: {odd[0]} is {dtype_name(content[odd[0]])}: it has no difference")
        try:
            stored, self._base = read_state(content)
        except DeltaLogError as error:
            raise DeltaLogError(f"{self._where(0)}: {error}") from error
        specs = tuple(replace(spec, dtype=self._shown(spec.dtype)) for spec in stored.tensors)
        self._layout = replace(stored, tensors=specs)

    @property
    def steps(self) -> tuple[int, ...]:
        """0, which is the base, and the steps that have a file, ascending."""
        return tuple(self._files)

    @property
    def layout(self) -> StateLayout:
        """The tensors of the base, in its order; names that share a storage in it are tied."""
        return self._layout

    @property
    def metadata(self) -> dict[str, str]:
        """The strings and numbers of `run_metadata.json`, with `model_name` also as `model`; empty without the file.

        Raises:
            DeltaLogError: the file is not a JSON object.
        """
        path = self.directory / METADATA_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise DeltaLogError(f"{path}: cannot be read: {one_line(error)}") from error
        if not isinstance(content, dict):
            raise DeltaLogError(f"{path}: holds a {type(content).__name__}, expected a JSON object")
        found = {key: str(value) for key, value in content.items() if isinstance(value, str | int | float)}
        return ({"model": found["model_name"]} if "model_name" in found else {}) | found

    def file(self, step: int) -> Path:
        """Return the file of a step. Raises DeltaLogError if the step is not logged."""
        require_logged(self.directory, step, self._files)
        return self._files[step]

    def digest(self, step: int) -> str:
        """Return `StateLayout.state_digest` of the state at a step, in the dtypes of `layout`; reads every tensor."""
        if step not in self._digests:
            tensors = (tensor for name in self.layout.names for _, tensor in self.tensor_states(name, [step]))
            self._digests[step] = self.layout.state_digest(
                [StateDigest.start([tensor]).result()[0] for tensor in tensors]
            )
        return self._digests[step]

    def tensor_states(self, name: str, steps: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, the named tensor at that step), on the CPU, for ascending logged steps.

        Each yielded tensor is a copy for the caller. With `against="previous"` the steps in between are read too.

        Raises:
            DeltaLogError: a step is not logged, the name is not in the log, a file is damaged or does not fit the
                base, or a value has no exact form in the requested dtype.
        """
        if name not in self._base:
            raise DeltaLogError(f"{self.directory}: no tensor {name} in the log")
        for step in steps:
            self.file(step)
        self._require_sound(0)
        base = self._base[name]
        at, running = 0, base
        for step in steps:
            if self.against == "base":
                running = base if step == 0 else self._sum(base, name, step)
            elif step < at:
                raise DeltaLogError(f"{self.directory}: step {step} after step {at}, expected ascending steps")
            else:
                for between in self.steps[1:]:
                    if at < between <= step:
                        running = self._sum(running, name, between)
            at = step
            tensor = self._in_dtype(running, name, step)
            self._require_unchanged(0)
            yield step, tensor

    def load(self, step: int) -> dict[str, Tensor]:
        """Return the state at a logged step, on the CPU; further names of tied tensors share the first one's tensor."""
        state = {name: tensor for name in self.layout.names for _, tensor in self.tensor_states(name, [step])}
        return state | {alias: state[name] for alias, name in self.layout.aliases.items()}

    @torch.no_grad()
    def apply_(self, model: nn.Module, step: int) -> None:
        """Set a model's parameters to the values at a logged step. Buffers that are not in the log do not change.

        Raises:
            DeltaLogError: as `tensor_states`; or names, shapes, dtypes or ties of the parameters differ from the log.
                Tensors that were read before the error have been written to the model.
        """
        found, targets = read_state(model)
        specs = {spec.name: spec for spec in self.layout.tensors}
        specs |= {alias: replace(specs[first], name=alias) for alias, first in self.layout.aliases.items()}
        tensors = {spec.name: spec for spec in found.tensors if spec.name in specs or spec.name not in found.buffers}
        ties = {alias: tensors[first] for alias, first in found.aliases.items() if alias in specs}
        tensors |= {alias: replace(spec, name=alias) for alias, spec in ties.items()}
        logged, given = (StateLayout(tuple(of.values()), {}, frozenset()) for of in (specs, tensors))
        logged.require_same(given, f"{self.directory}: step {step}")
        # The model's own tensors first, so that its further names of tied ones are held against the new values.
        for name in sorted(specs, key=lambda name: name not in targets):
            for _, tensor in self.tensor_states(self.layout.aliases.get(name, name), [step]):
                if name in targets:
                    targets[name].copy_(tensor)
                elif not torch.equal(as_bits(targets[found.aliases[name]]), as_bits(tensor)):
                    first = found.aliases[name]
                    raise DeltaLogError(
                        f"{self._where(step)}: {name} and {first} are tied in the model, not in the log"
                    )

    def info(self, on_tensor: Callable[[], None] | None = None) -> list[StepInfo]:
        """Return, for every step, the number of elements whose bits differ from the previous step, and the file's size.

        The files do not store these numbers, so this reads all files; `on_tensor` is called after each tensor.
        """
        befores = (None, *self.steps[:-1]) if self.against == "previous" else (None, *(0 for _ in self.steps[1:]))
        parents = dict(zip(self.steps, befores, strict=True))
        changed = dict.fromkeys(self.steps, 0)
        for name in self.layout.names:
            before: Tensor | None = None
            for step, tensor in self.tensor_states(name, self.steps):
                if before is not None:
                    changed[step] += int((as_bits(before) != as_bits(tensor)).sum())
                before = tensor
            if on_tensor is not None:
                on_tensor()
        return [
            StepInfo(
                step=step,
                kind="difference" if step else "base",
                changed=changed[step],
                numel=self.layout.numel,
                bytes=self.file(step).stat().st_size,
                level="",
                masked=False,
                parent_step=parents[step],
            )
            for step in self.steps
        ]

    def verify(self, on_step: Callable[[int], None] | None = None) -> list[Problem]:
        """Read every file, compare its checksums, and check it against the base; return the problems found.

        The files have no digest of a state, so this cannot detect files of different runs.
        """
        problems = []
        for step, path in self._files.items():
            try:
                self._require_sound(step)
                if step:
                    for name in self._differences(step):
                        self._difference(name, step)
            except DeltaLogError as error:
                others = step == 0 or self.against == "previous"
                lost = tuple(s for s in self.steps if s >= step) if others else (step,)
                problems.append(Problem(path.name, str(error), lost))
            if on_step is not None:
                on_step(step)
        return problems

    def exact_dtype(self) -> torch.dtype | None:
        """Return the 16-bit dtype that holds every weight of an fp32 base exactly, as for a bf16 model, or None."""
        self._require_sound(0)
        wide = [tensor for tensor in self._base.values() if tensor.dtype == torch.float32]
        dtypes = (torch.bfloat16, torch.float16) if wide else ()
        found = next((dtype for dtype in dtypes if all(_is_exact(tensor, dtype) for tensor in wide)), None)
        self._require_unchanged(0)
        return found

    def __repr__(self) -> str:
        return f"PtDeltaLog({str(self.directory)!r}, {len(self.steps)} steps, last {self.steps[-1]})"

    def _where(self, step: int) -> str:
        return f"{self._files[step]}: step {step}"

    def _shown(self, stored: str) -> str:
        floating = getattr(torch, stored).is_floating_point
        return stored if self.dtype is None or not floating else str(self.dtype).removeprefix("torch.")

    def _load(self, step: int) -> dict[str, Tensor]:
        self._versions[step] = file_version(self._files[step], self._where(step))
        return map_tensors(self._files[step], self._where(step))

    def _differences(self, step: int) -> dict[str, Tensor]:
        if step not in self._read:
            where = self._where(step)
            content = self._load(step)
            names = set(self._base) | set(self.layout.aliases)
            unknown = [name for name in content if name not in names]
            if unknown:
                raise DeltaLogError(f"{where}: holds {unknown[0]}, which {self._files[0].name} does not")
            absent = [name for name in self._base if name not in content]
            if absent:
                warnings.warn(
                    f"{where}: holds no difference for {len(absent)} of {len(self._base)} tensors of the base, the "
                    f"first of them {absent[0]}: they keep their values",
                    stacklevel=2,
                )
            self._read[step] = content
        return self._read[step]

    def _difference(self, name: str, step: int) -> Tensor | None:
        """Return the checked difference of one tensor, under any of its names, or None if the file has none."""
        delta = self._differences(step).get(name)
        if delta is None:
            return None
        where, first = self._where(step), self.layout.aliases.get(name, name)
        base = self._base[first]
        if delta.layout != torch.strided or delta.is_quantized or delta.device.type != "cpu":
            raise DeltaLogError(f"{where}: {name} is {delta.layout} on {delta.device}, expected a dense CPU tensor")
        if delta.shape != base.shape or _kind(delta) != _kind(base):
            raise DeltaLogError(
                f"{where}: {name} is {dtype_name(delta)} {list(delta.shape)}, in the base it is "
                f"{dtype_name(base)} {list(base.shape)}"
            )
        if first != name:
            other = self._differences(step).get(first)
            if (
                other is None
                or other.dtype != delta.dtype
                or not torch.equal(as_bits(other.contiguous()), as_bits(delta.contiguous()))
            ):
                raise DeltaLogError(f"{where}: {name} and {first} are tied in the base and differ here")
        return delta

    def _sum(self, start: Tensor, name: str, step: int) -> Tensor:
        self._require_sound(step)
        for alias, first in self.layout.aliases.items():
            if first == name:
                self._difference(alias, step)
        delta = self._difference(name, step)
        if delta is None:
            return start
        if not start.is_floating_point():
            found = start + delta.to(start.dtype)
        else:
            wide = torch.promote_types(torch.promote_types(start.dtype, delta.dtype), torch.float32)
            found = (start.to(wide) + delta.to(wide)).to(start.dtype)
        self._require_unchanged(step)
        return found

    def _in_dtype(self, tensor: Tensor, name: str, step: int) -> Tensor:
        dtype = getattr(torch, self._shown(dtype_name(tensor)))
        if not _is_exact(tensor, dtype):
            count = int((tensor.to(dtype).to(tensor.dtype) != tensor).logical_and_(~tensor.isnan()).sum())
            raise DeltaLogError(
                f"{self._where(step)}: {name}: {count} of {tensor.numel()} values have no exact "
                f"{str(dtype).removeprefix('torch.')} form; they are {dtype_name(tensor)}"
            )
        # Mapped tensors are copied too, so that the caller's writes do not appear in the next read.
        return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _require_sound(self, step: int) -> None:
        if step not in self._sound:
            require_checksums(self._files[step], self._where(step))
            self._sound.add(step)

    def _require_unchanged(self, step: int) -> None:
        """Raise if the file has changed since its checksums were compared. Call it after using mapped tensors."""
        where = self._where(step)
        if file_version(self._files[step], where) != self._versions[step]:
            raise DeltaLogError(f"{where}: the file was written to or replaced while it was read: open the log again")


def _kind(tensor: Tensor) -> str:
    """Return the kind of a tensor's dtype; `other` for dtypes that torch cannot add."""
    if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return "float"
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return "integer" if tensor.dtype in integers else "other"


def _is_exact(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a dtype holds every value of a tensor exactly; NaN counts as exact in every dtype."""
    if dtype == tensor.dtype or not tensor.is_floating_point():
        return True
    back = tensor.to(dtype).to(tensor.dtype)
    return bool(((back == tensor) | tensor.isnan()).all())
