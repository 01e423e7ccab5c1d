"""Weight updates from a trainer to another GPU of one host: the active weights, and all weights.

Two processes, each with a GPU: rank 0 trains a model with SparseAdamW and random token ids, rank 1 has a copy of its
weights, as an inference engine would. After each training step every row brings the copy to the trainer's weights. The
time of an update is from its start on both ranks until the copy has the new weights and has verified them.
The optimizer keeps a copy of the active weights (`compact_weights`), and both GPUs fetch 32 bytes at a time.
The copies are compared with the trainer's weights, bit for bit, after the first update and after the last one.

Rows (--variants):
  weights               one torch.distributed.broadcast for each parameter of the model
  PATTERN_values        all active values in each update
  PATTERN_changed       a bitmap and the changed values
PATTERN is element or tile64.

Networks (--networks): default is what NCCL chooses between the GPUs; sockets makes NCCL use TCP over the loopback
interface, as a stand-in for a network between hosts.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.options import CommandParser
from sparse_opt.weight_sync import Message, PendingMessage, WeightReceiver, WeightSender
from sparse_opt.weight_sync.transports import ProcessGroupReceiver, ProcessGroupSender

from . import ranks
from .distributed.variants import VARIANTS as TRAININGS
from .distributed.variants import Training, make_training
from .harness import Benchmark, comma_separated, job_main, one_of_each, run_in_process
from .models import make_model, pair
from .ranks import NETWORKS, Ranks
from .rows import Case, Row, Run, percentiles

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
class Channel:
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
            p20, _, p80 = percentiles(result["times_ms"])
            self.print(f"{self.args.network}, {result['variant']}: {p20:.2f} - {p80:.2f} ms")
        for row in rows:
            row.close()
        if training is not None:
            training.close()
        del training, rows
        self.release_memory()
        return found

    def _row(self, name: str, training: Training | None) -> Channel:
        model = make_model(self.config, self.device, self.args.seed) if training is None else training.model
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        _, encoding = VARIANTS[name]
        if encoding is None:

            def broadcast() -> None:
                for weight in weights.values():
                    dist.broadcast(weight, 0)

            return Channel(name, weights, broadcast, lambda: None)
        address: list[Any] = [None]
        backend: Any = "nccl" if self.on_gpu else "gloo"
        if training is not None:
            assert isinstance(training.optimizer, SparseAdamW)
            sender = WeightSender(training.optimizer, encoding="values" if encoding == "values" else "auto")
            to = ProcessGroupSender(sender, "127.0.0.1:0", backend=backend, timeout=TIMEOUT_S)
            dist.broadcast_object_list([to.address])
            to.wait_for_receivers(1)
            return Channel(name, weights, to.update, to.close, sender=sender)
        dist.broadcast_object_list(address)
        receiver = Counted(weights)
        source = ProcessGroupReceiver(receiver, address[0], backend=backend, timeout=TIMEOUT_S)
        source.receive()  # the mask, and the version that the sender begins with

        def close() -> None:
            source.receive()  # that the sender has closed
            source.close()

        return Channel(name, weights, source.receive, close, receiver=receiver)

    def _same(self, row: Channel) -> bool:
        """Whether all weights of both ranks have the same bits."""
        same = True
        for weight in row.weights.values():
            sent = weight.clone()
            dist.broadcast(sent, 0)
            same &= torch.equal(sent.view(torch.int16), weight.view(torch.int16))
        found: list[Any] = [None, None]
        dist.all_gather_object(found, same)
        return all(found)

    def _result(self, row: Channel, times: list[float], right: bool, mask: MaskSet) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if row.receiver is not None:
            own = {**row.receiver.sizes, "receiver_bytes": row.receiver.nbytes()}
        elif row.name == "weights":
            own = {"message_bytes": sum(weight.nbytes for weight in row.weights.values())}
        if row.sender is not None:
            own["stream_ms"] = self._stream_ms(row.sender)
        found: list[Any] = [None, None]
        dist.all_gather_object(found, own)
        return {"variant": row.name, "nnz": mask.nnz, "right": right, "times_ms": times, **found[0], **found[1]}

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


# The command

_EPILOG = """examples:
  sparse-opt bench weight_sync --networks default --variants weights,element_values,element_changed
  sparse-opt bench weight_sync --small                            # a tiny model, on the CPU with gloo
"""


def options(parser: CommandParser) -> None:
    _, run = ranks.add_options(parser)
    run.add_argument("--variants", type=comma_separated, default=list(VARIANTS), help="rows, by commas (default: all)")
    ranks.add_network_options(run)
    run.add_argument("--n_rounds", type=int, default=20, help="training steps, an update after each (%(default)s)")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid. Fills the defaults that depend on the machine."""
    if args.device != "cpu" and torch.cuda.device_count() < 2:
        return f"this needs two GPUs, and torch sees {torch.cuda.device_count()}: --small runs on a CPU"
    return ranks.problem(args, "weight_sync") or one_of_each("variants", args.variants, list(VARIANTS))


SETTINGS = ("shape", "density", "learning_rate", "sequence_length", "seed")


def measure(args: Namespace, run: Run) -> None:
    """Run two processes for each network, and add their rows."""
    settings = {name: getattr(args, name) for name in SETTINGS}
    with tempfile.TemporaryDirectory(prefix="sparse_opt_weight_sync_") as folder:
        for network in args.networks:
            job = settings | {"variants": args.variants, "network": network, "mask_dir": str(args.mask_dir or folder)}
            job |= {"n_rounds": args.n_rounds, "device": args.device}
            module = "sparse_opt.bench.weight_sync"
            results = run_in_process(module, network, job, Path(folder), NETWORKS[network], n_ranks=2)
            if results is None:
                run.miss(f"network {network}, whose run did not end")
            for result in results or []:
                if not result["right"]:
                    run.wrong.append(f"{network}, {result['variant']}: weights differ between the ranks")
                    continue
                run.add(*result_rows(result, network, settings))
            run.save()
    n, n_wrong = len([row for row in run.rows if row.metric == "time"]), len(run.wrong)
    run.note(
        f"all weights of both GPUs have the same bits after the first and the last update in {n} of {n + n_wrong} rows"
    )


def result_rows(result: Mapping[str, Any], network: str, settings: Mapping[str, Any]) -> list[Row]:
    """The rows of a variant: time of an update, and bytes for each active element."""
    pattern, encoding = VARIANTS[result["variant"]]
    case: Case = {"network": network, "pattern": pattern, "sent": encoding or "all weights", **settings}
    shared: dict[str, Any] = {"suite": "weight_sync", "case": case}
    whole: Case = {"pattern": None, "sent": "all weights"}
    peers: dict[str, float | Case] = {} if pattern is None else {"all weights": whole}
    rows = [Row.of_samples(result["times_ms"], **shared, metric="time", unit="ms", peers=peers)]
    rows.append(Row(**shared, metric="message", unit="MB", value=result["message_bytes"] / 1e6))
    if pattern is None:
        return rows
    nnz = result["nnz"]
    each = {"message": result["message_bytes"] / nnz, "receiver's memory": sum(result["receiver_bytes"].values()) / nnz}
    bitmap: dict[str, float | Case] = {}
    if encoding == "changed":
        share = result["sent_values"] / nnz
        rows.append(Row(**shared, metric="changed", unit="share", value=share))
        bitmap = {"bitmap and values": 0.125 + 2.1 * share}
    for name, value in each.items():
        peers = bitmap if name == "message" else {}
        rows.append(Row(**shared, metric=f"{name} an element", unit="bytes/nnz", value=value, peers=peers))
    if result.get("stream_ms") is not None:
        rows.append(Row(**shared, metric="stream", unit="ms", value=result["stream_ms"]))
    return rows


main = Benchmark(
    name="weight_sync",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    epilog=_EPILOG,
    output="bench/results/weight_sync.json",
).main

if __name__ == "__main__":
    sys.exit(job_main(lambda job: World(job).measure()))
