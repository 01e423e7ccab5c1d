from __future__ import annotations

from sparse_opt.trainers.data.order import ShuffledOrder


def test_order_visits_every_example_once_an_epoch_and_can_start_anywhere():
    order = ShuffledOrder(7, seed=1)
    visited = order.take(0, 21)
    epochs = [visited[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert ShuffledOrder(7, seed=1).take(9, 5) == visited[9:14]
    assert ShuffledOrder(7, seed=2).take(0, 21) != visited
