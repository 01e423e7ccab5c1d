"""A training step on several GPUs: replicate and FSDP2 with SparseAdamW, DDP and FSDP2 with torch's fused AdamW.

Measures the time of a step (forward, backward, optimizer) on one pair of sequences per GPU, the peak memory of a GPU,
and the bytes that the step's collectives reduce, counted call by call. Before a step is timed, its first update is
compared with that of one device on the pairs of all GPUs.

Consecutive steps are timed together (--steps_in_a_row): as in training, the host does not wait for the GPU between
them, nor a rank for the others, except in collectives. All ranks begin them at once, and the time is that of the
slowest. The decoder layers are compiled, under FSDP2 too, unless --eager is given: a step of eager layers has the
time in which the host launches their kernels.

It starts the processes of each number of GPUs of this host and each network, every process on its own share of the
host's cores. One GPU, which efficiency is measured against, is the first; the largest number of GPUs, which the targets
are on, is the second. Rows are written as soon as those of one number of GPUs and network are measured. Variants for
which --limit_s leaves no time are named in a note.

Rows (--variants):
  local_PATTERN_DTYPE      SparseAdamW, every GPU for itself: the step without communication
  replicate_PATTERN_DTYPE  SparseAdamW with a process group: compact gradients are reduced
  ddp                      DistributedDataParallel and fused AdamW: all gradients are reduced
  ddp_whole_layers         the same, each layer compiled into one graph (torch._dynamo.config.optimize_ddp = False)
  fsdp2                    fully_shard of every layer and fused AdamW
  fsdp2_PATTERN_DTYPE      fully_shard of every layer and SparseAdamW
  NAME_graphs              local or replicate with bf16 gradients as a CUDA graph, with its reductions; only if named
PATTERN is element or tile64, DTYPE is that of compact gradients, fp32 or bf16.

Networks (--networks): default is what NCCL chooses between the GPUs; sockets makes NCCL use TCP over the loopback
interface, as a stand-in for a network between hosts.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sparse_opt.options import CommandParser

from .. import ranks, rows
from ..harness import Benchmark, comma_separated, one_of_each, run_in_process
from ..rows import Case, Row, Run
from .reference import wrong_line
from .variants import VARIANTS, Variant, default_variants

SUITE = "distributed"
# Options that the cases of all rows have.
SETTINGS = (
    *("shape", "sequence_length", "density", "learning_rate", "seed"),
    *("gradient_checkpointing", "compile", "dpo", "steps_in_a_row"),
)
_EPILOG = """examples:
  sparse-opt bench distributed                                       # 3B shape, 1 to all GPUs, both networks
  sparse-opt bench distributed --limit_s 540                         # what can be measured in nine minutes
  sparse-opt bench distributed --gpus 4 --networks sockets --resume  # keeps the other rows of the results file
  sparse-opt bench distributed --shape 70b --gpus 4 --networks default --variants fsdp2_tile64_bf16 \\
      --gradient_checkpointing --dpo --eager --steps_in_a_row 1
  sparse-opt bench distributed --small --eager --gpus 1,2            # a tiny model, on the CPU with gloo
"""


def options(parser: CommandParser) -> None:
    what, run = ranks.add_options(parser)
    what.add_argument("--variants", type=comma_separated, help="rows, by commas (default: bf16; no fsdp2 over sockets)")
    what.add_argument("--gradient_checkpointing", action="store_true", help="recompute activations in each layer")
    what.add_argument("--eager", dest="compile", action="store_false", help="do not torch.compile the decoder layers")
    what.add_argument("--dpo", action="store_true", help="with a reference, the base weights; sparse variants only")
    ranks.add_network_options(run)
    run.add_argument("--gpus", type=comma_separated, help="numbers of GPUs, by commas (default: 1,2,4,... to all)")
    run.add_argument("--steps_in_a_row", type=int, default=4, help="timed together; fewer if slow (%(default)s)")
    run.add_argument("--n_rounds", type=int, default=100, help="measurements of each row, at most (%(default)s)")
    run.add_argument("--limit_s", type=float, help="end after this time, with the rows so far")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid. Fills the defaults that depend on the machine."""
    on_cpu, names = args.device == "cpu", args.variants or []
    if error := (
        ranks.problem(args, "distributed")
        or _gpus_problem(args)
        or (one_of_each("variants", names, list(VARIANTS)) if names else "")
    ):
        return error
    if on_cpu and any(VARIANTS[name].cuda_graphs for name in names):
        return "--variants: CUDA graphs need a GPU"
    if args.dpo and not (names and all(VARIANTS[name].pattern for name in names)):
        return "--dpo needs --variants with sparse variants only: their reference is the base weights"
    return ""


def _gpus_problem(args: Namespace) -> str:
    """The error of the numbers of GPUs; empty if they are valid. Fills the default."""
    on_cpu = args.device == "cpu"
    n_gpus = 2 if on_cpu else torch.cuda.device_count()
    try:
        args.gpus = [int(n) for n in args.gpus or [2**k for k in range(n_gpus.bit_length())]]
    except ValueError:
        return f"--gpus {','.join(args.gpus)}: expected numbers"
    args.gpus.sort(key=lambda n: (n > 1, -n))  # the order of the measurements
    if not all(1 <= n and (on_cpu or n <= n_gpus) for n in args.gpus):
        return f"--gpus {','.join(map(str, args.gpus))}: expected 1 to {n_gpus}, the GPUs of this machine"
    return ""


def measure(args: Namespace, run: Run) -> None:
    """Start the processes of each number of GPUs and network, and add their rows."""
    options = {name: getattr(args, name) for name in (*SETTINGS, "device", "n_rounds")}
    options["deadline"] = None if args.limit_s is None else time.time() + args.limit_s
    with tempfile.TemporaryDirectory(prefix="sparse_opt_distributed_") as name:
        folder = Path(name)
        places = [(n, network) for n in args.gpus for network in (args.networks if n > 1 else args.networks[:1])]
        for n, network in places:
            where = f"{n} x {network}"
            variants = args.variants or default_variants(n, network)
            job = options | {"variants": variants, "network": network}
            job["mask_dir"] = str(args.mask_dir or folder)
            module = "sparse_opt.bench.distributed.world"
            results = run_in_process(module, where, job, folder, ranks.NETWORKS[network], n_ranks=n)
            if results is None:
                run.miss(f"a process failed on {where}")
                continue
            for result in results:
                variant = VARIANTS[result["variant"]]
                if result["ms"] is None:
                    run.wrong.append(f"{where}, {variant.name}: {wrong_line(result['check'])}")
                    continue
                run.add(*result_rows(result, case_of(variant, n, network, args)))
            n_right = sum(bool(result["check"] and result["check"]["met"]) for result in results)
            run.note(f"{where}: the first update is that of one device on the pairs of all GPUs in {n_right} rows")
            if left := [name for name in variants if name not in {result["variant"] for result in results}]:
                run.miss(f"no time was left for {', '.join(left)} on {where}")
            run.save()


# Rows


def case_of(variant: Variant, gpus: int, network: str, args: Namespace) -> Case:
    """The case of a variant on so many GPUs and this network."""
    settings = {name: getattr(args, name) for name in SETTINGS}
    own: Case = {"layout": variant.layout, "pattern": variant.pattern, "gradients": variant.grad_dtype or "bf16"}
    own["cuda_graphs"] = variant.cuda_graphs or None
    return rows.clean({"network": network, "gpus": gpus, **own, **settings})


def peers_of(case: Case) -> dict[str, float | Case]:
    """What a row is compared with: on as many GPUs, and on one."""
    dense: Case = {"pattern": None, "gradients": "bf16", "cuda_graphs": None}
    found: dict[str, Case] = {
        "local": {"layout": "local", "network": "default"},
        "ddp": dense | {"layout": "ddp"},
        "fsdp2": dense | {"layout": "fsdp2"},
        "one GPU": {"gpus": 1, "network": "default"} | ({"layout": "local"} if case["layout"] == "replicate" else {}),
    }
    if "pattern" not in case or case["layout"] == "local":
        del found["local"]
    if case["gpus"] == 1 or case["layout"] == "local":
        del found["one GPU"]
    return {name: peer for name, peer in found.items() if rows.clean(case | peer) != case}


def result_rows(result: Mapping[str, Any], case: Case) -> list[Row]:
    """The rows of a variant that was measured: time, memory, and bytes of collectives.

    Replicate must send its compact gradients, of 2 or 4 bytes for each active element and each number that the ranks
    compare, and nothing else. FSDP2 gathers weights too, but must reduce nothing else.
    """
    shared: dict[str, Any] = {"suite": SUITE, "case": case}
    peers = peers_of(case)
    found = [Row.of_timing(result, **shared, peers=peers)]
    for metric, key in (("peak memory", "peak_memory_bytes"), ("peak memory, with building", "build_peak_bytes")):
        if result[key] is not None:
            value = max(result[key], result["peak_memory_bytes"])
            of_peak = {name: peers[name] for name in ("fsdp2",) if name in peers and metric == "peak memory"}
            found.append(Row(**shared, metric=metric, unit="bytes", value=value, peers=of_peak))
    expected: dict[str, float | Case] = {}
    if result["n_reduced"] is not None and case["layout"] != "local":
        expected["active elements"] = result["n_reduced"] * {"fp32": 4, "bf16": 2}[case["gradients"]] / 1e6
    reduced = result["reduced_bytes"]
    for metric, nbytes in (("reduced", reduced), ("all collectives", reduced + result["other_bytes"])):
        found.append(Row(**shared, metric=metric, unit="MB", value=nbytes / 1e6, peers=expected))
    return found


main = Benchmark(
    name="distributed",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    epilog=_EPILOG,
    output="bench/results/distributed.json",
).main
