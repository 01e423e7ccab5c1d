from __future__ import annotations

import itertools
import random

from sparse_opt.trainers.data.order import GroupedOrder, ShuffledOrder


def test_order_visits_every_example_once_an_epoch_and_can_start_anywhere():
    order = ShuffledOrder(7, seed=1)
    visited = order.take(0, 21)
    epochs = [visited[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert ShuffledOrder(7, seed=1).take(9, 5) == visited[9:14]
    assert ShuffledOrder(7, seed=2).take(0, 21) != visited


def test_grouped_steps_have_examples_of_similar_lengths_and_no_trend():
    generator = random.Random(0)
    lengths = [generator.randint(1, 100) for _ in range(403)]
    order = GroupedOrder(lengths, seed=1, size=4)
    visited = order.take(0, 806)
    epochs = [visited[:403], visited[403:]]
    assert all(sorted(epoch) == list(range(403)) for epoch in epochs) and epochs[0] != epochs[1]
    assert GroupedOrder(lengths, seed=1, size=4).take(500, 9) == visited[500:509]
    steps = [[lengths[index] for index in visited[i : i + 4]] for i in range(0, 400, 4)]
    # Of 200 sorted numbers of 1 to 100, four neighbours differ by 2 on average; four random ones by 60.
    assert sum(max(step) - min(step) for step in steps) / len(steps) < 6
    means = [sum(step) / 4 for step in steps]
    assert abs(sum(means[:50]) / 50 - sum(means[50:]) / 50) < 20
    rises = sum(a < b for a, b in itertools.pairwise(means))
    assert 30 < rises < 70
