"""Schedules of steps: the meaning of a text, and invalid texts."""

import pytest

from sparse_opt.delta.schedule import Schedule
from sparse_opt.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1,5,10", (1, 5, 10)),
        ("1-4", (1, 2, 3, 4)),
        ("2-11:4", (2, 6, 10)),
        ("every 5", (5, 10)),
        ("every:5,every:4", (4, 5, 8, 10, 12)),
        ("every:5,last", (5, 10, 12)),
        (" 2 , 11-20 ", (2, 11, 12)),
        ("every:2,until:5", (2, 4)),
        ("every:2,1-12:3,until:7,until:5,last", (1, 2, 4, 12)),
        ("40", ()),
    ],
)
def test_steps_of_a_schedule(text, steps):
    schedule = Schedule.parse(text)
    assert tuple(step for step in range(-2, 13) if schedule.due(step, 12)) == steps


def test_without_a_known_end():
    schedule = Schedule.parse("every:3,last")
    assert [step for step in range(8) if schedule.due(step)] == [3, 6]


@pytest.mark.parametrize("text", ["", "0", "every:0", "5-2", "1,,2", "first", "1-9:0", "until:5", "²", "9" * 5000])
def test_what_is_no_schedule(text):
    with pytest.raises(ConfigError, match="step schedule"):
        Schedule.parse(text)
