"""Schedule: parses which steps of a run are logged: "every:5", "1,2,10", "1-10", "10-100:10", "last", "until:500"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError

_COUNT = r"([1-9][0-9]{0,17})"


@dataclass(frozen=True)
class Schedule:
    """Steps of a run; step n is the state after the n-th optimizer step.

    Attributes: the items of `parse`; ranges are (first, last, stride), both ends included.
    """

    every: tuple[int, ...] = ()
    ranges: tuple[tuple[int, int, int], ...] = ()
    last: bool = False
    until: int | None = None

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse items separated by commas; the schedule has the steps of all of them.

            7          that step
            1-10       both ends included
            10-100:10  every tenth of them: 10, 20, ... 100
            every:5    5, 10, 15, ...
            last       the run's last step
            until:500  ignore steps of the other items after step 500, except the last step

        Raises:
            ConfigError: an item has another form, a step is below 1, or no item names a step.
        """
        every, ranges, last, until = [], [], False, None
        where = f"step schedule '{_shortened(text)}'"
        for item in (part.strip() for part in text.split(",")):
            if item == "last":
                last = True
            elif match := re.fullmatch(f"every[: ]{_COUNT}", item):
                every.append(int(match[1]))
            elif match := re.fullmatch(f"until[: ]{_COUNT}", item):
                until = int(match[1]) if until is None else min(until, int(match[1]))
            elif match := re.fullmatch(f"{_COUNT}(?:-{_COUNT}(?::{_COUNT})?)?", item):
                first, end, stride = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
                if end < first:
                    raise ConfigError(f"{where}: the range '{item}' runs backwards")
                ranges.append((first, end, stride))
            else:
                raise ConfigError(
                    f"{where}: cannot read '{_shortened(item)}'; expected a step, first-last, first-last:stride, "
                    "every:k, last or until:n"
                )
        if not (every or ranges or last):
            raise ConfigError(f"{where}: names no step; expected a step, first-last, every:k or last")
        return cls(tuple(every), tuple(ranges), last, until)

    def due(self, step: int, n_steps: int | None = None) -> bool:
        """Whether to log a step; `n_steps` is the number of the run's last step, if known."""
        if self.last and step == n_steps:
            return True
        if step < 1 or (self.until is not None and step > self.until):
            return False
        return any(step % k == 0 for k in self.every) or any(
            first <= step <= end and (step - first) % stride == 0 for first, end, stride in self.ranges
        )

    def at_most(self, n_steps: int) -> int:
        """An upper bound of the number of due steps in a run of n_steps, which counts a step once for each item."""
        end = n_steps if self.until is None else min(n_steps, self.until)
        in_ranges = sum(len(range(first, min(last, end) + 1, stride)) for first, last, stride in self.ranges)
        return min(n_steps, sum(end // k for k in self.every) + in_ranges + self.last)


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
