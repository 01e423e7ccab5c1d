"""Does training the final subnetwork alone give the dense run's weights? (https://arxiv.org/abs/2505.11711)

    python -m studies.subnetwork.run --output_dir subnetwork    # the runs; a call that was stopped continues
    python -m studies.subnetwork.run --write                    # the table of docs/results.md from subnetwork.json

A dense DPO run determines which weights move by more than 1e-5. A second run from the same start, over the same
batches, trains only those. The results are shares of weights within 1e-4 and 1e-5 of the dense run's: of all weights,
and of the trained ones alone, because the others differ by 1e-5 at most. The weights are fp32; in rows of bf16 they are
rounded to bf16 at the start and before they are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sparse_opt import MaskSet
from sparse_opt.bench.rows import environment
from sparse_opt.tables import markdown_table
from sparse_opt.trainers.arithmetic import make_arithmetic

from ..training import ROOT, fill_tables, in_process, load, train

RESULTS = Path(__file__).with_name("subnetwork.json")
TOLERANCES, MOVED = (1e-4, 1e-5), 1e-5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHARED = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "per_device_train_batch_size": 16}
SFT = SHARED | {"max_steps": 300, "per_device_train_batch_size": 64, "max_length": 32, "learning_rate": 2e-3}
DPO = SHARED | {"max_steps": 150, "max_length": 32, "lr_scheduler_type": "constant"}


def start(folder: Path, dtype: str) -> Path:
    """The small model after SFT on generated arithmetic, rounded to a dtype and kept in fp32; made unless it exists."""
    data, made, rounded = folder / "arithmetic", folder / "sft", folder / f"start_{dtype}"
    if not data.is_dir():
        make_arithmetic(data, hidden_size=128, n_layers=2, seed=0)
    if not (made / "model.safetensors").is_file():
        of_data = {"model_name_or_path": data / "model", "dataset_name": data / "data/demonstrations.jsonl"}
        in_process(train, "sft", SFT | of_data, made)
    if not (rounded / "model.safetensors").is_file():
        model, tokenizer = load(made)
        tokenizer.save_pretrained(rounded)
        model.to(DTYPES[dtype]).float().save_pretrained(rounded)
    return rounded


def measure(folder: Path, dtype: str, learning_rate: float, seed: int) -> dict[str, Any]:
    """The row of a pair of runs."""
    first, runs = start(folder, dtype), folder / f"{dtype}_{learning_rate:g}_{seed}"
    options = {**DPO, "learning_rate": learning_rate, "seed": seed, "model_name_or_path": first}
    options["dataset_name"] = folder / "arithmetic/data/preferences.jsonl"
    dense = in_process(train, "dpo", options, runs / "dense")
    before, one = (weights(where, dtype) for where in (first, runs / "dense"))
    moved = {name: (one[name] - before[name]).abs() > MOVED for name in one}
    mask = MaskSet.from_bool(moved)
    sparse = in_process(train, "dpo", options | {"mask": mask.save(runs / "mask.safetensors")}, runs / "sparse")
    two = weights(runs / "sparse", dtype)
    numel = sum(tensor.numel() for tensor in one.values())
    differences = {name: (one[name] - two[name]).abs() for name in one}
    inside = [differences[name][moved[name]] for name in moved]
    changed = [name for name in moved if bool((two[name] != before[name])[~moved[name]].any())]
    assert not changed, f"the sparse run changed weights outside of its mask in {changed}"
    return {
        "dtype": dtype,
        "learning_rate": learning_rate,
        "seed": seed,
        **{f"accuracy_{name}": [row["rewards/accuracies"] for row in run["log"] if "rewards/accuracies" in row][-1]
           for name, run in (("dense", dense), ("sparse", sparse))},
        "numel": numel,
        "density": mask.nnz / numel,
        "equal": {
            f"{t:g}": {
                "all": sum(int((found <= t).sum()) for found in differences.values()) / numel,
                "trained": sum(int((found <= t).sum()) for found in inside) / max(1, mask.nnz),
            }
            for t in TOLERANCES
        },
    }  # fmt: skip


def weights(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    return {name: t.to(DTYPES[dtype]).float() for name, t in load_file(folder / "model.safetensors").items()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lowest and highest share over the seeds, by dtype and learning rate."""
    found = defaultdict(list)
    for row in rows:
        found[row["dtype"], row["learning_rate"]].append(row)

    def between(of: Sequence[dict[str, Any]], share: Callable[[dict[str, Any]], float]) -> str:
        shares = [share(row) for row in of]
        return f"{100 * min(shares):.2f} - {100 * max(shares):.2f} %"

    columns: dict[str, Callable[[dict[str, Any]], float]] = {"moved": lambda row: row["density"]}
    for which, t in itertools.product(("all", "trained"), TOLERANCES):
        columns[f"{which}, {t:.0e}".replace("e-0", "e-")] = lambda row, w=which, t=t: row["equal"][f"{t:g}"][w]
    lines = [(dtype, f"{rate:g}", *(between(of, share) for share in columns.values()))
             for (dtype, rate), of in found.items()]  # fmt: skip
    lines.append(("published: bf16", "", "5 - 30 %", "100 %", "", "", ""))
    return markdown_table(("weights", "learning rate", *columns), lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.subnetwork.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--output_dir", type=Path, help="folder of new runs, and their results.json")
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--write", action="store_true", help="write the table of subnetwork.json to docs/results.md")
    args = parser.parse_args(argv)
    if args.output_dir is None:
        found = table(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"])
        print(found)
        if args.write:
            fill_tables(ROOT / "docs/results.md", {"subnetwork": found})
        return 0
    folder, rows = args.output_dir.resolve(), []
    folder.mkdir(parents=True, exist_ok=True)
    if (results := folder / "results.json").is_file():
        rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    done = {(row["dtype"], row["learning_rate"], row["seed"]) for row in rows}
    for case in itertools.product(DTYPES, args.learning_rates, args.seeds):
        if case not in done:
            rows.append(measure(folder, *case))
            aside = results.with_suffix(".tmp")
            aside.write_text(json.dumps({"environment": environment("cpu"), "rows": rows}, indent=1), encoding="utf-8")
            aside.replace(results)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
