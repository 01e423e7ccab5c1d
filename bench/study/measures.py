"""What is measured of a run's update: how many weights changed and where, and the ranks of its matrices.

The weights of a run are removed, so that this is measured within it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .overlaps import overlaps_with
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
    own, rounded = {}, {}
    for name, after in second.items():
        before, device = first[name].to(dtype), after.device
        own[name] = count_changes(before, after, (1e-5,), device=device)
        rounded[name] = count_changes(before.bfloat16(), after.bfloat16(), (), device=device)
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
        masks = {name: first[name].bfloat16() != after.bfloat16() for name, after in second.items()}
        found["overlaps"] = overlaps_with(world.changed, run.name, masks, first)
    return found


def changed_weights(start: Path, final: Path) -> dict[str, Any]:
    """The weights whose bf16 values differ between a start, a folder, and a file: bool tensors by name."""
    import torch
    from safetensors.torch import load_file

    first, second = load_file(start / "model.safetensors"), load_file(final)
    return {name: first[name].to(torch.bfloat16) != after.to(torch.bfloat16) for name, after in second.items()}


def closeness(start: Path, dense: Path, final: Path, device: str) -> dict[str, float]:
    """How close the weights of a run are to those of a dense run, in relation to how far the dense run went.

    Returns:
        Shares of the weights that the dense run changed which differ from its values by at most 1e-5 and 1e-4;
        distance, the norm of the difference of both runs' weights divided by that of the dense run's update; cosine of
        the two updates.
    """
    import torch
    from safetensors.torch import load_file

    model = "model.safetensors"
    first, second, third = (load_file(file, device=device) for file in (start / model, dense, final / model))
    sums = torch.zeros(7, dtype=torch.float64, device=device)
    for name, there in second.items():
        before = first[name].to(there.dtype).double()
        a, b = there.double() - before, third[name].double() - before
        moved, apart = a != 0, (a - b).abs()
        near = [((apart <= tolerance) & moved).sum() for tolerance in (1e-5, 1e-4)]
        sums += torch.stack(
            [moved.sum(), *near, (a * a).sum(), (b * b).sum(), (a * b).sum(), (apart**2).sum()]
        ).double()
    n, near_5, near_4, aa, bb, ab, distance = sums.tolist()
    return {
        "within_1e-5": near_5 / max(n, 1),
        "within_1e-4": near_4 / max(n, 1),
        "distance": (distance / aa) ** 0.5 if aa else 0.0,
        "cosine": ab / (aa * bb) ** 0.5 if aa * bb else 0.0,
    }


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
