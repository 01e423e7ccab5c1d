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

import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sparse_opt.cli.parser import CommandParser

from ..harness import NOT_MEASURED, Benchmark, comma_separated, not_between, one_of_each, run_in_process
from ..models import LLAMAS
from ..ranks import NETWORKS
from ..rows import Case, Row, Run
from .world import VARIANTS

_EPILOG = """examples:
  sparse-opt bench weight_sync                                    # 3B shape on two GPUs, both networks
  sparse-opt bench weight_sync --networks default --variants weights,element_values,element_changed
  sparse-opt bench weight_sync --small                            # a tiny model, on the CPU with gloo
"""


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--shape", choices=LLAMAS, default="3b", help="of the Llama (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="of the random masks (%(default)s)")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="of the training steps (%(default)s)")
    what.add_argument("--sequence_length", type=int, default=512, help="tokens of a sequence (%(default)s)")
    run = parser.add_argument_group("how")
    run.add_argument("--variants", type=comma_separated, help="rows, by commas (default: all)")
    run.add_argument("--networks", type=comma_separated, help="of default,sockets (both; on a CPU default)")
    run.add_argument("--n_rounds", type=int, default=20, help="training steps, an update after each (%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="of weights, masks and token ids (%(default)s)")
    run.add_argument("--mask_dir", type=Path, help="folder that keeps the random masks for later runs")
    run.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid. Fills the defaults that depend on the machine."""
    on_cpu = args.device == "cpu"
    if args.small:
        args.shape, args.sequence_length = "tiny", min(args.sequence_length, 32)
    if not on_cpu and torch.cuda.device_count() < 2:
        return f"this needs two GPUs, and torch sees {torch.cuda.device_count()}: --small runs on a CPU"
    args.variants = args.variants or list(VARIANTS)
    args.networks = args.networks or ["default"] if on_cpu else args.networks or list(NETWORKS)
    if error := (
        not_between(args, "sequence_length", at_least=2)
        or one_of_each("networks", args.networks, ["default"] if on_cpu else list(NETWORKS))
        or one_of_each("variants", args.variants, list(VARIANTS))
    ):
        return error
    if args.output is None and args.shape != "3b":
        args.output = Path(f"bench/results/weight_sync_{args.shape}.json")
    args.device = "cpu" if on_cpu else "cuda"
    return ""


SETTINGS = ("shape", "density", "learning_rate", "sequence_length", "seed")


def measure(args: Namespace, run: Run) -> None:
    """Run two processes for each network, and add their rows."""
    settings = {name: getattr(args, name) for name in SETTINGS}
    with tempfile.TemporaryDirectory(prefix="sparse_opt_weight_sync_") as folder:
        for network in args.networks:
            job = settings | {"variants": args.variants, "network": network, "mask_dir": str(args.mask_dir or folder)}
            job |= {"n_rounds": args.n_rounds, "device": args.device}
            module = "sparse_opt.bench.weight_sync.world"
            results = run_in_process(module, network, job, Path(folder), NETWORKS[network], n_ranks=2)
            if results is None:
                run.note(f"{NOT_MEASURED}: network {network}, whose run did not end")
                run.completed = False
            for result in results or []:
                if not result["right"]:
                    run.wrong.append(f"{network}, {result['variant']}: weights differ between the ranks")
                    continue
                for row in result_rows(result, network, settings):
                    run.add(row)
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
    spread = {"p20": result["p20_ms"], "p80": result["p80_ms"], "n": result["n_rounds"]}
    rows = [Row(**shared, metric="time", unit="ms", value=result["ms"], peers=peers, **spread)]
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
