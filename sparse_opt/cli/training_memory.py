"""How much memory training takes, by formula, and which RFT profile and batch size a device has memory for.

Per weight, training takes the weight, its gradient and the optimizer's state (`bytes_per_weight`). Per token of a
forward pass, it takes the activations that the backward pass needs (`bytes_per_token`). Logits are computed in slices,
and are left out. The formulas are those of a Llama trained by these loops, without what torch and CUDA need themselves,
for which `SHARE` leaves room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Share of a device's memory to plan with.
SHARE = 0.9
# Tokens of a sequence, prompt and completion together, in `advice`.
LENGTH = 1024
_LARGEST_BATCH = 32  # the examples of a step in all profiles


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama: what its memory depends on."""

    name: str
    n_weights: float
    n_layers: int
    hidden_size: int
    intermediate_size: int


SHAPES = (
    Shape("0.1 B", 0.107e9, 14, 768, 2304),
    Shape("0.5 B", 0.49e9, 24, 896, 4864),
    Shape("1.2 B", 1.24e9, 16, 2048, 8192),
    Shape("3.2 B", 3.21e9, 28, 3072, 8192),
    Shape("8.0 B", 8.03e9, 32, 4096, 14336),
)


def bytes_per_weight(
    dtype: str,
    mode: str | None = "dense",
    *,
    mask_density: float | None = None,
    master_weights: bool | None = True,
    lean: bool = False,
) -> float:
    """Bytes per weight of the model in training: weight, gradient, moments, and fp32 master weights.

    dense: fp32 4 + 4 + 8; bf16 2 + 4 + 8 and 4 of the master, or 2 + 2 + 4 without masters; fp16 as fp32, and 2 of the
    fp16 copy that autocast holds during a forward pass. sparse: the weight, and per active one 2 of the index, 8 of the
    moments, 4 of the gradient, its initial value, and 4 of the master of 16-bit weights; with the option `lean`, 2 of
    the index, 4 of AdamW's moments and 2 of the gradient. lora: the weight, without the
    adapters.

    Args:
        mask_density: share of active weights in mode sparse.
        master_weights: None is True.
    """
    weight = {"fp32": 4.0, "fp16": 6.0, "bf16": 2.0}[dtype]
    has_masters = dtype == "bf16" and master_weights is not False
    if mode == "lora":
        return weight
    if mode == "sparse":
        if lean:
            return weight + 8 * (1.0 if mask_density is None else mask_density)
        initial = 2 if dtype == "bf16" else 4
        return weight + (1.0 if mask_density is None else mask_density) * (14 + initial + 4 * has_masters)
    if dtype == "bf16":
        return 18.0 if has_masters else 8.0
    return weight + 12


def bytes_per_token(shape: Shape, dtype: str, *, gradient_checkpointing: bool = False) -> float:
    """Bytes of activations per token of a forward pass, kept until the backward pass.

    Per layer the inputs of its matrix products, of attention and of the activation function: 10 numbers per hidden unit
    and 4 per unit of the MLP; with 16-bit numbers the two norms also keep an fp32 copy of what they normalize. With
    `gradient_checkpointing` a layer keeps its input alone, and one layer at a time is recomputed.
    """
    itemsize = 4 if dtype == "fp32" else 2
    whole = itemsize * (10 * shape.hidden_size + 4 * shape.intermediate_size) + (itemsize == 2) * 4 * shape.hidden_size
    if gradient_checkpointing:
        return float(shape.n_layers * itemsize * shape.hidden_size + whole)
    return float(shape.n_layers * whole)


def advice(memory_bytes: int, *, has_bf16: bool) -> list[dict[str, Any]]:
    """For each of `SHAPES`, the profile and the options that a device with this memory can train it with.

    It chooses the first of three ways that has memory for one sequence of `LENGTH` tokens per forward pass, from the
    most accurate to the one that takes the least memory: all weights; a tenth of them under a mask; the same with
    recomputed activations. The first uses the profile balanced on devices with bf16 units and conservative on others;
    the other two use aggressive, with `fp16=true` on devices without bf16 units.

    Returns:
        Rows with model, profile, options (to add on the command line), batch_size (0 if nothing fits), bytes_per_weight
        and bytes_per_token.
    """
    ways = [
        ("balanced", "bf16", "dense", False) if has_bf16 else ("conservative", "fp32", "dense", False),
        ("aggressive", "bf16" if has_bf16 else "fp16", "sparse", False),
        ("aggressive", "bf16" if has_bf16 else "fp16", "sparse", True),
    ]
    return [_first_that_fits(shape, SHARE * memory_bytes, ways) for shape in SHAPES]


def _first_that_fits(shape: Shape, memory_bytes: float, ways: list[tuple[str, str, str, bool]]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": shape.name, "profile": None, "options": [], "batch_size": 0}
    for profile, dtype, mode, checkpointing in ways:
        per_weight = bytes_per_weight(dtype, mode, mask_density=0.1)
        per_token = bytes_per_token(shape, dtype, gradient_checkpointing=checkpointing)
        row |= {"bytes_per_weight": per_weight, "bytes_per_token": per_token}
        n_sequences = int((memory_bytes - shape.n_weights * per_weight) // (LENGTH * per_token))
        if n_sequences >= 1:
            batch_size = min(_LARGEST_BATCH, 1 << (n_sequences.bit_length() - 1))
            steps = _LARGEST_BATCH // batch_size
            options = [f"per_device_train_batch_size={batch_size}", f"gradient_accumulation_steps={steps}"]
            options += ["fp16=true"] if dtype == "fp16" else []
            options += ["gradient_checkpointing=true"] if checkpointing else []
            return {**row, "profile": profile, "options": options, "batch_size": batch_size}
    return row
