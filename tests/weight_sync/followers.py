"""Senders and receivers by gloo in threads of one process, for tests of transports."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from samples import bits, clones, make_weights
from torch import Tensor

from sparse_opt import MaskSet
from sparse_opt.errors import WeightSyncError
from sparse_opt.weight_sync import WeightReceiver, WeightSender
from sparse_opt.weight_sync.transports import ProcessGroupReceiver, ProcessGroupSender

Weights = dict[str, Tensor]
PATIENCE = 20.0  # seconds that no test waits in full unless it fails


def weights_and_mask(pattern: str = "element") -> tuple[Weights, MaskSet]:
    weights = make_weights("mixed")
    return weights, MaskSet.random(weights, density=0.3, pattern=pattern)


def with_other_values(weights: Weights, mask: MaskSet) -> Weights:
    """A copy that differs from the weights in every active element."""
    copy = clones(weights)
    for name, positions in mask.indices.items():
        bits(copy[name])[positions.long()] ^= 1
    return copy


class Follower(threading.Thread):
    """A receiver that takes every version until the sender closes; `versions` and `errors` are what it has met."""

    def __init__(self, address: str, weights: Weights, name: str, *, receiver: WeightReceiver | None = None) -> None:
        super().__init__(daemon=True)
        self.weights, self.versions, self.errors = weights, list[int](), list[str]()
        receiver = WeightReceiver(weights) if receiver is None else receiver
        self.channel = ProcessGroupReceiver(receiver, address, timeout=PATIENCE, name=name)
        self.start()

    def run(self) -> None:
        while True:
            try:
                version = self.channel.receive(PATIENCE)
            except WeightSyncError as error:
                self.errors.append(str(error))
                if len(self.errors) > 3:
                    return
                continue
            if version is None:
                return
            self.versions.append(version)

    def ended(self) -> bool:
        self.join(PATIENCE)
        return not self.is_alive()


@contextmanager
def followed_by(*names: str, timeout: float = PATIENCE) -> Iterator[tuple[Weights, MaskSet, ProcessGroupSender, list]]:
    """Weights, their mask, a channel, and followers of these names that have joined with the same weights."""
    weights, mask = weights_and_mask()
    with sending(WeightSender(weights, mask), timeout=timeout) as channel:
        followers = [Follower(channel.address, clones(weights), name) for name in names]
        channel.wait_for_receivers(len(names), PATIENCE)
        yield weights, mask, channel, followers


def started(work: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


@contextmanager
def sending(weights: WeightSender, *, timeout: float = PATIENCE) -> Iterator[ProcessGroupSender]:
    channel = ProcessGroupSender(weights, "127.0.0.1:0", timeout=timeout)
    try:
        yield channel
    finally:
        channel.close()
