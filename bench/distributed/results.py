"""The cases and rows of `bench distributed`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from .. import rows
from ..harness import NOT_MEASURED
from ..rows import Case, Row, Run
from .variants import VARIANTS, Variant, default_variants

SUITE = "distributed"
# Options that the cases of all rows have.
SETTINGS = (
    *("shape", "sequence_length", "density", "learning_rate", "seed"),
    *("gradient_checkpointing", "compile", "dpo", "limit_gib", "steps_in_a_row"),
)


def case_of(variant: Variant, gpus: int, network: str, args: Namespace) -> Case:
    """The case of a variant on so many GPUs and this network."""
    settings = {name: getattr(args, name) for name in SETTINGS}
    own = {"layout": variant.layout, "pattern": variant.pattern, "gradients": variant.grad_dtype or "bf16"}
    return rows.clean({"network": network, "gpus": gpus, **own, **settings})


def peers_of(case: Case) -> dict[str, float | Case]:
    """What a row is compared with: on as many GPUs, and on one."""
    dense: Case = {"pattern": None, "gradients": "bf16"}
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
    """The rows of a variant that was measured: time, memory, bytes of collectives, and the error of its first update.

    Replicate must send its compact gradients, of 2 or 4 bytes for each active element and each number that the ranks
    compare, and nothing else. FSDP2 gathers weights too, but must reduce nothing else.
    """
    shared: dict[str, Any] = {"suite": SUITE, "case": case}
    peers = peers_of(case)
    found = []
    if result["ms"] is not None:
        spread = {"p20": result["p20_ms"], "p80": result["p80_ms"], "n": result["n_rounds"]}
        found.append(Row(**shared, metric="time", unit="ms", value=result["ms"], peers=peers, **spread))
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
    if (check := result["check"]) is not None:
        for name in ("moment", "update"):
            tolerance: dict[str, float | Case] = {"tolerance": check[f"{name}_tolerance"]}
            metric = f"error of the first {name}s"
            found.append(Row(**shared, metric=metric, unit="", value=check[f"{name}_error"], peers=tolerance))
    return found


def missing(run: Run, args: Namespace) -> list[tuple[int, str, str]]:
    """(GPUs, network, variant) of the rows of these options that have no time."""
    return [
        (n, network, name)
        for n in args.gpus
        for network in (args.networks if n > 1 else args.networks[:1])
        for name in args.variants or default_variants(n, network)
        if run.find(SUITE, "time", case_of(VARIANTS[name], n, network, args)) is None
    ]


def missing_line(found: list[tuple[int, str, str]]) -> str:
    """One line that names the rows without a time."""
    places: dict[str, list[str]] = {}
    for n, network, variant in found:
        places.setdefault(f"{n} x {network}", []).append(variant)
    names = "; ".join(f"{where}: {', '.join(variants)}" for where, variants in places.items())
    return f"{NOT_MEASURED}: {names}; the same command with --resume measures them"


def checked_line(run: Run) -> str:
    """How many rows were checked; those with a wrong update are not among the rows."""
    n = len([row for row in run.rows if row.metric == "error of the first updates"])
    return (
        f"the first update is that of one device on the pairs of all GPUs in {n} of {n + len(run.wrong)} checked rows"
    )


def wrong_line(check: Mapping[str, Any]) -> str:
    """The error of an update that is not that of one device."""
    return (
        f"first moments are off by {check['moment_error']:.2e}, expected at most {check['moment_tolerance']:.2e}; "
        f"updates by {check['update_error']:.2e}, expected at most {check['update_tolerance']:.2e}; most of "
        f"the former is in {check['worst_parameter']}"
    )


def progress_line(where: str, result: Mapping[str, Any]) -> str:
    """A variant while the benchmark runs."""
    check = result["check"]
    if check is not None and not check["met"]:
        return f"{where}: {wrong_line(check)}"
    if result.get("ms") is not None:
        return f"{where}: {result['ms']:.1f} ms ({result['p20_ms']:.1f} - {result['p80_ms']:.1f})"
    checked = "not checked" if check is None else f"update within {check['update_error']:.1e} of one device's"
    peak = result["peak_memory_bytes"]
    shown = "" if peak is None else f", peak {rows.quantity(peak, 'bytes')}"
    return f"{where}: {checked}{shown}, {result['reduced_bytes'] / 1e6:.1f} MB reduced"
