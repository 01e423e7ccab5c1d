"""What is measured of a run's update: how many weights changed and where, and the ranks of its matrices.

The weights of a run are removed, so that this is measured within it. The changed weights of dense runs of the seeds are
kept as bits, and compared with those of all such runs before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .plan import TUNING_SEED, Run
from .world import World

# Ranks are taken of every matrix of so many layers, spread over the model.
RANKED_LAYERS = 4


def measure_update(world: World, run: Run, final: Path) -> dict[str, Any]:
    """Compare the weights of a run with the start's.

    Returns:
        Shares of all weights: changed in the dtype of the run, changed_bf16 with both rounded to bf16, and moved by
        more than 1e-5 (changed_1e-5); changed_by_component and changed_by_layer, shares of those. Of a dense run of a
        seed also ranks, over the matrices of `RANKED_LAYERS` layers: mean rank / min(m, n), numerical and effective,
        and the smallest numerical one; and overlaps, see `overlaps_with`.
    """
    import torch
    from safetensors.torch import load_file

    from sparse_opt.analysis import count_changes, sum_changes
    from sparse_opt.analysis.sparsity import changes_by_component, changes_by_layer

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float32}[world.settings["shared"]["dtype"]]
    first, second = (load_file(folder / "model.safetensors", device=world.device) for folder in (world.start, final))
    of_seed = run.trained == "dense" and run.seed != TUNING_SEED
    own, rounded, bits = {}, {}, {}
    for name, after in second.items():
        before, device = first[name].to(dtype), after.device
        own[name] = count_changes(before, after, (1e-5,), device=device)
        rounded[name] = count_changes(before.bfloat16(), after.bfloat16(), (), device=device)
        if of_seed:
            bits[name] = pack(before.bfloat16() != after.bfloat16())
    total = sum_changes(own.values())
    found: dict[str, Any] = {
        "changed": total.share,
        "changed_bf16": sum_changes(rounded.values()).share,
        "changed_1e-5": total.above[0] / total.numel,
        "changed_by_component": {key: round(c.share, 5) for key, c in changes_by_component(rounded).items()},
        "changed_by_layer": {key: round(c.share, 5) for key, c in changes_by_layer(rounded).items()},
    }
    if of_seed:
        found["ranks"] = _ranks({name: second[name].float() - first[name].to(dtype).float() for name in second})
        found["overlaps"] = overlaps_with(world.folder / "changed", run.name, bits)
    return found


def _ranks(updates: Mapping[str, Any]) -> dict[str, float]:
    from statistics import mean

    from sparse_opt.analysis.ranks import rank_stats

    layers = sorted({int(name.split(".layers.")[1].split(".")[0]) for name in updates if ".layers." in name})
    chosen = {layers[round(i * (len(layers) - 1) / max(1, RANKED_LAYERS - 1))] for i in range(RANKED_LAYERS)}
    numerical, effective = [], []
    for name, update in updates.items():
        if update.ndim == 2 and any(f".layers.{layer}." in name for layer in chosen) and bool(update.any()):
            stats = rank_stats(update, method="gram")
            numerical.append(stats.rank.value / min(update.shape))
            effective.append(stats.effective_rank.value / min(update.shape))
    if not numerical:
        return {}
    return {"numerical": mean(numerical), "numerical_min": min(numerical), "effective": mean(effective)}


def pack(mask: Any) -> Any:
    """The values of a bool tensor as bits: [ceil(numel / 8)] uint8 on the CPU, the first in the highest bit."""
    import torch

    flat = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=mask.device)
    return (flat * places).sum(dim=1, dtype=torch.uint8).cpu()


def overlaps_with(folder: Path, name: str, bits: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Keep the changed weights of a run in a folder, and compare them with those kept before.

    Of two runs that end at once, at least one finds the other's file, because both write first.

    Returns:
        Name of the other run -> n, n_other and n_both, the numbers of changed weights, and expected, the number that
        two random sets with these shares of each tensor would have in common.
    """
    import numpy as np
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{name}.tmp"
    save_file(dict(bits), aside)
    aside.replace(folder / f"{name}.safetensors")
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.stem == name:
            continue
        counts = {"n": 0, "n_other": 0, "n_both": 0, "expected": 0.0}
        for key, other in load_file(file).items():
            a, b = bits[key].numpy(), other.numpy()
            n_a, n_b, n_both = (int(np.bitwise_count(x).sum(dtype=np.int64)) for x in (a, b, a & b))
            counts["n"] += n_a
            counts["n_other"] += n_b
            counts["n_both"] += n_both
            counts["expected"] += n_a * n_b / (8 * a.size)
        found[file.stem] = counts
    return found
