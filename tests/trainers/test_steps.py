from __future__ import annotations

import pytest

from sparse_opt.errors import ConfigError
from sparse_opt.trainers.order import ShuffledOrder
from sparse_opt.trainers.steps import parse_steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1,5,10", {1, 5, 10}),
        ("1-4", {1, 2, 3, 4}),
        ("every:5", {5, 10}),
        ("every:5,last", {5, 10, 12}),
        ("last", {12}),
        (" 2 , 11-20 ", {2, 11, 12}),
        ("40", set()),
    ],
)
def test_parse_steps(text, steps):
    assert parse_steps(text, 12) == steps


@pytest.mark.parametrize("text", ["", "0", "every:0", "5-2", "1,,2", "-3", "every:x", "first"])
def test_wrong_schedules(text):
    with pytest.raises(ConfigError, match="step schedule"):
        parse_steps(text, 12)


def test_order_visits_every_example_once_an_epoch_and_can_start_anywhere():
    order = ShuffledOrder(7, seed=1)
    visited = order.take(0, 21)
    epochs = [visited[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert ShuffledOrder(7, seed=1).take(9, 5) == visited[9:14]
    assert ShuffledOrder(7, seed=2).take(0, 21) != visited
