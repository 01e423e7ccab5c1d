"""Does training the final subnetwork alone give the dense run's weights? (https://arxiv.org/abs/2505.11711)

A dense DPO run determines which weights move by more than 1e-5. A second run from the same start, over the same
batches, trains only those. The results are shares of weights within 1e-4 and 1e-5 of the dense run's: of all weights,
and of the trained ones alone, because the mask is chosen such that the others differ by 1e-5 at most. The paper reports
100 % at 1e-4 for models of 7 and 8 billion bf16 weights.

The start is a small model after SFT on generated arithmetic (`trainers.arithmetic`). The pairs are its right answers
and near misses.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from sparse_opt import MaskSet
from sparse_opt.cli.parser import CommandParser
from sparse_opt.trainers import dpo, sft
from sparse_opt.trainers.arithmetic import make_arithmetic

from ..common.harness import Benchmark, Report
from ..common.report import Columns, render

TOLERANCES = (1e-4, 1e-5)
MOVED = 1e-5
COLUMNS: Columns = {
    "weights": "{dtype}",
    "learning rate": "{learning_rate:g}",
    "seed": "{seed}",
    "moved": "{density:.1%}",
    "accuracy dense": "{accuracy_dense:.3f}",
    "sparse": "{accuracy_sparse:.3f}",
    **{f"{which} within {t:g}": f"{{equal[{t:g}][{which}]:.2%}}" for which in ("all", "trained") for t in TOLERANCES},
    "same bits": "{same_bits:.2%}",
}


def compare(start: Path, dense: Path, sparse: Path, mask: MaskSet) -> dict[str, Any]:
    """Shares of weights of a sparse run that equal those of a dense one; the folders contain model.safetensors."""
    first, one, two = (load_file(folder / "model.safetensors") for folder in (start, dense, sparse))
    numel = sum(tensor.numel() for tensor in one.values())
    within = {tolerance: [0, 0] for tolerance in TOLERANCES}
    same_bits = 0
    for name, dense_weight in one.items():
        difference = (dense_weight.float() - two[name].float()).abs()
        active = mask.bool(name) if name in mask else torch.zeros(dense_weight.shape, dtype=torch.bool)
        if not torch.equal(two[name][~active], first[name][~active]):
            raise RuntimeError(f"{name}: the sparse run changed weights outside of its mask")
        for tolerance, counts in within.items():
            inside = difference <= tolerance
            counts[0] += int(inside.sum())
            counts[1] += int(inside[active].sum())
        same_bits += int((dense_weight == two[name]).sum())
    return {
        "numel": numel,
        "density": mask.nnz / numel,
        "equal": {f"{t:g}": {"all": all_ / numel, "trained": own / mask.nnz} for t, (all_, own) in within.items()},
        "same_bits": same_bits / numel,
    }


def final_mask(start: Path, end: Path) -> MaskSet:
    """The elements that moved by more than MOVED between two checkpoints."""
    before, after = (load_file(folder / "model.safetensors") for folder in (start, end))

    def moved(name: str) -> Tensor:
        return (after[name].float() - before[name].float()).abs() > MOVED

    return MaskSet.from_bool({name: moved(name) for name in before}, metadata={"method": "final_delta"})


def measure(args: Namespace, folder: Path) -> list[dict[str, Any]]:
    """Train both runs; return a row for each dtype, learning rate and seed."""
    world = make_arithmetic(folder / "arithmetic", hidden_size=args.hidden_size, n_layers=args.n_layers, seed=0)
    start = sft.train(
        sft.SFTConfig(
            policy_name=str(world / "model"),
            dataset=str(world / "data" / "demonstrations.jsonl"),
            output_dir=folder / "sft",
            n_steps=args.sft_steps,
            batch_size=64,
            max_length=32,
            learning_rate=2e-3,
            dtype="fp32",
            device=args.device,
        )
    )["checkpoint"]
    rows = []
    cases = list(itertools.product(args.dtypes, args.learning_rates, args.seeds))
    for dtype, lr, seed in tqdm(cases, unit="pair of runs", disable=None):
        runs = folder / f"{dtype}_{lr:g}_{seed}"
        options: dict[str, Any] = {
            "policy_name": start,
            "dataset": str(world / "data" / "preferences.jsonl"),
            "dtype": dtype,
            "learning_rate": lr,
            "lr_schedule": "constant",
            "seed": seed,
            "n_steps": args.n_steps,
            "batch_size": 16,
            "max_length": 32,
            "device": args.device,
            "sample_steps": None,
            "delta_log_dir": None,
        }
        dense = dpo.train(dpo.DPOConfig(output_dir=runs / "dense", **options))
        first = Path(start)
        if dtype == "bf16":  # what the run read, as it held it
            first = _rounded(first, runs / "start")
        mask = final_mask(first, Path(dense["checkpoint"]))
        mask_file = mask.save(runs / "mask.safetensors")
        sparse = dpo.train(dpo.DPOConfig(output_dir=runs / "sparse", mode="sparse", mask=mask_file, **options))
        rows.append(
            {
                "dtype": dtype,
                "learning_rate": lr,
                "seed": seed,
                "accuracy_dense": dense["last"]["accuracy"],
                "accuracy_sparse": sparse["last"]["accuracy"],
                **compare(first, Path(dense["checkpoint"]), Path(sparse["checkpoint"]), mask),
            }
        )
    return rows


def _rounded(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint's weights in bf16."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def options(parser: CommandParser) -> None:
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--n_steps", type=int, default=200, help="steps of each DPO run (%(default)s)")
    parser.add_argument("--sft_steps", type=int, default=300, help="steps of SFT before them (%(default)s)")
    parser.add_argument("--hidden_size", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--n_layers", type=int, default=2, help="(%(default)s)")


def run(args: Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    report |= {"settings": settings, "rows": rows}


main = Benchmark(
    name="subnetwork",
    command="python -m sparse_opt.bench.training.subnetwork",
    doc=__doc__,
    options=options,
    measure=run,
    text=lambda report: render(COLUMNS, report["rows"]),
    device="auto",
).main

if __name__ == "__main__":
    sys.exit(main())
