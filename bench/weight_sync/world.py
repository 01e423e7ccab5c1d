"""The two processes of `bench weight_sync`: rank 0 trains and sends, rank 1 receives."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_opt import MaskSet, SparseAdamW, set_l2_fetch_granularity
from sparse_opt.weight_sync import Message, PendingMessage, WeightReceiver, WeightSender
from sparse_opt.weight_sync.transports import ProcessGroupReceiver, ProcessGroupSender

from ..distributed.variants import VARIANTS as TRAININGS
from ..distributed.variants import Training, make_training
from ..harness import job_main
from ..models import make_model, pair
from ..ranks import Ranks
from ..rows import percentiles

TIMEOUT_S = 120.0
# Name of a row -> pattern of the mask and encoding; without them all weights are broadcast.
VARIANTS: dict[str, tuple[str | None, Literal["values", "changed"] | None]] = {
    "weights": (None, None),
    "element_values": ("element", "values"),
    "element_changed": ("element", "changed"),
    "tile64_values": ("tile64", "values"),
    "tile64_changed": ("tile64", "changed"),
}


class Counted(WeightReceiver):
    """A receiver that keeps the sizes of the last update."""

    sizes: dict[str, int]

    def receive(self, message: Message | PendingMessage | bytes | bytearray | memoryview) -> int | None:
        assert isinstance(message, Message)
        if message.kind == "update":
            header = sum(len(key) + len(value) for key, value in message.header().items())
            self.sizes = {"message_bytes": header + message.nbytes, "sent_values": message.n_values}
        return super().receive(message)


@dataclass
class Row:
    """One variant on this rank: `update` brings rank 1's copy to rank 0's weights."""

    name: str
    weights: dict[str, Tensor]  # of this rank
    update: Callable[[], object]
    close: Callable[[], None]
    sender: WeightSender | None = None
    receiver: Counted | None = None


class World(Ranks):
    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        if self.on_gpu:
            set_l2_fetch_granularity(32, self.device)
        self.ids = pair(self.args.seed, self.args.sequence_length, self.config.vocab_size, self.device)

    def measure(self) -> list[dict[str, Any]]:
        """The rows of all patterns; those of rank 0 are complete."""
        rows = []
        for pattern in dict.fromkeys(VARIANTS[name][0] for name in self.args.variants):
            rows += self._measure(pattern, [name for name in self.args.variants if VARIANTS[name][0] == pattern])
        dist.destroy_process_group()
        return rows

    def _measure(self, pattern: str | None, names: list[str]) -> list[dict[str, Any]]:
        mask = self.mask(pattern or "element")
        training = None
        if self.rank == 0:
            training = make_training(
                TRAININGS[f"local_{pattern or 'element'}_fp32"],
                self.config,
                mask,
                self.device,
                lr=self.args.learning_rate,
                seed=self.args.seed,
                compact_weights=True,
            )
        rows = [self._row(name, training) for name in names]
        times: dict[str, list[float]] = {name: [] for name in names}
        order = random.Random(0)
        right = dict.fromkeys(times, True)
        for i in range(1 + self.args.n_rounds):
            if training is not None:
                training.step([self.ids])
            for row in order.sample(rows, len(rows)):
                ms, _, _ = self.clock(row.update)
                if i:  # the first update builds tables and compiles kernels
                    times[row.name].append(ms)
            if i in (0, self.args.n_rounds):
                for row in rows:
                    right[row.name] &= self._same(row)
        found = [self._result(row, times[row.name], right[row.name], mask) for row in rows]
        for result in found:
            self.print(f"{self.args.network}, {result['variant']}: {result['p20_ms']:.2f} - {result['p80_ms']:.2f} ms")
        for row in rows:
            row.close()
        if training is not None:
            training.close()
        del training, rows
        self.release_memory()
        return found

    def _row(self, name: str, training: Training | None) -> Row:
        model = make_model(self.config, self.device, self.args.seed) if training is None else training.model
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        _, encoding = VARIANTS[name]
        if encoding is None:

            def broadcast() -> None:
                for weight in weights.values():
                    dist.broadcast(weight, 0)

            return Row(name, weights, broadcast, lambda: None)
        address: list[Any] = [None]
        backend: Any = "nccl" if self.on_gpu else "gloo"
        if training is not None:
            assert isinstance(training.optimizer, SparseAdamW)
            sender = WeightSender(training.optimizer, encoding="values" if encoding == "values" else "auto")
            to = ProcessGroupSender(sender, "127.0.0.1:0", backend=backend, timeout=TIMEOUT_S)
            dist.broadcast_object_list([to.address])
            to.wait_for_receivers(1)
            return Row(name, weights, to.update, to.close, sender=sender)
        dist.broadcast_object_list(address)
        receiver = Counted(weights)
        source = ProcessGroupReceiver(receiver, address[0], backend=backend, timeout=TIMEOUT_S)
        source.receive()  # the mask, and the version that the sender begins with

        def close() -> None:
            source.receive()  # that the sender has closed
            source.close()

        return Row(name, weights, source.receive, close, receiver=receiver)

    def _same(self, row: Row) -> bool:
        """Whether all weights of both ranks have the same bits."""
        same = True
        for weight in row.weights.values():
            sent = weight.clone()
            dist.broadcast(sent, 0)
            same &= torch.equal(sent.view(torch.int16), weight.view(torch.int16))
        found: list[Any] = [None, None]
        dist.all_gather_object(found, same)
        return all(found)

    def _result(self, row: Row, times: list[float], right: bool, mask: MaskSet) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if row.receiver is not None:
            own = {**row.receiver.sizes, "receiver_bytes": row.receiver.nbytes()}
        elif row.name == "weights":
            own = {"message_bytes": sum(weight.nbytes for weight in row.weights.values())}
        if row.sender is not None:
            own["stream_ms"] = self._stream_ms(row.sender)
        found: list[Any] = [None, None]
        dist.all_gather_object(found, own)
        p20, ms, p80 = percentiles(times)
        spread = {"ms": ms, "p20_ms": p20, "p80_ms": p80, "n_rounds": len(times)}
        return {"variant": row.name, "nnz": mask.nnz, "right": right, **spread, **found[0], **found[1]}

    def _stream_ms(self, sender: WeightSender) -> float | None:
        """How long `update` keeps the stream of the training busy, in milliseconds; None on a CPU."""
        if not self.on_gpu:
            return None
        times = []
        for _ in range(5):
            self.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            pending = sender.update()
            end.record()
            pending.wait()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)


if __name__ == "__main__":
    sys.exit(job_main(lambda job: World(job).measure()))
