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
from sparse_opt.weight_sync.transports import (
    CudaIpcReceiver,
    CudaIpcSender,
    ProcessGroupReceiver,
    ProcessGroupSender,
)

from ..distributed.variants import VARIANTS as TRAININGS
from ..distributed.variants import Training, make_training
from ..harness import job_main
from ..models import make_model, pair
from ..ranks import Ranks
from ..rows import percentiles

TIMEOUT_S = 120.0
PATTERNS = ("element", "tile64")


@dataclass(frozen=True)
class Variant:
    """A row of the table; without a pattern all weights are broadcast."""

    pattern: str | None = None  # of the mask
    encoding: Literal["values", "changed"] | None = None
    transport: Literal["broadcast", "ipc"] = "broadcast"

    @property
    def name(self) -> str:
        if self.pattern is None:
            return "weights"
        return f"{self.pattern}_{self.encoding}" + ("_ipc" if self.transport == "ipc" else "")


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(),
        *(
            Variant(pattern, encoding, transport)
            for pattern in PATTERNS
            for transport in ("broadcast", "ipc")
            for encoding in ("values", "changed")
        ),
    )
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

    variant: Variant
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
        names: list[str] = self.args.variants
        for pattern in dict.fromkeys(VARIANTS[name].pattern for name in names):
            rows += self._measure([VARIANTS[name] for name in names if VARIANTS[name].pattern == pattern])
        dist.destroy_process_group()
        return rows

    def _measure(self, variants: list[Variant]) -> list[dict[str, Any]]:
        pattern = variants[0].pattern or "element"
        mask = self.mask(pattern)
        training = None
        if self.rank == 0:
            training = make_training(
                TRAININGS[f"local_{pattern}_fp32"],
                self.config,
                mask,
                self.device,
                lr=self.args.learning_rate,
                seed=self.args.seed,
                compact_weights=True,
            )
        rows = []
        for variant in variants:
            rows.append(self._row(variant, training, mask))
            self.print(f"{self.args.network}, {variant.name}: connected")
        times: dict[str, list[float]] = {row.variant.name: [] for row in rows}
        order = random.Random(0)
        right = dict.fromkeys(times, True)
        for i in range(1 + self.args.n_rounds):
            if training is not None:
                training.step([self.ids])
            for row in order.sample(rows, len(rows)):
                ms, _, _ = self.clock(row.update)
                if i:  # the first update builds tables and compiles kernels
                    times[row.variant.name].append(ms)
            if i in (0, self.args.n_rounds):
                for row in rows:
                    right[row.variant.name] &= self._same(row)
        found = [self._result(row, times[row.variant.name], right[row.variant.name], mask) for row in rows]
        for result in found:
            self.print(f"{self.args.network}, {result['variant']}: {result['p20_ms']:.2f} - {result['p80_ms']:.2f} ms")
        for row in rows:
            row.close()
        if training is not None:
            training.close()
        del training, rows
        self.release_memory()
        return found

    def _row(self, variant: Variant, training: Training | None, mask: MaskSet) -> Row:
        model = make_model(self.config, self.device, self.args.seed) if training is None else training.model
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        if variant.pattern is None:

            def broadcast() -> None:
                for weight in weights.values():
                    dist.broadcast(weight, 0)

            return Row(variant, weights, broadcast, lambda: None)
        box: list[Any] = [None]
        backend: Any = "nccl" if self.on_gpu else "gloo"
        if training is not None:
            assert isinstance(training.optimizer, SparseAdamW)
            encoding: Any = "values" if variant.encoding == "values" else "auto"
            sender = WeightSender(training.optimizer, encoding=encoding)
            if variant.transport == "ipc":
                to: Any = CudaIpcSender(sender, "127.0.0.1:0", timeout=TIMEOUT_S)
            else:
                to = ProcessGroupSender(sender, "127.0.0.1:0", backend=backend, timeout=TIMEOUT_S)
            dist.broadcast_object_list([to.address])
            to.wait_for_receivers(1)
            return Row(variant, weights, to.update, to.close, sender=sender)
        dist.broadcast_object_list(box)
        receiver = Counted(weights)
        if variant.transport == "ipc":
            source: Any = CudaIpcReceiver(receiver, box[0], timeout=TIMEOUT_S)
        else:
            source = ProcessGroupReceiver(receiver, box[0], backend=backend, timeout=TIMEOUT_S)
        source.receive()  # the mask, and the version that the sender begins with

        def close() -> None:
            source.receive()  # that the sender has closed
            source.close()

        return Row(variant, weights, source.receive, close, receiver=receiver)

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
        variant = row.variant
        own: dict[str, Any] = {}
        if row.receiver is not None:
            own = {**row.receiver.sizes, "receiver_bytes": row.receiver.nbytes()}
        elif variant.pattern is None:
            own = {"message_bytes": sum(weight.nbytes for weight in row.weights.values())}
        if row.sender is not None:
            own["stream_ms"] = self._stream_ms(row.sender)
        found: list[Any] = [None, None]
        dist.all_gather_object(found, own)
        p20, ms, p80 = percentiles(times)
        return {
            "variant": variant.name,
            "nnz": mask.nnz if variant.pattern else None,
            "right": right,
            "ms": ms,
            "p20_ms": p20,
            "p80_ms": p80,
            "n_rounds": len(times),
            **found[0],
            **found[1],
        }

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
